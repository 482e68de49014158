"""Settings and fixtures of the whole suite."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gc
import pathlib
import types

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
# Meshes of up to 8 devices; a program without a mesh runs on the first as before.
jax.config.update("jax_num_cpu_devices", 8)

_GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="module", autouse=True)
def freed_programs():
  """Frees the programs of a module: each maps memory, and Linux allows a process 65,530 maps."""
  yield
  jax.clear_caches()
  gc.collect()


@pytest.fixture(scope="module")
def quick_compile():
  """Programs of one module are compiled without LLVM's optimisations: half the time."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def standard_promotion():
  """Lets dtypes promote for one test: optax's Adam and Muon divide by an integer step count."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture(scope="session")
def golden():
  """Returns `golden(name)`: the arrays of `tests/golden/{name}.npz`, read once and read-only."""
  loaded = {}

  def load(name):
    if name not in loaded:
      with np.load(_GOLDEN / f"{name}.npz") as file:
        arrays = dict(file)
      for array in arrays.values():
        array.flags.writeable = False
      loaded[name] = types.MappingProxyType(arrays)
    return loaded[name]

  return load
