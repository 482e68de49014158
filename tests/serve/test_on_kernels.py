"""Serving on the Pallas kernels, interpreted, at the head sizes that they take."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

from deepseek_jax.cache import Cache
from deepseek_jax.config import CacheFormats, ComputeConfig, ModelConfig
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.serve import decode, prefill, replay

# Heads, latents, window and index keys as the fused decode kernel and the packed scores take them;
# an encoder source of ratio 2, the decoder's source with a pool, a Reindex and a Reuse layer.
CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=5,
    num_attention_heads=16,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=32,
    o_lora_rank=16,
    o_groups=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    sliding_window=64,
    compress_ratios=(0, 2, 1, 1, 1),
    kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2, 3),
    index_n_heads=4,
    index_head_dim=128,
    index_topk=128,
    candidate_source_layer_id=2,
    candidate_topk_blocks=128,
    candidate_block_size=8,
    max_position_embeddings=512,
)
LENGTHS = 150, 7  # one line has more entries than the Top-K, one hardly any
COMPUTE = ComputeConfig(quantize=("main_kv", "index", "window_kv"), kernels="reference")


def model_on(kernels: str) -> Transformer:
  compute = dataclasses.replace(COMPUTE, kernels=kernels)
  return Transformer(CONFIG, compute, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_decode_steps_read_packed_caches_as_the_reference_does():
  model = model_on("reference")
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, CONFIG.vocab_size, n) for n in LENGTHS]
  cache = Cache.init(CONFIG, CacheFormats(), batch=2, capacity=256)
  reader = prefill.Reader(model, (64, 128))
  cache, _, _ = reader.prefill(cache, prompts, [replay.exact(n) for n in LENGTHS])
  cache = jax.tree.map(np.asarray, cache)
  tokens, live = np.array([3, 5], np.int32), np.array([True, True])

  def two_steps(kernels):
    on, logits = jax.tree.map(np.array, cache), []
    for _ in range(2):
      on, new = decode.step(model_on(kernels), on, tokens, live, None)
      logits.append(np.asarray(new))
    return jax.tree.map(np.asarray, on), np.stack(logits)

  expected_cache, expected = two_steps("reference")
  with pltpu.force_tpu_interpret_mode():
    on, logits = two_steps("pallas")
  np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max())
  for ours, theirs in zip(jax.tree.leaves(on), jax.tree.leaves(expected_cache)):
    if ours.dtype == np.int32:  # the last bit of a stream may round a packed channel the other way
      assert np.sum(ours != theirs) <= 1e-4 * ours.size
    else:
      np.testing.assert_allclose(ours, theirs, atol=2e-5)
  assert on.lengths.tolist() == [n + 2 for n in LENGTHS]
