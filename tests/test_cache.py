"""The cache as a type: rows come back as the formats round them, and nothing else changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from configs import flash
from deepseek_jax import cache as cache_module
from deepseek_jax import ledger, word_rows
from deepseek_jax.cache import LANES, Cache, Layout, Table, ring_positions
from deepseek_jax.config import CacheFormats, Config
from deepseek_jax.schedule import Schedule
from pallas_kernels import dispatch
from pallas_kernels.quantize import op
from pallas_kernels.quantize.formats import FORMATS

FLASH = Config.from_config_dict(flash.get_config()).model
ROWS = 7  # no whole number of 128-word rows in any format
STORAGE = (*FORMATS, "bfloat16", "float32")

append = jax.jit(Table.append)
read = jax.jit(Table.read, static_argnums=1)
take = jax.jit(Table.take, static_argnums=2)
taken_words = jax.jit(word_rows.take, static_argnums=2)

each_storage = pytest.mark.parametrize("storage", STORAGE)
each_layout = pytest.mark.parametrize(
    ("storage", "interleaved"),
    [(storage, False) for storage in STORAGE] + [(storage, True) for storage in FORMATS],
)


def normal(shape, seed=0):
  """Rows of very different sizes, with zeros of both signs."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, (*shape[:-1], 1))
  return np.where(rng.random(shape) < 0.05, -0.0, x).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def rounded(x, storage, dtype=jnp.float32):
  if storage in FORMATS:
    return op.fake_quantize(x, FORMATS[storage]).astype(dtype)
  return x.astype(storage).astype(dtype)


def same_bits(actual, expected):
  actual, expected = np.asarray(actual), np.asarray(expected)
  assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
  bits = np.dtype(f"u{expected.itemsize}")
  np.testing.assert_array_equal(actual.view(bits), expected.view(bits))


def filled(lead, layout, seed=0):
  """A table of random rows, and what they read as."""
  x = normal((*lead, layout.rows, layout.width), seed)
  slots = np.broadcast_to(np.arange(layout.rows), x.shape[:-1])
  table = append(Table.zeros(lead, layout), slots, x)
  return table, rounded(x, layout.storage)


class TestTable:

  @each_layout
  @pytest.mark.parametrize(
      ("width", "lead"), [(512, (3,)), (128, (3,)), (64, (2, 3)), (32, (2, 3))]
  )
  def test_rows_come_back_rounded_bit_for_bit_and_others_stay(
      self, storage, interleaved, width, lead
  ):
    layout = Layout(storage, ROWS, width, interleaved)
    table, before = filled(lead, layout)
    assert table.shape == (*lead, ROWS, width)
    same_bits(read(table, jnp.float32), before)
    slots = np.array(
        [
            [2, 6, 0, ROWS, ROWS, ROWS, ROWS],
            [ROWS + 5, 3, 2**31 - 1, 1, ROWS, ROWS, ROWS],
            [5, 5 + ROWS, 4, 3, 0, ROWS, 1],
        ]
    )
    new = normal((*lead, ROWS, width), seed=1)
    after = append(table, np.broadcast_to(slots, new.shape[:-1]), new)
    expected, fresh = np.array(before), np.asarray(rounded(new, storage))
    for line, own in enumerate(slots):
      for i, slot in enumerate(own):
        if slot < ROWS:
          expected[..., line, slot, :] = fresh[..., line, i, :]
    same_bits(read(after, jnp.float32), expected)

  @each_storage
  def test_one_set_of_slots_serves_all_lines_and_layers(self, storage):
    layout, x = Layout(storage, ROWS, 64), normal((2, 3, 2, 64))
    slots = np.array([[1, 4], [2, ROWS], [0, 6]])
    every = append(Table.zeros((2, 3), layout), np.broadcast_to(slots, (2, 3, 2)), x)
    same_bits(append(Table.zeros((2, 3), layout), slots[None], x).data, every.data)

  @each_layout
  @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
  def test_take_is_read_and_gather(self, storage, interleaved, dtype):
    table, _ = filled((3,), Layout(storage, ROWS, 64, interleaved))
    slots = np.random.default_rng(2).integers(0, ROWS, (3, 5, 4))
    everything = np.asarray(read(table, dtype))
    expected = np.stack([line[own] for line, own in zip(everything, slots)])
    same_bits(take(table, slots, dtype), expected)
    # Absent slots read a row of their own line, whatever it is.
    absent = np.asarray(take(table, np.full((3, 1, 2), -1), dtype))
    beyond = np.asarray(take(table, np.full((3, 1, 2), ROWS + 9), dtype))
    for other in (absent, beyond):
      assert all((everything[n] == other[n, 0, 0]).all(-1).any() for n in range(3))

  @each_storage
  def test_bf16_rows_lose_nothing_on_the_way(self, storage):
    x = jnp.asarray(normal((2, ROWS, 64)), jnp.bfloat16)
    table = append(Table.zeros((2,), Layout(storage, ROWS, 64)), np.arange(ROWS), x)
    same_bits(read(table, jnp.bfloat16), rounded(x, storage, jnp.bfloat16))

  @each_layout
  @pytest.mark.parametrize("lead", [(3,), (2, 3)])
  def test_export_and_restore_are_byte_identical(self, storage, interleaved, lead):
    layout = Layout(storage, ROWS, 64, interleaved)
    table, _ = filled(lead, layout)
    slots = np.array([4, 0, 6])
    rows = table.export(1, slots)
    assert (rows.dtype, rows.shape) == (np.uint8, (*lead[:-1], 3, layout.row_bytes))
    other, before = filled(lead, layout, seed=3)
    other = jax.tree.map(np.array, other)
    other.restore(1, slots, rows)
    assert other.export(1, slots).tobytes() == rows.tobytes()
    expected = np.array(before)
    expected[..., 1, slots, :] = np.asarray(read(table, jnp.float32))[..., 1, slots, :]
    same_bits(read(other, jnp.float32), expected)
    none = np.array([], int)
    other.restore(0, none, table.export(0, none))
    same_bits(read(other, jnp.float32), expected)

  def test_rows_of_another_size_are_refused(self):
    layout = Layout("mxfp4", ROWS, 64)
    table = Table.zeros((2, 3), layout)
    rows = np.zeros((2, 2, layout.row_bytes), np.uint8)
    table.restore(0, np.array([1, 2]), rows)
    for wrong in (rows[:1], rows[:, :1], rows[..., 1:]):
      with pytest.raises(ValueError, match=r"rows have shape .* this table stores \(2, 2, 36\)"):
        table.restore(0, np.array([1, 2]), wrong)

  @pytest.mark.parametrize("interleaved", [False, True])
  @pytest.mark.parametrize("storage", FORMATS)
  def test_every_byte_survives(self, storage, interleaved):
    """Codes and scales that no quantiser makes too: state is moved, never interpreted."""
    layout = Layout(storage, 256, 32, interleaved)
    rows = np.zeros((256, layout.row_bytes), np.uint8)
    for column in range(layout.row_bytes):
      rows[:, column] = np.roll(np.arange(256), 37 * column)
    rows[:, 4 * layout.words[0] + 32 // FORMATS[storage].block :] = 0  # scales fill whole words
    table = Table.zeros((1,), layout)
    table.restore(0, np.arange(256), rows)
    assert table.export(0, np.arange(256)).tobytes() == rows.tobytes()
    everything = np.arange(256)[None]
    for buffer, words, expected in zip(table._buffers, table._words, table._rows()):
      same_bits(taken_words(buffer, everything, words), expected)

  @pytest.mark.parametrize("storage", FORMATS)
  def test_every_code_and_scale_survives_packing(self, storage):
    """All 256 codes of E4M3, all pairs of E2M1 codes in neighbouring fields, every scale byte."""
    fmt = FORMATS[storage]
    bits, width = fmt.element.bits, 64
    codes = np.arange(256 * width) // (1 if bits == 8 else 3) % (1 << bits)
    codes = np.random.default_rng(0).permutation(codes).reshape(256, width).astype(np.uint8)
    scales = np.stack([np.roll(np.arange(256), s) for s in range(width // fmt.block)], axis=1)
    scales = np.pad(scales.astype(np.uint8), ((0, 0), (0, -scales.shape[1] % 4)))

    @functools.partial(jax.jit, static_argnums=1)
    def there_and_back(values, bits):
      return cache_module._unpack(cache_module._pack(values, bits), bits)

    same_bits(there_and_back(codes, bits), codes)
    same_bits(there_and_back(scales, 8), scales)
    if bits == 4:
      pairs = {tuple(p) for p in codes.reshape(-1, 2)}
      assert len(pairs) == 256

  def test_buffers_have_a_minor_axis_of_128_words(self):
    for storage in FORMATS:
      for interleaved in (False, True):
        table = Table.zeros((2, 3), Layout(storage, ROWS, 512, interleaved))
        for buffer in jax.tree.leaves(table):
          assert (buffer.dtype, buffer.shape[-1]) == (np.int32, LANES)


@pytest.fixture(params=["cpu", "tpu"])
def platform(request, monkeypatch):
  """Traces the forms of a platform; functions must not be compiled before."""
  monkeypatch.setattr(dispatch, "platform", lambda: request.param)
  return request.param


RELEASED = [
    ("fp4_e2m1_e4m3_16", 512, 128, True, 5),
    ("mxfp4", 128, 128, False, 1),
    ("fp8_e4m3_e8m0_32", 512, 32, False, 1),
]


class TestPlatforms:
  """What a TPU runs gives what a CPU gives."""

  @each_layout
  def test_a_row_a_line(self, storage, interleaved, platform):
    width = 96
    table, before = filled((2, 3), Layout(storage, 256, width, interleaved))
    expected, new = np.array(before), normal((2, 3, 1, width), seed=1)
    slots, fresh = np.array([[[17], [256], [255]]]), np.asarray(rounded(new, storage))
    expected[:, 0, 17], expected[:, 2, 255] = fresh[:, 0, 0], fresh[:, 2, 0]
    after = jax.jit(lambda *a: Table.append(*a))(table, slots, new)
    same_bits(read(after, jnp.float32), expected)

  @each_layout
  def test_take(self, storage, interleaved, platform):
    table, rows = filled((3,), Layout(storage, ROWS, 64, interleaved))
    slots = np.random.default_rng(2).integers(0, ROWS, (3, 5, 4))
    found = jax.jit(lambda *a: Table.take(*a, jnp.float32))(table, slots)
    same_bits(found, np.stack([line[own] for line, own in zip(np.asarray(rows), slots)]))

  @pytest.mark.parametrize(
      ("storage", "width", "rows", "interleaved"),
      [("fp8_e4m3_e8m0_32", 512, 31, False), ("mxfp4", 96, 128, False), ("float32", 64, 32, False)],
  )
  def test_read_without_a_kernel(self, storage, width, rows, interleaved, monkeypatch):
    table, before = filled((2,), Layout(storage, rows, width, interleaved))
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    same_bits(jax.jit(lambda t: t.read(jnp.float32))(table), before)

  @pytest.mark.slow
  @pytest.mark.parametrize(("storage", "width", "rows", "interleaved", "length"), RELEASED)
  def test_released_layouts_are_packed_and_read_by_kernels(
      self, storage, width, rows, interleaved, length, monkeypatch
  ):
    table, _ = filled((1, 3), Layout(storage, rows, width, interleaved))
    slots = (np.array([3, rows - 2, rows - 9])[:, None] + np.arange(length))[None].astype(np.int32)
    x = jnp.asarray(normal((1, 3, length, width), seed=1), jnp.bfloat16)
    expected = append(table, slots, x)
    rows_read = read(expected, jnp.bfloat16)
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    with pltpu.force_tpu_interpret_mode():
      found = jax.jit(lambda *a: Table.append(*a))(table, slots, x)
      jax.tree.map(same_bits, found, expected)
      same_bits(jax.jit(lambda t: t.read(jnp.bfloat16))(found), rows_read)


@pytest.fixture(scope="module", name="flash_cache")
def fixture_flash_cache():
  return Cache.init(FLASH, CacheFormats(), batch=1, capacity=256)


def windows(cache):
  return cache.encoder_window, cache.decoder_window


class TestReleasedSizes:

  def test_bytes_of_one_row(self, flash_cache):
    assert {t.layout.row_bytes for t in flash_cache.main_kv} == {288}
    assert {t.layout.row_bytes for t in flash_cache.index_keys} == {68}
    assert {t.layout.row_bytes for t in windows(flash_cache)} == {528}

  def test_890_bytes_per_token(self, flash_cache):
    layers = ledger.layers_of(Schedule.from_config(FLASH), FLASH)
    assert flash_cache.capacity == 256
    assert flash_cache.bytes_per_token == 890.0 == ledger.kv_bytes_per_token(layers)
    assert flash_cache.bytes["window"] == 40 * 128 * 528
    assert flash_cache.bytes["window"] == ledger.window_bytes_per_sequence(layers)

  def test_bytes_are_those_of_the_arrays(self, flash_cache):
    arrays = jax.tree.leaves(flash_cache)
    assert sum(flash_cache.bytes.values()) == sum(a.nbytes for a in arrays)
    assert flash_cache.bytes["main_kv"] == 720 * 256
    assert flash_cache.bytes["index_keys"] == 170 * 256
    assert flash_cache.bytes["tails"] == 3 * 2 * 512 * 4

  def test_no_buffer_is_padded_on_a_tpu(self, flash_cache):
    """128 words are the minor axis, and rows of words come in whole numbers."""
    for table in (*flash_cache.main_kv, *flash_cache.index_keys, *windows(flash_cache)):
      assert all(a.shape[-1] == LANES for a in jax.tree.leaves(table))
      lines = int(np.prod(table.data.shape[:-2]))
      assert table.nbytes == lines * table.layout.rows * table.layout.row_bytes

  def test_lines_and_tokens_scale(self):
    one = Cache.init(FLASH, CacheFormats(), batch=1, capacity=256)
    two = Cache.init(FLASH, CacheFormats(), batch=2, capacity=300)
    assert two.capacity == 512
    assert two.bytes_per_token == 890.0
    assert two.bytes["main_kv"] == 4 * one.bytes["main_kv"]
    assert two.bytes["window"] == 2 * one.bytes["window"]

  @pytest.mark.parametrize(
      ("storage", "per_token"),
      [("float32", 2.5 * 640 * 4), ("bfloat16", 2.5 * 640 * 2), ("mxfp4", 2.5 * (272 + 68))],
  )
  def test_other_formats(self, storage, per_token):
    formats = CacheFormats(main_kv=storage, index=storage, window_kv=storage)
    cache = Cache.init(FLASH, formats, batch=1, capacity=256)
    assert cache.bytes_per_token == per_token

  @pytest.mark.parametrize("name", ["batch", "capacity"])
  @pytest.mark.parametrize("value", [0, -3])
  def test_sizes_below_one_are_refused(self, name, value):
    sizes = dict(batch=1, capacity=256) | {name: value}
    with pytest.raises(ValueError, match=rf"{name} is {value}; it must be at least 1"):
      Cache.init(FLASH, CacheFormats(), **sizes)


class TestWindow:

  @pytest.mark.parametrize("window", [1, 3, 8])
  def test_ring_positions_name_what_each_slot_holds(self, window):
    following = np.arange(3 * window + 1)
    found = np.asarray(ring_positions(jnp.asarray(following), window))
    for stop, own in zip(following, found):
      held = {p % window: p for p in range(max(0, stop - window), stop)}
      assert {s: p for s, p in enumerate(own) if p >= 0} == held

  def test_the_newest_live_rows_are_kept(self):
    """Chunks of any length, with pads behind them and lines that have no row at all."""
    layout = Layout("float32", 4, 32)
    empty = Cache.init(FLASH, CacheFormats(), batch=4, capacity=1)
    cache = dataclasses.replace(empty, encoder_window=Table.zeros((2, 4), layout))
    write = jax.jit(lambda c, *a: c.write_window("encoder", *a))
    cursor, held = np.array([0, 3, 7, 5]), [{}, {}, {}, {}]
    rng = np.random.default_rng(0)
    for count in rng.integers(0, 7, (9, 4)):
      latents = rng.standard_normal((2, 4, 6, 32)).astype(np.float32)
      live = np.arange(6) < count[:, None]
      positions = np.where(live, cursor[:, None] + np.arange(6), 0)
      cache = write(cache, latents, positions, live)
      for line in range(4):
        held[line] |= {cursor[line] + t: latents[:, line, t] for t in range(count[line])}
      cursor = cursor + count
      ring = np.asarray(cache.encoder_window.read(jnp.float32))
      for line, stop in enumerate(cursor):
        for position in set(range(stop - 4, stop)) & held[line].keys():
          np.testing.assert_array_equal(ring[:, line, position % 4], held[line][position])
    assert not cache.decoder_window.data.any()
