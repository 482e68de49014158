"""Checksums of arrays that depend neither on their sharding nor on how they are cut into blocks.

An element is widened to 32 bits and xored with a key for each of its coordinates; what a bijection
makes of that is added up modulo 2^32. Four such sums with other keys are the 128 bits. Sums of
blocks add up to the sum of the array, so no device needs more than its shard. If one element
changes, each of the four sums does; any other accidental change keeps them with a probability of
2^-128. It is no defence against an adversary. Shape and dtype are not part of it.
"""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

LANES = 4
# Elements, up to which numpy takes less time than the compilation of a program.
_SMALL = 1 << 16
# Elements, above which a program goes matrix by matrix: XLA for TPU takes minutes to compile one
# for a whole bank of experts. Matrices of up to `_SMALL` are not worth a step.
_WHOLE = 1 << 24
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_U32 = np.uint32


def of_block(block: Any, index: tuple[slice, ...]) -> np.ndarray:
  """The part that a block has in the checksum of its array.

  Args:
    block: numpy array or array on one device, of the rank of the array.
    index: where it stands in the array.

  Returns:
    uint32 [4], to be added to those of the other blocks modulo 2^32.

  Raises:
    ValueError: an index of another shape, or a dtype that has not 1, 2 or 4 bytes.
  """
  starts = [s.start or 0 for s in index]
  if tuple(s.stop - start for s, start in zip(index, starts)) != block.shape:
    raise ValueError(f"index {index} of a block of shape {block.shape}; they must be the same")
  starts = np.array(starts, _U32)
  if block.size <= _SMALL:
    return _host_sums(np.asarray(block), starts)
  _check_dtype(block.dtype)
  return np.asarray(_sums(block, starts))


def spell(sums: np.ndarray) -> str:
  """The sums of a whole array as 32 hex digits."""
  return sums.astype(">u4").tobytes().hex()


def of_arrays(arrays: Mapping[str, Any]) -> dict[str, str]:
  """Checksums of whole arrays, as `spell` gives them; in every process, of the same arrays.

  A device reads its shard and keeps nothing; devices exchange 16 bytes for an array.

  Args:
    arrays: numpy arrays, or arrays on one device or a mesh.

  Raises:
    ValueError: copies on different devices differ, another sharding, or a dtype that has not 1, 2
      or 4 bytes.
  """
  found = {}
  for name, array in arrays.items():
    # One at a time: two programs in flight exchange in any order on CPU devices, and wait for ever.
    copies = _start(name, array)
    values = {spell(np.asarray(sums)) for sums in copies}
    if len(values) > 1:
      raise ValueError(f"array {name}: its copies on {len(copies)} devices are not the same")
    found[name] = values.pop()
  return found


def _start(name: str, array: Any) -> list[Any]:
  """The sums as each device of this process has them."""
  starts = np.zeros(np.ndim(array), _U32)
  if not isinstance(array, jax.Array):
    return [_host_sums(np.asarray(array), starts)]
  _check_dtype(array.dtype)
  sharding = array.sharding
  if array.size <= _SMALL and sharding.is_fully_replicated:
    return [_host_sums(np.asarray(shard.data), starts) for shard in array.addressable_shards]
  if len(sharding.device_set) == 1:
    return [_sums(array, starts)]
  if not isinstance(sharding, NamedSharding):
    raise ValueError(f"array {name} has the sharding {sharding}; it must be a NamedSharding")
  return [shard.data for shard in _sharded_sums(array, sharding).addressable_shards]


def _check_dtype(dtype: Any) -> None:
  if dtype.itemsize not in _WORDS:
    raise ValueError(f"dtype {dtype} has {dtype.itemsize} bytes; allowed are 1, 2 and 4")


def _mix(x: Any) -> Any:
  """A bijection of 32-bit words with little bias: `lowbias32` of C. Wellons, hash-prospector."""
  x = (x ^ (x >> _U32(16))) * _U32(0x7FEB352D)
  x = (x ^ (x >> _U32(15))) * _U32(0x846CA68B)
  return x ^ (x >> _U32(16))


@functools.cache
def _seeds(lane: int, axis: int) -> np.ndarray:
  return np.frombuffer(hashlib.sha256(f"{lane} {axis}".encode()).digest()[:8], "<u4")


def _mixed(xp: Any, words: Any, starts: Sequence[Any], lane: int) -> Any:
  """What each word adds to a sum."""
  x = words ^ _seeds(lane, -1)[0]
  for axis, (size, start) in enumerate(zip(words.shape, starts)):
    first, second = _seeds(lane, axis)
    coordinates = xp.arange(size, dtype=_U32) + start
    keys = _mix(_mix(coordinates ^ first) ^ second)
    x = x ^ keys.reshape((-1,) + (1,) * (words.ndim - 1 - axis))
  return _mix(x)


def _host_sums(array: np.ndarray, starts: np.ndarray) -> np.ndarray:
  _check_dtype(array.dtype)
  # An axis more, which has no key: numpy warns of overflow in scalars.
  words = np.ascontiguousarray(array).view(_WORDS[array.dtype.itemsize]).astype(_U32)
  words = words.reshape((*array.shape, 1))
  return np.array([_mixed(np, words, starts, lane).sum(dtype=_U32) for lane in range(LANES)])


@jax.jit
def _sums(array: jax.Array, starts: Sequence[Any]) -> jax.Array:
  lead, matrix = array.shape[:-2], array.shape[-2:]
  if array.size <= _WHOLE or math.prod(matrix) <= _SMALL or math.prod(lead) == 1:
    return _whole_sums(array, starts)
  # XLA for CPU would slice floats of 8 and 16 bits as wider ones, NaNs and all.
  return jax.lax.platform_dependent(array, starts, tpu=_matrix_sums, default=_whole_sums)


def _matrix_sums(array: jax.Array, starts: Sequence[Any]) -> jax.Array:
  lead, matrix = array.shape[:-2], array.shape[-2:]
  flat = array.reshape((-1, *matrix))

  def step(i, total):
    at = [*jnp.unravel_index(i, lead), jnp.zeros_like(i), jnp.zeros_like(i)]
    block = jax.lax.dynamic_index_in_dim(flat, i).reshape((1,) * len(lead) + matrix)
    return total + _whole_sums(block, [s + a.astype(_U32) for s, a in zip(starts, at)])

  return jax.lax.fori_loop(0, math.prod(lead), step, jnp.zeros(LANES, _U32))


def _whole_sums(array: jax.Array, starts: Sequence[Any]) -> jax.Array:
  words = array if array.dtype == bool else array.view(_WORDS[array.dtype.itemsize])
  words = words.astype(_U32)
  mixed = tuple(_mixed(jnp, words, starts, lane) for lane in range(LANES))
  add = lambda a, b: tuple(x + y for x, y in zip(a, b))
  # One reduction of four operands: XLA stores none of them, which it does for four reductions.
  return jnp.stack(jax.lax.reduce(mixed, (_U32(0),) * LANES, add, tuple(range(words.ndim))))


@functools.partial(jax.jit, static_argnames="sharding")
def _sharded_sums(array: jax.Array, sharding: NamedSharding) -> jax.Array:
  """Every device's own result, though declared replicated, so that copies can be compared.

  By hand: the partitioner would gather the partial sums of a reduction of several operands.
  """
  spec = [(names,) if isinstance(names, str) else names or () for names in sharding.spec]
  spec += [()] * (array.ndim - len(spec))
  used = tuple(name for names in spec for name in names)

  def local(shard):
    place = lambda names: jax.lax.axis_index(names).astype(_U32) if names else _U32(0)
    starts = [place(names) * _U32(size) for names, size in zip(spec, shard.shape)]
    sums = _sums(shard, starts)
    return jax.lax.psum(sums, used) if used else sums

  return jax.shard_map(
      local,
      mesh=sharding.mesh,
      in_specs=sharding.spec,
      out_specs=PartitionSpec(),
      check_vma=False,
  )(array)
