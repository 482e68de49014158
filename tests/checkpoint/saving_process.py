"""One process of several that restore a checkpoint and save it again.

`saving_process.py ID COUNT PORT SOURCE TARGET` prints as JSON what it has restored, with the bounds
and a digest of each of its shards, and what was refused.
"""

import hashlib
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from deepseek_jax.checkpoint.training import Checkpoints
from deepseek_jax.config import Config, ModelConfig

AXES = ("data", "fsdp", "expert", "seq")
CONFIG = Config(
    model=ModelConfig(
        vocab_size=40, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_lora_rank=16,
        o_groups=1, n_routed_experts=4, num_experts_per_tok=2, sliding_window=8,
        compress_ratios=(1,), kv_source_layer_ids=(0,), index_source_layer_ids=(0,),
        index_n_heads=2, index_head_dim=32, index_topk=4,
    )
)  # fmt: skip
SHAPES = {
    "weight": ((16, 24), jnp.float32),
    "half": ((8, 16), jnp.bfloat16),
    "bank": ((2, 8, 16), jnp.uint8),
    "scales": ((2, 8, 4), jnp.float8_e8m0fnu),
    "table": ((48, 8), jnp.float8_e4m3fn),
    "codes": ((8, 8, 2), jnp.int8),
    "frozen": ((8,), jnp.bool_),
    "odd": ((5, 3), jnp.uint32),
    "step": ((), jnp.int32),
}


def make_state(seed):
  """Numpy arrays of all bit patterns, two trees deep."""
  rng = np.random.default_rng(seed)

  def make(shape, dtype):
    dtype = np.dtype(dtype)
    raw = rng.integers(0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype).reshape(shape)

  params = {name: make(*form) for name, form in SHAPES.items()}
  return {"params": params, "ema": make((64, 64), np.float32)}


def mesh_of(*sizes, names=AXES):
  devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
  return jax.sharding.Mesh(devices, names[: len(sizes)])


def sharding_of(shape, mesh):
  """Mesh axes in turn, each on the next axis of the array that it divides."""
  left, spec = list(shape), [()] * len(shape)
  for n, (name, size) in enumerate(mesh.shape.items()):
    fits = [a for i in range(len(shape)) if left[a := (n + i) % len(shape)] % size == 0]
    if fits:
      left[fits[0]] //= size
      spec[fits[0]] += (name,)
  return NamedSharding(mesh, PartitionSpec(*spec))


def template(mesh):
  abstract = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding_of(a.shape, mesh))
  return jax.tree.map(abstract, make_state(0))


def place(state, mesh):
  return jax.tree.map(lambda a: jax.device_put(a, sharding_of(a.shape, mesh)), state)


def bytes_of(tree):
  """Dtype and bytes of every array, by path."""
  leaves = jax.tree_util.tree_flatten_with_path(jax.device_get(tree))[0]
  return {jax.tree_util.keystr(path): (str(a.dtype), np.asarray(a).tobytes()) for path, a in leaves}


def shard_digests(tree):
  digests = {}
  for path, array in jax.tree_util.tree_flatten_with_path(tree)[0]:
    digests[jax.tree_util.keystr(path)] = [
        (
            [s.indices(n)[:2] for s, n in zip(shard.index, array.shape)],
            hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest(),
        )
        for shard in array.addressable_shards
    ]
  return digests


def blind(step):
  """Lets this process fail to read the arrays of one step."""
  restore = ocp.PyTreeCheckpointHandler.restore

  def failing(self, directory, *args, **kwargs):
    if pathlib.Path(directory).parent.name == str(step):
      raise ValueError("nothing to be read here")
    return restore(self, directory, *args, **kwargs)

  ocp.PyTreeCheckpointHandler.restore = failing


def main(number, count, port, source, target):
  jax.distributed.initialize(f"localhost:{port}", count, number, initialization_timeout=60)
  if number == 1:
    blind(2)
  checkpoints = Checkpoints(source)
  listed = checkpoints.steps()
  found = checkpoints.restore(template(mesh_of(1, 4, 2, 1)))
  checkpoints.set_aside(found.damaged)
  after = checkpoints.steps()
  local = {"a": jax.device_put(np.ones(3, np.float32), jax.local_devices()[0])}
  saved = Checkpoints(target, keep=2)
  try:
    saved.save(1, local, {}, CONFIG)
    refused = None
  except ValueError as error:
    refused = str(error)
  for step in (5, 6, 7):
    saved.save(step, found.state, {"row": step}, CONFIG)
  report = {
      "listed": listed, "step": found.step, "damaged": found.damaged, "after": after,
      "refused": refused, "saved": saved.steps(), "shards": shard_digests(found.state),
      "sharding": all(
          a.sharding == sharding_of(a.shape, mesh_of(1, 4, 2, 1))
          for a in jax.tree.leaves(found.state)
      ),
  }  # fmt: skip
  saved.close()
  checkpoints.close()
  sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
  main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
