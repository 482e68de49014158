"""One row a request by the kernels that read weights in the stack: the values of the layers."""

import dataclasses
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

from deepseek_jax.cache import Cache
from deepseek_jax.config import CacheFormats, Config
from deepseek_jax.nn import one_row
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.serve.decode import decode_row

LINES = 3


def small(kernels: str) -> Config:
  """Released latents and few of everything else; a run of two Reuse layers behind a Full one."""
  path = pathlib.Path(__file__).parents[2] / "configs" / "tiny.py"
  spec = importlib.util.spec_from_file_location("tiny", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = Config.from_config_dict(module.get_config())
  model = dataclasses.replace(
      config.model, num_hidden_layers=4, compress_ratios=(2, 2, 2, 1), kv_source_layer_ids=(0, 3),
      index_source_layer_ids=(0, 3), candidate_source_layer_id=3, index_topk=128,
      candidate_topk_blocks=128, candidate_block_size=8, engram_layer_ids=(),
      engram_num_embeddings=(), hidden_size=256, num_attention_heads=16, head_dim=512,
      qk_rope_head_dim=64, q_lora_rank=128, o_lora_rank=128, o_groups=2, moe_intermediate_size=128,
      n_routed_experts=4, num_experts_per_tok=2, index_head_dim=128, index_n_heads=2,
      sliding_window=128, vocab_size=64,
  )  # fmt: skip
  quantize = ("main_kv", "index", "window_kv")
  compute = dataclasses.replace(config.compute, kernels=kernels, quantize=quantize)
  return dataclasses.replace(config, model=model, compute=compute)


def decoded(kernels, rows=3):
  """Logits after some rows of lines that stand at different places; one stops after its first."""
  config = small(kernels)
  model = Transformer(config.model, config.compute, rngs=nnx.Rngs(0))
  cache = Cache.init(config.model, CacheFormats(), batch=LINES, capacity=256)
  cache = jax.tree.map(jnp.asarray, cache)
  step = jax.jit(lambda *args: decode_row(*args, None))
  found = []
  for i in range(rows):
    tokens = jnp.asarray(np.arange(LINES) * 7 + i * 11, jnp.int32) % 64
    live = jnp.asarray([True, True, i == 0])
    cache, logits = step(model, cache, tokens, live)
    found.append(np.asarray(logits)[:2] if i else np.asarray(logits))
  return np.concatenate(found), cache


@pytest.mark.slow
def test_logits_and_windows(monkeypatch):
  expected, cache = decoded("reference")
  taken = []
  layer = one_row.layer
  monkeypatch.setattr(one_row, "layer", lambda *a: taken.append(a[2]) or layer(*a))
  with pltpu.force_tpu_interpret_mode():
    own, own_cache = decoded("pallas")
  assert len(taken) == 3  # a Full layer, a scanned run of two, a Full layer
  np.testing.assert_allclose(own, expected, atol=2e-3 * np.abs(expected).max())
  read = lambda c: np.asarray(c.encoder_window.read(jnp.float32))
  np.testing.assert_allclose(read(own_cache), read(cache), atol=0.1 * np.abs(read(cache)).max())
  assert np.abs(read(own_cache) - read(cache)).mean() < 1e-4
