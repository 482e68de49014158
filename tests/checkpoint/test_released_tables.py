"""Engram tables have more rows here than in a file: these are zeros, and nobody reads or writes."""

import functools
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from deepseek_jax import sharding
from deepseek_jax.checkpoint import parts, released, released_reader
from deepseek_jax.checkpoint.shards import Shards
from deepseek_jax.config import MeshConfig
from deepseek_jax.model_config import read_released
from deepseek_jax.nn.engram import allocated_rows
from deepseek_jax.nn.transformer import Transformer

CHECKPOINT = pathlib.Path(__file__).parents[1] / "golden" / "checkpoint_tiny"
CONFIG = read_released(CHECKPOINT / "config.json")
KEEP = {"kept": lambda path: True, "decoded": lambda path: False}

both_ways = pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)


@functools.cache
def abstract():
  return nnx.eval_shape(lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)))


def tables(model):
  """(rows in the file, table) of every Engram layer."""
  for run in model.runs:
    if run.spec.engram is not None:
      rows = CONFIG.engram_num_embeddings[run.spec.engram]
      yield rows, run.engram.embed.weight.get_value()


def planned(keep, model=None):
  """(rows in the file, part) of every array that a table consists of."""
  for part in parts.leaves(parts.plan(model or abstract(), keep)):
    if part.path[2:] == ("engram", "embed", "weight"):
      (spec,) = abstract().schedule.runs[int(part.path[1])]
      yield CONFIG.engram_num_embeddings[spec.engram], part


@both_ways
def test_rows_that_the_file_does_not_have_are_zeros(keep):
  loaded = released_reader.load(Shards(CHECKPOINT), abstract(), keep=keep).model
  found = list(tables(loaded))
  assert len(found) == 2
  for rows, table in found:
    assert table.shape == (1, allocated_rows(rows), CONFIG.engram_head_dim)
    assert table.shape[1] > rows
    for array in jax.tree.leaves(table):
      assert not np.asarray(array[0, rows:]).any()
      assert np.asarray(array[0, rows - 1]).any()
    values = table.dequantise() if hasattr(table, "dequantise") else table
    np.testing.assert_array_equal(values[0, rows:], 0)
    assert np.isfinite(values).all()


def test_tensors_in_memory_are_loaded_likewise_and_leave_without_those_rows():
  decoded = released_reader.load(Shards(CHECKPOINT), abstract()).model
  soiled = jax.tree.map(np.array, nnx.state(decoded))
  for number, run in enumerate(decoded.schedule.runs):
    if run[0].engram is not None:
      table = soiled["runs"][number]["engram"]["embed"]["weight"].get_value()
      table[0, CONFIG.engram_num_embeddings[run[0].engram] :] = np.nan
  named = released.to_released(soiled, CONFIG)
  for layer, rows in zip(CONFIG.engram_layer_ids, CONFIG.engram_num_embeddings):
    name = f"layers.{layer}.engram.embed.weight"
    assert named[name].shape == (rows, CONFIG.engram_head_dim)
    more = np.zeros((allocated_rows(rows), CONFIG.engram_head_dim), np.float32)
    with pytest.raises(ValueError, match=rf"{name} has shape .*; the model needs \({rows}, 64\)"):
      released.load(abstract(), named | {name: more})
  again = released.load(abstract(), named)
  jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(decoded))


def rows_of(shards, part, start, stop):
  return released_reader.read(shards, part, (slice(0, 1), slice(start, stop), slice(None)))


@both_ways
def test_every_row_is_read_once_and_those_past_the_end_never(keep):
  found = list(planned(keep))
  assert len(found) == (4 if keep is KEEP["kept"] else 2)
  for rows, part in found:
    shards, total = Shards(CHECKPOINT), part.shape[1]
    read = functools.partial(rows_of, shards, part)
    assert part.released_rows == rows < total
    assert not read(rows, total).any()
    assert shards.bytes_read == 0
    last = read(rows - 3, total)
    row_bytes = shards.bytes_read // 3
    np.testing.assert_array_equal(last[:, :3], read(rows - 3, rows))
    assert not last[:, 3:].any()
    assert shards.bytes_read == 6 * row_bytes
    sizes = {"values": (1, 1 / 32), "codes": (1,), "scales": (1 / 32,)}[part.role]
    assert row_bytes == sum(sizes) * CONFIG.engram_head_dim


@both_ways
def test_devices_of_a_mesh_hold_and_read_their_own_rows(keep):
  mesh = sharding.make_mesh(MeshConfig(data=8), jax.devices()[:8])
  graph, state = nnx.split(abstract())
  placed = sharding.placed(sharding.parameter_specs(state, mesh), mesh)
  struct = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
  model = nnx.merge(graph, jax.tree.map(struct, state, placed))
  for rows, part in planned(keep, model):
    assert tuple(part.sharding.spec) == (None, sharding.AXES, None)
    alone = released_reader.read(Shards(CHECKPOINT), part, tuple(map(slice, part.shape)))
    shards = Shards(CHECKPOINT)
    array = released_reader.assemble(shards, part)
    np.testing.assert_array_equal(array, alone)
    own = part.shape[1] // 8
    for number, device in enumerate(mesh.devices.flat):
      (shard,) = [s for s in array.addressable_shards if s.device == device]
      assert shard.data.shape == (1, own, part.shape[2])
      np.testing.assert_array_equal(shard.data, alone[:, number * own : (number + 1) * own])
    everything = shards.bytes_read
    shards = Shards(CHECKPOINT)
    for number in range(8):
      before = shards.bytes_read
      rows_of(shards, part, number * own, (number + 1) * own)
      held = min(rows, (number + 1) * own) - number * own
      assert (shards.bytes_read - before) * rows == everything * held
    assert shards.bytes_read == everything
