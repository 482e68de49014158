"""The cache of the released sizes by the TPU compiler: its bytes, and what a step touches of it."""

import importlib.util
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest

from deepseek_jax.cache import Cache
from deepseek_jax.config import CacheFormats, Config
from pallas_kernels import aot

TOKENS = 1 << 20
LINES = 16
CHUNK = 2048


def released_cache():
  path = pathlib.Path(__file__).parents[1] / "configs" / "flash.py"
  spec = importlib.util.spec_from_file_location("flash", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  model = Config.from_config_dict(module.get_config()).model
  return Cache.init(model, CacheFormats(), batch=1, capacity=TOKENS)


def struct(tree, lines=1, axis=0):
  """Shapes of arrays of one line, for `lines` of them."""
  wide = lambda a: (*a.shape[:axis], lines * a.shape[axis], *a.shape[axis + 1 :])
  return jax.tree.map(lambda a: jax.ShapeDtypeStruct(wide(a), a.dtype), tree)


def rows(table, count):
  return jax.ShapeDtypeStruct((*table.shape[:-2], count, table.shape[-1]), jnp.bfloat16)


def slots(lines, count):
  return jax.ShapeDtypeStruct((lines, count), jnp.int32)


def table_of(cache, part):
  """The part's table with most rows, and its axis of lines."""
  if part == "window":
    return cache.encoder_window, 1
  return max(getattr(cache, part), key=lambda table: table.layout.rows), 0


def build(program, part=None):
  """A program over a cache of 1M tokens; all but one donate what they are given."""
  cache = released_cache()
  if program == "corners":
    corner = lambda a: a[(slice(0, 1),) * a.ndim]
    return lambda cache: jax.tree.map(corner, cache), (struct(cache),)
  if program == "chunk of a window":
    new = rows(cache.encoder_window, CHUNK)
    live = jax.ShapeDtypeStruct((1, CHUNK), jnp.bool_)
    write = lambda cache, *a: cache.write_window("encoder", *a)
    return write, (struct(cache), new, slots(1, CHUNK), live), (0,)
  table, axis = table_of(cache, part)
  lines, count = (LINES, 1) if program == "decode" else (1, CHUNK // 2)
  table = struct(table, lines, axis)
  if program == "take":
    chosen = jax.ShapeDtypeStruct((1, 1, 512), jnp.int32)
    return lambda t, s: t.take(s, jnp.bfloat16), (table, chosen)
  if program == "read":
    return lambda t: t.read(jnp.bfloat16), (table,)
  append = lambda t, s, x: t.append(s[None] if axis else s, x)
  return append, (table, slots(lines, count), rows(table, count)), (0,)


APPENDS = [("decode", part) for part in ("main_kv", "index_keys", "window")]
APPENDS += [("prefill", part) for part in ("main_kv", "index_keys")]
READS = [(program, part) for program in ("read", "take") for part in ("main_kv", "index_keys")]
WHOLE = [("corners", None), ("chunk of a window", None)]
ROW_BYTES = {"main_kv": 288, "index_keys": 68, "window": 528}


def table_bytes(program, part):
  count = 20 * 128 if part == "window" else TOKENS
  return ROW_BYTES[part] * count * (LINES if program == "decode" else 1)


@pytest.fixture(scope="module", name="reports", params=aot.GENERATIONS)
def fixture_reports(request):
  """Reports of all programs of a generation, compiled in one process."""
  programs = WHOLE + APPENDS + READS
  arguments = [dict(program=program, part=part) for program, part in programs]
  compiled = aot.compile_each(request.param, f"{__file__}:build", arguments)
  return dict(zip(programs, compiled))


@pytest.mark.slow
class TestReleasedSizes:

  def test_a_million_tokens_take_890_bytes_each(self, reports):
    report = reports["corners", None]
    entries, window = 890 * TOKENS, 40 * 128 * 528
    # Tails, history and counters are a few rows, each padded to a tile.
    assert entries + window <= report.argument_bytes < entries + window + 100_000
    assert report.temp_bytes < 100_000

  @pytest.mark.parametrize("program", APPENDS, ids=lambda pair: "-".join(pair))
  def test_appending_touches_the_rows_it_changes(self, reports, program):
    """No copy in another layout, and the donated table is the result."""
    report, size = reports[program], table_bytes(*program)
    assert report.alias_bytes == size
    assert size < report.argument_bytes < size + 2_000_000
    # Rounding and packing keep the new rows a few times where VMEM is small: v5p and TPU7x.
    new = 4 * math.prod(build(*program)[1][2].shape)
    assert report.temp_bytes < max(0.01 * size, 4 * new)
    if program[0] == "decode":
      assert report.bytes_accessed < size

  @pytest.mark.parametrize("program", READS, ids=lambda pair: "-".join(pair))
  def test_reading_copies_no_table(self, reports, program):
    report, size = reports[program], table_bytes(*program)
    chosen = 512 * 2 * 128 * 4  # two rows of words an entry
    assert report.temp_bytes < max(0.01 * size, 2 * chosen)
    assert [k.rpartition(".")[0] for k in report.kernels] == (
        [f"unpack_{program[1].split('_')[0]}"] if program[0] == "read" else []
    )

  def test_a_chunk_writes_the_newest_rows_of_a_window(self, reports):
    """Of 2,048 latents of 20 layers, 42 MB, only the last 128 are rounded and packed."""
    report = reports["chunk of a window", None]
    assert report.alias_bytes >= 890 * TOKENS
    assert report.temp_bytes < 20 * CHUNK * 512 * 2
