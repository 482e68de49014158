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


# What moves no data and runs nothing; asynchronous copies run beside the core.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id iota copy-start"
    " slice-start".split()
)
# Custom calls of the compiler that only bracket an asynchronous operation or name a buffer.
_BRACKETS = re.compile(r'custom_call_target="(PrepareAsyncCall|AllocateBuffer|ConcatBitcast)')


_SINGLE = re.compile(r"\w+\[1?\](\{\S*\})?")  # type of one number


def loops(hlo: str) -> list[Mapping[str, int]]:
  """Kernels in the body of every loop of an optimised program, by kind, in program order.

  A kernel is what the core starts and waits for: a fusion, a custom call (Pallas kernels are such),
  a sort, a copy into another layout and every other operation on arrays, a loop inside as one. Not
  counted: arithmetic on single numbers, which is the scalar unit's, asynchronous copies and slices,
  which bring operands nearer beside other work, and what moves nothing.
  """
  bodies, name = collections.defaultdict(collections.Counter), None
  for line in hlo.splitlines():
    if line.endswith("{") and " = " not in line:
      name = line.removeprefix("ENTRY ").split(" ")[0]
      continue
    found = name and re.match(r"\s+(?:ROOT )?%?\S+ = (.*?) ([a-z][a-z0-9\-]*)\(", line)
    if not found or found[2] in _FREE or found[2].endswith("-done") or _BRACKETS.search(line):
      continue
    if not _SINGLE.fullmatch(found[1]):
      bodies[name][found[2].removesuffix("-start")] += 1
  return [dict(bodies[body]) for body in re.findall(r" while\(.*body=(%?[\w.\-]+)", hlo)]
