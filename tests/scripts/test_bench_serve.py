"""The serving benchmark: what it times, what it counts, and what it refuses."""

import pathlib

import jax
import numpy as np
import pytest
from absl.testing import flagsaver
from flax import nnx

from deepseek_jax.config import CacheFormats, Config, ModelConfig, ServeConfig
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.serve import decode
from scripts import bench_serve

pytestmark = pytest.mark.usefixtures("quick_compile")

# A layer in the encoder and one in the decoder, of about the same cost.
MODEL = ModelConfig(
    vocab_size=16, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_lora_rank=8,
    o_groups=2, n_routed_experts=4, num_experts_per_tok=2, sliding_window=4,
    compress_ratios=(2, 1), kv_source_layer_ids=(0, 1), index_source_layer_ids=(0, 1),
    index_n_heads=2, index_head_dim=32, index_topk=4, max_position_embeddings=4096,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
  return jax.jit(lambda: Transformer(MODEL, rngs=nnx.Rngs(0)))()


@pytest.mark.slow
def test_decode_is_timed_at_each_context_and_compiled_once_for_it(model, monkeypatch):
  seen = []
  step = decode.step

  def spied(model, cache, *rest):
    seen.append((cache.capacity, int(cache.lengths[0])))
    return step(model, cache, *rest)

  monkeypatch.setattr(decode, "step", spied)
  found = bench_serve.time_decode(Config(MODEL), model, [256, 512], steps=3, repeats=2)
  assert set(found) == {"seconds_per_step", "speed_ratio", "compilations"}
  assert set(found["seconds_per_step"]) == {"256", "512"}
  for spread in (*found["seconds_per_step"].values(), found["speed_ratio"]):
    assert 0 < spread["min"] <= spread["median"] <= spread["max"]
  assert found["compilations"] == 2
  # Contexts alternate, and none is outgrown.
  assert [capacity for capacity, _ in seen] == [256, 512] + ([256] * 3 + [512] * 3) * 2
  for capacity in (256, 512):
    lengths = [length for c, length in seen if c == capacity]
    assert lengths == list(range(capacity - 12, capacity - 5))


def test_a_step_that_is_compiled_again_is_no_figure(model, monkeypatch):
  class Counting:
    sizes = iter(range(100))

    def _cache_size(self):
      return next(self.sizes)

  class Ready(np.ndarray):

    def block_until_ready(self):
      return self

  logits = np.zeros((1, 16)).view(Ready)
  monkeypatch.setattr(decode, "program", Counting())
  monkeypatch.setattr(decode, "step", lambda model, cache, *rest: (cache, logits))
  with pytest.raises(ValueError, match="compiled again"):
    bench_serve.time_decode(Config(MODEL), model, [256], steps=1, repeats=1)


@pytest.mark.parametrize("storage", [CacheFormats("float32", "float32", "float32"), CacheFormats()])
def test_the_tables_hold_finite_entries_up_to_the_length(storage):
  config = Config(MODEL, serve=ServeConfig(cache=storage))
  cache = bench_serve.random_cache(config, 300, 290, seed=1)
  assert cache.lengths == [290]
  tables = *cache.main_kv, *cache.index_keys, cache.encoder_window, cache.decoder_window
  for table in tables:
    rows = np.asarray(table.read(jax.numpy.float32))
    assert np.isfinite(rows).all()
    assert len(np.unique(rows)) >= 8
    assert table.layout.storage in (storage.main_kv, storage.index, storage.window_kv)


@pytest.mark.slow
def test_the_longer_the_prompt_the_nearer_is_arm_b_to_half_of_arm_a():
  """Of the decoder's layer the entries are computed for every row, and the rest for W of them."""
  ratios = bench_serve.count_prefill(Config(MODEL), [32, 512], chunk=16)
  assert set(ratios) == {"32", "512"}
  assert 0.4 < ratios["512"] < ratios["32"] < 1


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"contexts": ["100", "300"]}, "--contexts is .*; each must exceed 246"),
        ({"contexts": []}, "--contexts is .*; each must exceed 246"),
        ({"config": None}, "--config is missing"),
    ],
)
def test_bad_flags_are_refused_and_named(values, says):
  tiny = str(pathlib.Path(__file__).parents[2] / "configs" / "tiny.py")
  if not bench_serve.flags.FLAGS.is_parsed():
    bench_serve.flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(**({"config": tiny} | values)):
    with pytest.raises(ValueError, match=says):
      bench_serve.main()
