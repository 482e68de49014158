"""Released sizes without memory: exact parameter counts, the structure, and lowering."""

import collections
import math
import time

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from configs import flash
from deepseek_jax.config import Config
from deepseek_jax.nn.engram import allocated_rows
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.schedule import Mode

CONFIG = Config.from_config_dict(flash.get_config())


@pytest.fixture(scope="module")
def model():
  return nnx.eval_shape(lambda: Transformer(CONFIG.model, CONFIG.compute, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def sizes(model):
  """Parameters of one layer (of the whole for the top ones) by (layer, name)."""
  found = {}
  for path, leaf in nnx.to_flat_state(nnx.state(model)):
    if path[0] != "runs":
      found[None, ".".join(path)] = math.prod(leaf.shape)
      continue
    for spec in (run := model.schedule.runs[path[1]]):
      assert leaf.shape[0] == len(run)
      found[spec.layer, ".".join(path[2:])] = math.prod(leaf.shape[1:])
  return found


def total(sizes, layer, prefix):
  return sum(n for (at, name), n in sizes.items() if at == layer and name.startswith(prefix))


def test_backbone_and_engram_tables(sizes):
  tables = sum(n for (_, name), n in sizes.items() if name == "engram.embed.weight")
  c = CONFIG.model
  unused = sum(allocated_rows(n) - n for n in c.engram_num_embeddings) * c.engram_head_dim
  assert tables - unused == 196_613_849_600
  assert sum(sizes.values()) - tables == 551_880_835_184


def test_every_piece(sizes):
  in_every_layer = {"attn_norm": 5120, "ffn_norm": 5120, "ffn.gate": 1_966_848}
  for layer in range(40):
    own = total(sizes, layer, "attn.compressor") + total(sizes, layer, "attn.indexer")
    assert total(sizes, layer, "attn.") - own == 126_617_408
    assert total(sizes, layer, "ffn.experts") == 384 * 35_389_440
    assert total(sizes, layer, "ffn.shared_experts") == 35_389_440
    assert total(sizes, layer, "hc_") == 983_094
    for prefix, count in in_every_layer.items():
      assert total(sizes, layer, prefix) == count
  for layer in (2, 8, 14):
    assert total(sizes, layer, "attn.compressor") == 5_243_392
    assert total(sizes, layer, "attn.indexer") == 5_472_384
  assert total(sizes, 20, "attn.compressor") == 2_621_952
  assert total(sizes, 20, "attn.indexer") == 5_472_384
  for layer in (24, 28, 32, 36):
    assert total(sizes, layer, "attn.indexer") == 5_406_720
  for layer in (1, 14):
    assert total(sizes, layer, "engram.") - sizes[layer, "engram.embed.weight"] == 157_327_360
  assert sizes[None, "embed.weight"] == sizes[None, "head.weight"] == 129280 * 5120
  assert sizes[None, "norm.weight"] == 5120


def test_layers_own_what_their_mode_gives_them_and_no_more(model, sizes):
  """No per-head query norm, additive position bias or Hadamard matrix of the predecessor either."""
  everywhere = {
      "attn.attn_sink", "attn.wq_a.weight", "attn.q_norm.weight", "attn.wq_b.weight",
      "attn.wkv.weight", "attn.kv_norm.weight", "attn.wo_a.weight", "attn.wo_b.weight",
      "attn_norm.weight", "ffn_norm.weight", "ffn.gate.weight", "ffn.gate.bias",
      "ffn.gate.bias_vl", *(f"ffn.{bank}.w{i}.weight" for bank in ("experts", "shared_experts")
                            for i in (1, 2, 3)),
      *(f"hc_{site}_{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale")),
  }  # fmt: skip
  queries = {"attn.indexer.wq_b.weight", "attn.indexer.weights_proj.weight"}
  keys = {"attn.indexer.wk.weight", "attn.indexer.k_norm.weight"}
  entries = {"attn.compressor.wkv.weight", "attn.compressor.norm.weight"}
  gate = {"attn.compressor.wgate.weight"}
  engram = {f"engram.{x}" for x in ("embed.weight", "wkv.weight", "q_weight", "k_weight")}
  by_layer = collections.defaultdict(set)
  for layer, name in sizes:
    by_layer[layer].add(name)
  for spec in model.schedule.layers:
    expected = set(everywhere)
    if spec.selects:
      expected |= queries
    if spec.mode is Mode.FULL:
      expected |= keys | entries | (gate if spec.ratio > 1 else set())
    if spec.engram is not None:
      expected |= engram
    assert by_layer[spec.layer] == expected, spec
  assert by_layer[None] == {"embed.weight", "head.weight", "norm.weight"}


def test_parameters_are_the_only_variables(model):
  assert all(isinstance(v, nnx.Param) for _, v in nnx.to_flat_state(nnx.state(model)))


def test_engram_layers_need_ngrams(tiny):
  inputs = tiny.inputs([[1] * 4])
  with pytest.raises(ValueError, match=r"ngrams is None; layers \(2,\) are Engram layers"):
    tiny.run(tiny.model(), inputs._replace(ngrams=None))


@pytest.mark.slow
def test_released_sizes_lower_with_gradients_in_a_minute(model):
  """1,024 rows are beyond every static threshold but the candidate pool's 2,048 blocks."""
  length = 1024
  of = lambda *shape, dtype=jnp.int32: jax.ShapeDtypeStruct((1, length, *shape), dtype)
  rows = Rows(of(), of(), of(), of(dtype=jnp.bool_))

  def loss(model, tokens, rows, ngrams):
    return jnp.mean(model.logits(model(tokens, rows, ngrams).hidden))

  start = time.monotonic()
  lowered = jax.jit(jax.grad(loss)).lower(model, of(), rows, of(4))
  seconds = time.monotonic() - start
  assert "f32" in lowered.as_text()[:100_000]
  assert seconds < 60
