"""A tiny model with every layer mode, and its compiled passes, for the laws of `nn`."""

import dataclasses
import functools
import json
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deepseek_jax import tokenizer
from deepseek_jax.config import ComputeConfig, ModelConfig
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"

# Two window layers, an encoder source of ratio 2 with an Engram, the decoder's source with a pool,
# a Reindex layer and Reuse layers behind every selection; two runs that can be scanned.
CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=8,
    num_attention_heads=2,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=16,
    o_lora_rank=8,
    o_groups=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    sliding_window=4,
    compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1),
    kv_source_layer_ids=(2, 5),
    index_source_layer_ids=(2, 5, 6),
    index_n_heads=8,
    index_head_dim=32,
    index_topk=4,
    candidate_source_layer_id=5,
    candidate_topk_blocks=3,
    candidate_block_size=2,
    max_position_embeddings=64,
    engram_layer_ids=(2,),
    engram_num_embeddings=(120,),
    engram_max_ngram_size=3,
    engram_vocab_size=20,
    engram_n_heads=2,
    engram_head_dim=8,
    engram_compressed_vocab_size=16,
)
# The decoder alone, for laws that need many compilations: source with pool, Reindex, two Reuse.
SHORT = dataclasses.replace(
    CONFIG,
    num_hidden_layers=4,
    compress_ratios=(1, 1, 1, 1),
    kv_source_layer_ids=(0,),
    index_source_layer_ids=(0, 1),
    candidate_source_layer_id=0,
    engram_layer_ids=(),
    engram_num_embeddings=(),
)
# Chunks of 7 rows: 24 rows make four chunks, the last one ragged, in two bands.
COMPUTE = ComputeConfig(row_chunk=7)
PAD_CLASS = 1
# Laws compare results with results, so they need no fast code; this halves the time to compile.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class Inputs(NamedTuple):
  tokens: np.ndarray
  rows: Rows
  ngrams: np.ndarray | None


class Tiny:
  """What the laws share: models, inputs, and one compiled pass for many cases."""

  config = CONFIG
  short = SHORT
  compute = COMPUTE
  compiled = staticmethod(compiled)

  @functools.cache
  @staticmethod
  def model(config: ModelConfig = CONFIG, compute: ComputeConfig = COMPUTE, seed: int = 0):
    """A model with every parameter random, sinks, norms and biases too."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, compute, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(seed)

    def draw(leaf):
      x = rng.standard_normal(leaf.shape)
      matrix = leaf.ndim >= 2 and leaf.shape[-1] >= 8 and leaf.shape[-2] >= 8
      return jnp.asarray(x * leaf.shape[-1] ** -0.5 if matrix else 0.5 + 0.3 * x, leaf.dtype)

    return nnx.merge(graph, jax.tree.map(draw, state))

  @staticmethod
  def inputs(segments, tokens=None, *, config: ModelConfig = CONFIG) -> Inputs:
    """Rows of packed documents (0 is padding), tokens and the n-grams of each document alone."""
    segments = np.asarray(segments, np.int32)
    if tokens is None:  # one id a row, so that a row's gradient is a row of the embedding's
      tokens = np.random.default_rng(1).permutation(CONFIG.vocab_size)[: segments.size]
    tokens = np.asarray(tokens, np.int32).reshape(segments.shape)
    if not config.engram_layer_ids:
      return Inputs(tokens, Rows.of_segments(segments), None)
    ngrams = np.full((*segments.shape, CONFIG.engram_max_ngram_size), PAD_CLASS, np.int32)
    ngrams[..., 0] = -1
    classes = tokens % CONFIG.engram_compressed_vocab_size
    for line, number in ((b, s) for b in range(len(segments)) for s in set(segments[b]) - {0}):
      at = segments[line] == number
      ngrams[line, at] = tokenizer.ngrams(
          classes[line, at], PAD_CLASS, CONFIG.engram_max_ngram_size
      )
    return Inputs(tokens, Rows.of_segments(segments), ngrams)

  @staticmethod
  @functools.partial(compiled, static_argnames=("trace", "select_all", "index_loss"))
  def run(model, inputs, **how):
    """Output of a pass with logits in place of the hidden states."""
    out = model(*inputs, **how)
    return out._replace(hidden=model.logits(out.hidden))

  @classmethod
  def logits(cls, model, inputs) -> np.ndarray:
    return np.asarray(cls.run(model, inputs).hidden)

  @staticmethod
  @compiled
  def gradient(model, inputs, weights):
    """Σ weights · probe(logits), and its gradient with respect to every parameter."""

    def total(model):
      logits = model.logits(model(*inputs).hidden)
      return jnp.sum(weights * jnp.sin(logits).sum(-1))

    return jax.value_and_grad(total)(model)

  @classmethod
  def sensitivity(cls, model, inputs, weights) -> np.ndarray:
    """|gradient| of the weighted rows' outputs with respect to each row's own embedding [B, T]."""
    grads = cls.gradient(model, inputs, jnp.asarray(weights, jnp.float32))[1]
    return np.abs(np.asarray(grads.embed.weight[...])[inputs.tokens]).max(-1)


@pytest.fixture(scope="session")
def golden_config():
  """Configuration of the golden tiny model."""
  return ModelConfig.from_released(
      json.loads((GOLDEN / "model_args.json").read_text())["text_config"]
  )


@pytest.fixture(scope="session")
def filled():
  """Returns `filled(make, arrays)`: the module that `make` builds, holding the named arrays."""

  def fill(make, arrays):
    graph, state = nnx.split(nnx.eval_shape(make))
    unused = set(arrays)

    def take(path, leaf):
      name = ".".join(str(k.key) for k in path if hasattr(k, "key"))
      unused.discard(name)
      value = jnp.asarray(arrays[name], leaf.dtype)
      assert value.shape == leaf.shape, name
      return value

    state = jax.tree_util.tree_map_with_path(take, state)
    assert not unused
    return nnx.merge(graph, state)

  return fill


@pytest.fixture(scope="session")
def tiny():
  return Tiny
