"""One process of several that read a checkpoint together: `reading_process.py ID COUNT PORT KEEP`.

Prints as JSON what it has read, and a digest of each of its shards.
"""

import hashlib
import json
import pathlib
import sys

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from deepseek_jax.checkpoint import released_reader
from deepseek_jax.checkpoint.shards import Shards
from deepseek_jax.model_config import read_released
from deepseek_jax.nn.transformer import Transformer

CHECKPOINT = pathlib.Path(__file__).parents[1] / "golden" / "checkpoint_tiny"


def split_axis(path, shape):
  """Experts by expert, everything else by its widest axis but the one of layers."""
  inner = range(1 if "runs" in path else 0, len(shape))
  return 1 if "experts" in path else max(inner, key=lambda axis: shape[axis])


def with_shardings(model, mesh):
  """The abstract model, split over "half" and repeated over "copy"."""

  def leaf(key_path, a):
    axis = split_axis(jax.tree_util.keystr(key_path), a.shape)
    spec = PartitionSpec(*[None] * axis, "half" if a.shape[axis] % 2 == 0 else None)
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

  graph, state = nnx.split(model)
  return nnx.merge(graph, jax.tree_util.tree_map_with_path(leaf, state))


def main(number, count, port, keep):
  jax.distributed.initialize(
      f"localhost:{port}", count, number, initialization_timeout=60, local_device_ids=None
  )
  devices = np.array(jax.devices()).reshape(count, 2)
  model = nnx.eval_shape(
      lambda: Transformer(read_released(CHECKPOINT / "config.json"), rngs=nnx.Rngs(0))
  )
  shards = Shards(CHECKPOINT)
  mesh = jax.sharding.Mesh(devices, ("half", "copy"))
  loaded = released_reader.load(
      shards, with_shardings(model, mesh), keep=lambda path: keep == "keep"
  )
  digests = {}
  for path, array in jax.tree_util.tree_flatten_with_path(nnx.split(loaded.model)[1])[0]:
    copies = {
        hashlib.sha256(np.asarray(s.data).tobytes()).hexdigest() for s in array.addressable_shards
    }
    index = [s.index for s in array.addressable_shards][0]
    bounds = [s.indices(n)[:2] for s, n in zip(index, array.shape)]
    digests[jax.tree_util.keystr(path)] = {"bounds": bounds, "digests": sorted(copies)}
  sys.stdout.write(json.dumps({"bytes": shards.bytes_read, "shards": digests}) + "\n")


if __name__ == "__main__":
  main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
