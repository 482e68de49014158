"""Serving on a mesh: every device has its own requests and shares of the experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deepseek_jax import sharding
from deepseek_jax.cache import Cache
from deepseek_jax.config import (
    CacheFormats,
    ComputeConfig,
    Config,
    MeshConfig,
    ModelConfig,
    ServeConfig,
)
from deepseek_jax.eval import programs
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.serve import decode, prefill

LINES, CAPACITY, READ = 8, 64, 40

MODEL = ModelConfig(
    vocab_size=40, hidden_size=64, moe_intermediate_size=16, num_hidden_layers=4,
    num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_lora_rank=32,
    o_groups=1, n_routed_experts=16, num_experts_per_tok=3, sliding_window=12,
    compress_ratios=(2, 2, 1, 1), kv_source_layer_ids=(0, 2), index_source_layer_ids=(0, 2, 3),
    index_n_heads=8, index_head_dim=32, index_topk=4, candidate_source_layer_id=2,
    candidate_topk_blocks=3, candidate_block_size=4, hc_mult=2, hc_sinkhorn_iters=2,
    max_position_embeddings=64, engram_layer_ids=(1,), engram_num_embeddings=(348,),
    engram_max_ngram_size=3, engram_vocab_size=75, engram_n_heads=2, engram_head_dim=32,
    engram_compressed_vocab_size=40,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("spread", [False, True])
def test_a_chunk_and_a_step_are_those_of_one_device(spread):
  compute = ComputeConfig(spread_dense=spread)
  formats = CacheFormats.of(compute)
  mesh = MeshConfig(data=2, expert=4)
  config = Config(model=MODEL, compute=compute, mesh=mesh, serve=ServeConfig(cache=formats))
  mesh = sharding.make_mesh(config.mesh)
  model = Transformer(MODEL, compute, rngs=nnx.Rngs(0))
  cache = Cache.init(MODEL, formats, batch=LINES, capacity=CAPACITY)
  cache = jax.tree.map(jnp.asarray, cache)
  rng = np.random.default_rng(0)
  tokens = jnp.asarray(rng.integers(3, 40, (LINES, READ)), jnp.int32)
  # Lines of different lengths, one of them without a row.
  segments = (np.arange(READ) < np.array([40, 7, 23, 0, 12, 40, 1, 30])[:, None]).astype(np.int32)
  rows = Rows.of_segments(jnp.asarray(segments))
  at = np.arange(READ)[:, None] - np.arange(3)
  ngrams = jnp.where(jnp.asarray(at >= 0), tokens[:, np.maximum(at, 0)], 2)
  ngrams = ngrams.at[..., 0].set(jnp.where(rows.segments > 0, ngrams[..., 0], -1))
  newest, classes = jnp.asarray(rng.integers(3, 40, LINES), jnp.int32), jnp.arange(40)
  live = jnp.asarray(segments[:, 0] > 0)

  def alone(cache):
    cache = prefill.encode(model, cache, tokens, rows, ngrams)
    return decode.step(model, cache, newest, live, classes)

  def spread_out(cache):
    shapes = dict(batch=LINES, capacity=CAPACITY, mesh=mesh)
    chunk, args, _ = programs.prefill_chunk(config, rows=READ, **shapes)
    place = lambda tree, like: jax.device_put(tree, jax.tree.map(lambda a: a.sharding, like))
    inputs = place((model, tokens, rows, ngrams), (args[0], *args[2:]))
    specs = sharding.placed(sharding.cache_specs(cache), mesh)
    cache, _ = jax.jit(chunk)(inputs[0], jax.device_put(cache, specs), *inputs[1:])
    step, args, _ = programs.decode_step(config, **shapes)
    return jax.jit(step)(inputs[0], cache, *place((newest, live, classes), args[2:]))

  copy = jax.tree.map(jnp.copy, cache)
  (one, expected), (other, found) = alone(copy), spread_out(cache)
  keep = np.asarray(live)
  np.testing.assert_allclose(np.asarray(found)[keep], np.asarray(expected)[keep], atol=1e-5)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)
