"""The cache of the released sizes, laid out by the TPU compiler: 890 bytes a token."""

import importlib.util
import pathlib

import jax
import pytest

from deepseek_jax.cache import Cache
from deepseek_jax.config import CacheFormats, Config
from pallas_kernels import aot

TOKENS = 1 << 20


def released_cache():
  path = pathlib.Path(__file__).parents[1] / "configs" / "flash.py"
  spec = importlib.util.spec_from_file_location("flash", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  model = Config.from_config_dict(module.get_config()).model
  return Cache.init(model, CacheFormats(), batch=1, capacity=TOKENS)


def build():
  """A program that reads a corner of every array of a cache of 1M tokens."""
  cache = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), released_cache())
  corner = lambda a: a[(slice(0, 1),) * a.ndim]
  return lambda cache: jax.tree.map(corner, cache), (cache,)


@pytest.mark.slow
@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_a_million_tokens_take_890_bytes_each(generation):
  report = aot.compile_in_subprocess(generation, f"{__file__}:build", {})
  entries, window = 890 * TOKENS, 40 * 128 * 528
  # Tails, history and counters are a few rows, each padded to a tile.
  assert entries + window <= report.argument_bytes < entries + window + 100_000
  assert report.temp_bytes < 100_000
