"""Released shards straight into sharded parameters: each process reads the bytes of its shards."""

import itertools
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from deepseek_jax.checkpoint import parts
from deepseek_jax.checkpoint.parts import Part
from deepseek_jax.checkpoint.shards import Shards
from deepseek_jax.nn.transformer import Transformer

# Values decoded at one time, and bytes mapped at one time.
_BLOCK_BYTES = 16 << 20


class Loaded(NamedTuple):
  """A model from released shards, and the names of the tensors that it has no use for."""

  model: Transformer
  skipped: list[str]


def load(shards: Shards, model: Transformer, *, keep: parts.Keep = lambda path: False) -> Loaded:
  """The model with every parameter read from `shards` (spec 13), array by array.

  A process reads only what its devices hold, and each part of it once. Beside the arrays that are
  finished, its memory holds the slice of one device and a few blocks of 16 MiB.

  Args:
    shards: the checkpoint.
    model: as `nnx.eval_shape` makes it. The sharding of a `jax.ShapeDtypeStruct` in it, if any, is
      that of the parameter; its dtype is what values are decoded to.
    keep: parameters, by path, that stay in FP8 or FP4: their value becomes a
      `quantised.Quantised`. Those that are released in BF16 or F32 are never asked about.

  Raises:
    ValueError: a tensor is missing, unknown, or has another dtype or shape than the model gives it.
  """
  planned = parts.plan(model, keep)
  skipped = parts.check(shards.tensors, planned)
  graph = nnx.split(model)[0]
  return Loaded(
      nnx.merge(graph, jax.tree.map(lambda part: assemble(shards, part), planned)), skipped
  )


def assemble(shards: Shards, part: Part) -> jax.Array:
  """One array in its sharding; on the first local device if it has none."""
  home = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  sharding = part.sharding or home
  holders: dict[Any, list[jax.Device]] = {}
  for device, index in sharding.addressable_devices_indices_map(part.shape).items():
    bounds = tuple(s.indices(n)[:2] for s, n in zip(index, part.shape))
    holders.setdefault(bounds, []).append(device)
  pieces = []
  for bounds, devices in holders.items():
    block = read(shards, part, tuple(slice(*b) for b in bounds))
    copies = [jax.device_put(block, device) for device in devices]
    # The next block may take this one's memory only after the transfer.
    jax.block_until_ready(copies)
    pieces += copies
  return jax.make_array_from_single_device_arrays(part.shape, sharding, pieces)


def read(shards: Shards, part: Part, index: tuple[slice, ...]) -> np.ndarray:
  """A block of an array of the model, in the array's dtype.

  Args:
    shards: the checkpoint.
    part: the array.
    index: a slice without a step for every axis. Nothing is read of rows that the file does not
      have; they are zeros, as values and as codes with their scales.
  """
  index = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, part.shape))
  out = np.empty([s.stop - s.start for s in index], part.dtype)
  lead, inner = index[: part.depth], index[part.depth :]
  for at in itertools.product(*(range(s.start, s.stop) for s in lead)):
    target = out[tuple(i - s.start for i, s in zip(at, lead))]
    target[max(0, part.released_rows - inner[0].start) :] = 0
    for rows in _row_blocks(inner, part):
      place = target[rows.start - inner[0].start : rows.stop - inner[0].start]
      place[...] = _rows(shards, part, part.names[at], (rows, *inner[1:]))
  return out


def _row_blocks(inner: tuple[slice, ...], part: Part):
  """Released rows of `inner[0]`, cut at multiples of 32 so that no scale is read twice."""
  step, first = parts.block_rows(part, _BLOCK_BYTES), inner[0].start
  stop = max(first, min(inner[0].stop, part.released_rows))
  edges = [first, *range((first // step + 1) * step, stop, step), stop]
  return (slice(a, b) for a, b in itertools.pairwise(edges) if a < b)


def _rows(shards: Shards, part: Part, name: str, index: tuple[slice, ...]) -> np.ndarray:
  if part.role == "scales":
    return shards.read(parts.scale_name(name), index)
  if part.stored is None or part.role == "codes":
    return shards.read(name, index)
  fmt, (rows, columns) = part.stored, index
  cut = lambda s, size: slice(s.start // size, -(-s.stop // size))
  skipped = columns.start % fmt.per_byte
  codes = shards.read(name, (rows, cut(columns, fmt.per_byte)))
  scales = shards.read(parts.scale_name(name), (cut(rows, fmt.rows), cut(columns, fmt.columns)))
  first = rows.start % fmt.rows, (columns.start - skipped) % fmt.columns
  values = fmt.decode(codes, scales, first)
  return values[:, skipped : skipped + columns.stop - columns.start]
