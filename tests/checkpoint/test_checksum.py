"""Laws of the checksum: the same however an array is cut or sharded, another after any change."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from deepseek_jax.checkpoint import checksum, record

DTYPES = [
    jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e8m0fnu, jnp.int32, jnp.uint32,
    jnp.int8, jnp.uint8, jnp.bool_,
]  # fmt: skip
MASK = (1 << 32) - 1

dtypes = st.sampled_from(DTYPES)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
seeds = st.integers(0, 1 << 20)
with_examples = settings(max_examples=60, deadline=None, derandomize=True)


def bits_of(array):
  """The bits of a non-empty array as integers, flat."""
  words = array.reshape(-1).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])
  return [int(word) for word in words]


def make(shape, dtype, seed=0):
  """All bit patterns of a dtype, so that payloads of NaN and negative zeros are among them."""
  dtype = np.dtype(dtype)
  high = 2 if dtype.kind == "b" else 256
  raw = np.random.default_rng(seed).integers(0, high, (*shape, dtype.itemsize), np.uint8)
  return raw.view(dtype).reshape(shape)


def mix(x):
  x = (x ^ x >> 16) * 0x7FEB352D & MASK
  x = (x ^ x >> 15) * 0x846CA68B & MASK
  return x ^ x >> 16


def definition(array, starts=None):
  """The checksum in plain integers."""
  starts = starts or (0,) * array.ndim
  sums = []
  for lane in range(4):
    total = 0
    for at, word in zip(np.ndindex(array.shape), bits_of(array) if array.size else ()):
      x = word ^ int(checksum._seeds(lane, -1)[0])
      for axis, (i, start) in enumerate(zip(at, starts)):
        first, second = map(int, checksum._seeds(lane, axis))
        x ^= mix(mix(i + start ^ first) ^ second)
      total += mix(x)
    sums.append(total & MASK)
  return np.array(sums, np.uint32)


def everything(array):
  return tuple(slice(0, size) for size in array.shape)


def of_host(array):
  return checksum.spell(checksum.of_block(array, everything(array)))


@pytest.fixture
def compiled(monkeypatch):
  """No array is small enough for numpy."""
  monkeypatch.setattr(checksum, "_SMALL", -1)


@given(shapes, dtypes, seeds)
@with_examples
def test_numpy_follows_the_definition(shape, dtype, seed):
  array = make(shape, dtype, seed)
  assert of_host(array) == checksum.spell(definition(array))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.dtype.name)
def test_the_compiled_program_follows_the_definition(compiled, shape, dtype):
  array = make(shape, dtype)
  expected = checksum.spell(definition(array))
  assert of_host(array) == expected
  assert checksum.of_arrays({"a": jnp.asarray(array)}) == {"a": expected}


@pytest.mark.parametrize("shape", [(4, 5, 3), (3, 2, 4, 1), (2, 3, 2, 2, 3)], ids=str)
def test_a_program_may_go_through_an_array_by_matrices(shape):
  """As on TPU."""
  for dtype in (jnp.uint8, jnp.float32):
    array, starts = make(shape, dtype), np.arange(len(shape), dtype=np.uint32)
    found = jax.jit(checksum._matrix_sums)(array, starts)
    np.testing.assert_array_equal(found, definition(array, tuple(range(len(shape)))))


@given(shapes, dtypes, seeds, st.data())
@with_examples
def test_blocks_add_up_to_the_array(shape, dtype, seed, data):
  array = make(shape, dtype, seed)
  cuts = [
      sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape
  ]
  slices = [[slice(*pair) for pair in itertools.pairwise(cut)] for cut in cuts]
  blocks = itertools.product(*slices)
  total = sum((checksum.of_block(array[b], b) for b in blocks), np.zeros(4, np.uint32))
  assert checksum.spell(total) == of_host(array)


@pytest.mark.parametrize("start", [(1 << 31) - 2, (1 << 32) - 4])
def test_axes_may_have_two_to_the_32_coordinates(start, compiled, monkeypatch):
  block = make((4, 2), jnp.bfloat16)
  index = (slice(start, start + 4), slice(start, start + 2))
  expected = definition(block, (start, start))
  np.testing.assert_array_equal(checksum.of_block(block, index), expected)
  monkeypatch.setattr(checksum, "_SMALL", block.size)
  np.testing.assert_array_equal(checksum.of_block(block, index), expected)


@given(st.lists(st.integers(1, 5), max_size=3).map(tuple), dtypes, seeds, st.data())
@with_examples
def test_one_flipped_bit_changes_every_lane(shape, dtype, seed, data):
  array = make(shape, dtype, seed)
  flipped = array.copy()
  byte = data.draw(st.integers(0, array.nbytes - 1))
  bit = 0 if dtype == jnp.bool_ else data.draw(st.integers(0, 7))
  flipped.reshape(-1).view(np.uint8)[byte] ^= 1 << bit
  change = checksum.of_block(flipped, everything(array)) - checksum.of_block(
      array, everything(array)
  )
  assert change.all()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), dtypes, seeds)
@with_examples
def test_a_permutation_changes_it(shape, dtype, seed):
  array = make(shape, dtype, seed)
  permuted = np.random.default_rng(seed).permutation(array.reshape(-1)).reshape(shape)
  same = bits_of(permuted) == bits_of(array)
  assert (of_host(permuted) == of_host(array)) == same


@given(dtypes, seeds, st.integers(1, 60), st.integers(0, 31))
@with_examples
def test_many_equal_changes_do_not_cancel(dtype, seed, count, bit):
  """As where a whole run of signs is lost."""
  array = make((64,), dtype, seed)
  flipped = array.copy()
  words = flipped.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])
  words[:count] ^= words.dtype.type(1 if dtype == jnp.bool_ else 1 << bit % (8 * words.itemsize))
  change = checksum.of_block(flipped, everything(array)) - checksum.of_block(
      array, everything(array)
  )
  assert change.all()


def test_equal_bytes_of_another_dtype_or_shape_have_another_entry():
  raw = make((4, 8), jnp.uint8)
  views = [raw, raw.view(np.int8), raw.view(jnp.float8_e4m3fn), raw.view(jnp.bfloat16)]
  views += [raw.view(np.float32), raw.view(np.uint32), raw.reshape(8, 4), raw.reshape(32)]
  entries = [str(record.entry(a.shape, a.dtype, of_host(a))) for a in views]
  assert len({*entries}) == len(views)


AXES = ("data", "fsdp", "expert", "seq")
SPECS = [
    PartitionSpec(),
    PartitionSpec("fsdp"),
    PartitionSpec(None, ("data", "seq"), "expert"),
    PartitionSpec(("fsdp", "expert"), None, ("seq", "data")),
]


def mesh_of(*sizes):
  devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
  return jax.sharding.Mesh(devices, AXES)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("sizes", [(2, 2, 2, 1), (1, 4, 1, 2)], ids=str)
def test_the_sharding_does_not_matter(compiled, sizes, spec):
  for dtype in (jnp.float32, jnp.float8_e4m3fn):
    array = make((8, 4, 6), dtype)
    sharded = jax.device_put(array, NamedSharding(mesh_of(*sizes), spec))
    assert checksum.of_arrays({"a": sharded}) == {"a": checksum.spell(definition(array))}


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32])
@pytest.mark.parametrize("shape", [(1 << 25,), (300, 100, 700)], ids=str)
def test_no_size_of_array_needs_memory(dtype, shape):
  starts = np.zeros(len(shape), np.uint32)
  program = checksum._sums.lower(jax.ShapeDtypeStruct(shape, dtype), starts).compile()
  assert program.memory_analysis().temp_size_in_bytes < 1 << 20


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_devices_exchange_sums_alone_and_store_nothing(spec):
  sharding = NamedSharding(mesh_of(2, 2, 2, 1), spec)
  array = jax.ShapeDtypeStruct((64, 64, 64), jnp.uint8, sharding=sharding)
  program = checksum._sharded_sums.lower(array, sharding).compile()
  exchange = r" ((?:all|collective|reduce-scatter|ragged)[\w-]*)\("
  collectives = re.findall(exchange, program.as_text())
  assert set(collectives) <= {"all-reduce"}
  assert bool(collectives) == (spec != PartitionSpec())
  assert program.memory_analysis().temp_size_in_bytes < 1024


def test_arrays_of_one_kind_share_a_program(compiled):
  sharding = NamedSharding(mesh_of(2, 2, 2, 1), PartitionSpec("data"))
  jax.clear_caches()
  state = {n: jax.device_put(np.full((8, 3), n, np.float32), sharding) for n in range(5)}
  checksum.of_arrays(state)
  assert checksum._sharded_sums._cache_size() == 1


@pytest.mark.parametrize("small", [-1, 1 << 16])
def test_copies_that_differ_are_refused(small, monkeypatch):
  monkeypatch.setattr(checksum, "_SMALL", small)
  sharding = NamedSharding(mesh_of(1, 2, 1, 1), PartitionSpec())
  parts = [jax.device_put(np.full(3, n, np.float32), d) for n, d in enumerate(jax.devices()[:2])]
  array = jax.make_array_from_single_device_arrays((3,), sharding, parts)
  with pytest.raises(ValueError, match="array a: its copies on 2 devices are not the same"):
    checksum.of_arrays({"a": array})


def test_what_cannot_be_summed_is_refused():
  with pytest.raises(ValueError, match="dtype float64 has 8 bytes; allowed are 1, 2 and 4"):
    of_host(np.zeros(3))
  with pytest.raises(ValueError, match="they must be the same"):
    checksum.of_block(np.zeros(3, np.float32), (slice(0, 4),))
