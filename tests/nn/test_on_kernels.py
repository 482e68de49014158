"""The model of configs/tiny.py on the Pallas kernels, interpreted: the reference's values."""

import dataclasses
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

from deepseek_jax import tokenizer
from deepseek_jax.config import Config
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer

PAD_CLASS = 1


def tiny(kernels: str) -> Config:
  """The sizes in Full, Full with the pool and Reindex, with as many choices as the kernel takes.

  All rows are one chunk: JAX has no recomputation (`jax.checkpoint`) of interpreted kernels. No
  rounding to the cache formats, which is not continuous.
  """
  path = pathlib.Path(__file__).parents[2] / "configs" / "tiny.py"
  spec = importlib.util.spec_from_file_location("tiny", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = Config.from_config_dict(module.get_config())
  model = dataclasses.replace(
      config.model, num_hidden_layers=3, compress_ratios=(2, 1, 1),
      kv_source_layer_ids=(0, 1), index_source_layer_ids=(0, 1, 2), candidate_source_layer_id=1,
      index_topk=128, candidate_topk_blocks=128, engram_layer_ids=(1,),
      engram_num_embeddings=config.model.engram_num_embeddings[:1],
  )  # fmt: skip
  return dataclasses.replace(
      config,
      model=model,
      compute=dataclasses.replace(config.compute, kernels=kernels, row_chunk=256, quantize=()),
  )


def inputs(segments, config):
  """A line of packed documents."""
  segments = np.asarray(segments, np.int32)[None]
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, config.vocab_size, segments.shape).astype(np.int32)
  order = config.engram_max_ngram_size
  ngrams = np.full((*segments.shape, order), PAD_CLASS, np.int32)
  for number in set(segments[0]) - {0}:
    own = segments[0] == number
    classes = tokens[0, own] % config.engram_compressed_vocab_size
    ngrams[0, own] = tokenizer.ngrams(classes, PAD_CLASS, order)
  return tokens, Rows.of_segments(segments), ngrams


@pytest.mark.slow
def test_logits_and_gradients_of_a_packed_line():
  """Two documents, the first longer than the window, and padding; the index loss too."""
  rows = [1] * 37 + [2] * 9 + [0] * 2

  @jax.jit
  def run(model, tokens, rows, ngrams):
    def loss(model):
      out = model(tokens, rows, ngrams, index_loss=True)
      logits = model.logits(out.hidden)
      live = (rows.segments > 0)[..., None]
      total = jnp.sum(jnp.where(live, jnp.sin(logits), 0.0))
      return total + out.index_loss, (jnp.where(live, logits, 0.0), out.index_loss)

    return jax.value_and_grad(loss, has_aux=True)(model)

  def on(kernels):
    config = tiny(kernels)
    model = Transformer(config.model, config.compute, rngs=nnx.Rngs(0))
    (_, (logits, index_loss)), gradient = run(model, *inputs(rows, config.model))
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(gradient))
    return logits, index_loss, {jax.tree_util.keystr(k): np.asarray(v) for k, v in leaves}

  logits, index_loss, gradient = on("reference")
  with pltpu.force_tpu_interpret_mode():
    own_logits, own_index_loss, own_gradient = on("pallas")
  np.testing.assert_allclose(own_logits, logits, atol=2e-5 * np.abs(logits).max())
  np.testing.assert_allclose(own_index_loss, index_loss, rtol=1e-4)
  assert index_loss > 0
  for name, expected in gradient.items():
    scale = np.abs(expected).max() + 1e-3
    np.testing.assert_allclose(own_gradient[name], expected, atol=2e-4 * scale, err_msg=name)
