"""Compiled programs of serving for a configuration, as shapes: nothing is allocated or run.

Each function returns `(fn, args, donate)` as `pallas_kernels.aot` takes it. `loops` counts what a
compiled program does for each layer of a scanned run.
"""

import collections
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from deepseek_jax.cache import Cache
from deepseek_jax.config import CacheFormats, Config
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.serve import decode, prefill
from deepseek_jax.serve.weights import Weights, whole


def _shape(a) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(a.shape, a.dtype)


def _serving(config: Config, batch: int, capacity: int) -> tuple[Weights, Cache]:
  model = nnx.eval_shape(lambda: Transformer(config.model, config.compute, rngs=nnx.Rngs(0)))
  cache = Cache.init(config.model, CacheFormats(), batch=batch, capacity=capacity)
  return jax.tree.map(_shape, (Weights.of(model), cache))


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.int32)


def decode_step(config: Config, *, batch: int, capacity: int) -> tuple:
  """One token a line, over a cache of `capacity` tokens a line."""
  weights, cache = _serving(config, batch, capacity)
  classes = _integers(config.model.vocab_size) if config.model.engram_layer_ids else None
  live = jax.ShapeDtypeStruct((batch,), jnp.bool_)
  return decode.decode_row, (weights, cache, _integers(batch), live, classes), (1,)


def prefill_chunk(config: Config, *, batch: int, rows: int, capacity: int) -> tuple:
  """`rows` rows of a prompt through the encoder, and the decoder's entries of them."""
  weights, cache = _serving(config, batch, capacity)
  integers, flags = _integers(batch, rows), jax.ShapeDtypeStruct((batch, rows), jnp.bool_)
  order = config.model.engram_max_ngram_size
  ngrams = _integers(batch, rows, order) if config.model.engram_layer_ids else None

  def chunk(weights, cache, tokens, rows, ngrams):
    cache = whole(weights).encode(tokens, rows, ngrams, cache).cache
    return prefill.advance(cache, rows, ngrams, None)

  where = Rows(integers, integers, integers, flags)
  return chunk, (weights, cache, integers, where, ngrams), (1,)


# What moves no data and runs nothing.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id iota".split()
)


def loops(hlo: str) -> list[Mapping[str, int]]:
  """Operations in the body of every loop of an optimised program, by kind, in program order.

  Fusions, kernels (`custom-call`) and everything else that the device starts count one each; the
  start and the end of an asynchronous copy together count one, a loop inside counts one.
  """
  bodies, name = collections.defaultdict(collections.Counter), None
  for line in hlo.splitlines():
    if line.endswith("{") and " = " not in line:
      name = line.removeprefix("ENTRY ").split(" ")[0]
    elif name is not None and (kind := re.search(r" = .*? ([a-z][a-z0-9\-]*)\(", line)) is not None:
      if kind[1] not in _FREE and not kind[1].endswith("-done"):
        bodies[name][kind[1].removesuffix("-start")] += 1
  return [dict(bodies[body]) for body in re.findall(r" while\(.*body=(%?[\w.\-]+)", hlo)]
