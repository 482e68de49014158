"""Programs of a configuration as shapes: nothing is allocated or run.

Each function returns `(fn, args, donate)` as `pallas_kernels.aot` takes it. `loops` counts what a
compiled program does for each layer of a scanned run.
"""

import collections
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepseek_jax import sharding
from deepseek_jax.cache import Cache
from deepseek_jax.config import CacheFormats, Config
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.parameter_paths import path_names
from deepseek_jax.serve import decode, prefill
from deepseek_jax.serve.weights import Weights, whole
from deepseek_jax.train import step
from deepseek_jax.train.data import Batch


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
  """Shapes that the experiment's model allocates, by dotted path; for `ledger.Ledger.of`."""
  build = lambda: Transformer(config.model, config.compute, rngs=nnx.Rngs(0))
  leaves = jax.tree_util.tree_flatten_with_path(nnx.split(nnx.eval_shape(build))[1])[0]
  return {".".join(path_names(path)): leaf.shape for path, leaf in leaves}


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.int32)


def _serving(config: Config, batch: int, capacity: int) -> tuple[Transformer, Cache]:
  model = nnx.eval_shape(lambda: Transformer(config.model, config.compute, rngs=nnx.Rngs(0)))
  formats = config.serve.cache or CacheFormats()
  # An empty cache is allocated: of one line and of two, which shows where the lines are.
  one, two = (Cache.init(config.model, formats, batch=n, capacity=capacity) for n in (1, 2))

  def shape(a, b):
    sizes = (batch if n != m else n for n, m in zip(a.shape, b.shape))
    return jax.ShapeDtypeStruct(tuple(sizes), a.dtype)

  return model, jax.tree.map(shape, one, two)


def _on(mesh: Mesh | None, fn: Callable, model: Transformer, cache: Cache, *rest: Any) -> tuple:
  """A program of (weights, cache, rest) → (cache, ...), every device with its own lines.

  Of `rest`, what does not lead with the lines of the cache is the same for all devices.
  """
  if mesh is None:
    return fn, (Weights.of(model), cache, *rest), (1,)
  lines = PartitionSpec(sharding.LINES)
  batch = cache.lengths.shape[0]
  specs = (
      sharding.parameter_specs(model, mesh, dense=model.compute.spread_dense),
      sharding.cache_specs(cache),
      *jax.tree.map(lambda a: lines if a.shape[0] == batch else PartitionSpec(), rest),
  )
  split = jax.shard_map(
      lambda model, *rest: fn(model.with_whole_ends(), *rest),
      mesh=mesh, in_specs=specs, out_specs=(specs[1], lines), check_vma=False,
  )  # fmt: skip
  return split, sharding.shapes((model, cache, *rest), specs, mesh), (1,)


def decode_step(config: Config, *, batch: int, capacity: int, mesh: Mesh | None = None) -> tuple:
  """One token a line, over a cache of `capacity` tokens a line; `batch` lines in all."""
  model, cache = _serving(config, batch, capacity)
  classes = _integers(config.model.vocab_size) if config.model.engram_layer_ids else None
  live = jax.ShapeDtypeStruct((batch,), jnp.bool_)
  return _on(mesh, decode.decode_row, model, cache, _integers(batch), live, classes)


def prefill_chunk(
    config: Config, *, batch: int, rows: int, capacity: int, mesh: Mesh | None = None
) -> tuple:
  """`rows` rows of a prompt through the encoder, and the decoder's entries of them."""
  model, cache = _serving(config, batch, capacity)
  integers, flags = _integers(batch, rows), jax.ShapeDtypeStruct((batch, rows), jnp.bool_)
  order = config.model.engram_max_ngram_size
  ngrams = _integers(batch, rows, order) if config.model.engram_layer_ids else None

  def chunk(weights, cache, tokens, rows, ngrams):
    cache = whole(weights).encode(tokens, rows, ngrams, cache).cache
    cache = prefill.advance(cache, rows, ngrams, None)
    return cache if mesh is None else (cache, cache.lengths)

  where = Rows(integers, integers, integers, flags)
  return _on(mesh, chunk, model, cache, integers, where, ngrams)


def train_step(config: Config, *, mesh: Mesh | None = None) -> tuple:
  """One step of training; its batch is `accumulation` × `batch_size` lines of `seq_len` rows."""
  t, order = config.train, config.model.engram_max_ngram_size
  at = None if mesh is None else NamedSharding(mesh, sharding.batch_spec(leading=1))
  lead = t.accumulation, t.batch_size, t.seq_len
  each = lambda *more, dtype=jnp.int32: jax.ShapeDtypeStruct((*lead, *more), dtype, sharding=at)
  rows = Rows(each(), each(), each(), each(dtype=jnp.bool_))
  ngrams = each(order) if config.model.engram_layer_ids else None
  batch = Batch(each(), rows, ngrams, each(), each(dtype=jnp.float32))
  graphdef, _ = step.abstract_model(config)
  return step.make_step(graphdef, config, mesh), (step.abstract_state(config, mesh), batch), (0,)


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
