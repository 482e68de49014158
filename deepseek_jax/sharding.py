"""Where everything lies on a mesh, and the few ways in which it moves.

A mesh has four axes. Every device runs the model on its own share, in one `jax.shard_map` over all
of them, so that what crosses the network is written down here and in `nn/exchange.py`:

  data    lines of the batch; every weight is repeated. For slices with a slow network between them.
  fsdp    lines of the batch.
  expert  lines of the batch; routed experts.
  seq     rows of a line; routed experts.

Dense weights are spread over fsdp, expert and seq and gathered a layer at a time (`whole`). Routed
experts stay where they are, rows visit them. So do rows of the Engram tables, over all axes. Global
entries are gathered over seq once a source; windows and groups reach back to the rows of the device
before (`before`).
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from deepseek_jax.config import MeshConfig
from deepseek_jax.parameter_paths import path_names

AXES = ("data", "fsdp", "expert", "seq")
LINES = ("data", "fsdp", "expert")
SEQ = "seq"
EXPERTS = ("expert", "seq")
DENSE = ("fsdp", "expert", "seq")


class Rule(NamedTuple):
  """Placement of the parameters whose dotted path, without `runs.{r}.`, the pattern matches.

  Attributes:
    pattern: regular expression for the whole path; the first match counts.
    gathered: axis of the weight, from its end, that is spread over `DENSE`; 0 for a copy on every
      device.
    stay: axes from the end, each with the mesh axes over which its parts stay where they are.
  """

  pattern: str
  gathered: int = 0
  stay: tuple[tuple[int, tuple[str, ...]], ...] = ()


# Matrices are cut along the longer axis where that leaves Muon's Gram matrix to be summed (wq_a) or
# heads, groups and the like whole (wq_b). Scales of experts and tables follow their codes.
RULES = (
    # One scale a tile: 7 MB in all dense weights of the released model.
    Rule(r"(?!ffn\.experts\.|engram\.embed\.).*\.scales"),
    Rule(r"ffn\.experts\..*\.lora_[ab]", stay=((-3, EXPERTS),)),
    Rule(r"ffn\.experts\.w[13]\.weight.*", stay=((-3, EXPERTS), (-1, ("fsdp",)))),
    Rule(r"ffn\.experts\.w2\.weight.*", stay=((-3, EXPERTS), (-2, ("fsdp",)))),
    Rule(r"engram\.embed\.weight.*", stay=((-2, AXES),)),
    Rule(r".*\.lora_a", -2),
    Rule(r".*\.lora_b", -1),
    Rule(r"(attn\.(indexer\.wq_b|wq_b|wo_a)|ffn\.shared_experts\.w2|engram\.wkv)\.weight.*", -2),
    Rule(r"attn\.(wq_a|wkv|wo_b|compressor\.(wkv|wgate))\.weight.*", -1),
    Rule(r"attn\.indexer\.(weights_proj|wk)\.weight.*", -1),
    Rule(r"(ffn\.gate|ffn\.shared_experts\.w[13]|embed|head)\.weight.*", -1),
    Rule(r"(hc_(attn|ffn)_)?fn", -1),
    Rule(r".*"),
)


def _is_spec(a: Any) -> bool:
  return isinstance(a, PartitionSpec)


def rule(path: tuple[str, ...]) -> Rule:
  """The rule of a parameter."""
  name = re.sub(r"^runs\.\d+\.", "", ".".join(path))
  return next(each for each in RULES if re.fullmatch(each.pattern, name))


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """The mesh of a configuration over all devices, or the given ones.

  JAX lays the axes out by the shape of the slice.

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = tuple(getattr(config, name) for name in AXES)
  if math.prod(sizes) != len(devices):
    told = " × ".join(f"{name} {size}" for name, size in zip(AXES, sizes))
    raise ValueError(
        f"mesh is {told} = {math.prod(sizes)}; it must be the number of devices, {len(devices)}"
    )
  # An axis may be a part of one of the network's: 128 of a slice of 16 × 16.
  grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _spec(path: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh, dense: bool) -> PartitionSpec:
  of = rule(path)
  spread = dict(of.stay) | ({of.gathered: DENSE} if of.gathered and dense else {})
  parts: list[Any] = [None] * len(shape)
  for axis, names in spread.items():
    size = math.prod(mesh.shape[name] for name in names)
    if shape[axis] % size:
      raise ValueError(
          f"parameter {'.'.join(path)} has shape {shape}; axis {axis} must be a multiple of mesh"
          f" {' × '.join(names)} = {size}"
      )
    parts[axis] = names if len(names) > 1 else names[0]
  return PartitionSpec(*parts)


def parameter_specs(params: Any, mesh: Mesh, *, dense: bool = True) -> Any:
  """PartitionSpecs of a tree of parameters, or of their shapes.

  Args:
    params: the tree.
    mesh: the mesh.
    dense: dense weights are spread; False repeats them on every device
      (`ComputeConfig.spread_dense`).

  Raises:
    ValueError: a weight whose axis the mesh does not divide.
  """
  spec = lambda key, leaf: _spec(path_names(key), tuple(leaf.shape), mesh, dense)
  return jax.tree_util.tree_map_with_path(spec, params)


def state_specs(state: Any, params: Any, mesh: Mesh, *, dense: bool = True) -> Any:
  """PartitionSpecs of optimiser state: a leaf with the path and shape of a parameter lies like it.

  Args:
    state: tree whose paths end in those of the parameters, as optax makes it.
    params: the trained parameters.
    mesh: the mesh.
    dense: see `parameter_specs`.
  """
  specs = {
      path_names(key): (tuple(leaf.shape), spec)
      for (key, leaf), spec in zip(
          jax.tree_util.tree_flatten_with_path(params)[0],
          jax.tree.leaves(parameter_specs(params, mesh, dense=dense), is_leaf=_is_spec),
      )
  }

  def of(key, leaf):
    path = path_names(key)
    for start in range(len(path)):
      shape, spec = specs.get(path[start:], (None, None))
      if shape == tuple(leaf.shape):
        return spec
    return PartitionSpec()

  return jax.tree_util.tree_map_with_path(of, state)


def batch_spec(leading: int = 0) -> PartitionSpec:
  """PartitionSpec of arrays [..., B, T, ...] with `leading` axes before the lines."""
  return PartitionSpec(*(None,) * leading, LINES, SEQ)


def placed(specs: Any, mesh: Mesh) -> Any:
  """NamedShardings of a tree of PartitionSpecs."""
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)


def put(tree: Any, shardings: Any) -> Any:
  """Arrays that every process has whole, on the devices of all."""
  make = lambda a, at: jax.make_array_from_callback(a.shape, at, np.asarray(a).__getitem__)
  return jax.tree.map(make, tree, shardings)


def shapes(tree: Any, specs: Any, mesh: Mesh) -> Any:
  """Shapes of arrays that lie by their PartitionSpecs."""
  struct = lambda a, at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at)
  return jax.tree.map(struct, tree, placed(specs, mesh))


def spread(params: Any, mesh: Mesh | None, *, dense: bool = True) -> Any:
  """Shapes of parameters with where they lie; without a mesh as they are."""
  if mesh is None:
    return params
  return shapes(params, parameter_specs(params, mesh, dense=dense), mesh)


def cache_specs(cache: Any) -> Any:
  """PartitionSpecs of a `Cache`, whose lines are requests: rings lead with layers."""

  def of(key, _):
    rings = path_names(key)[0] in ("encoder_window", "decoder_window")
    return PartitionSpec(*(None,) * rings, LINES)

  return jax.tree_util.tree_map_with_path(of, cache)


# What follows runs inside of the `shard_map`; without one, every function leaves its argument.


def axis_size(names: str | Sequence[str]) -> int:
  """Devices along mesh axes of the `shard_map` that is being traced; 1 outside of one."""
  mesh = jax.sharding.get_abstract_mesh()
  manual = {n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == AxisType.Manual}
  names = (names,) if isinstance(names, str) else names
  return math.prod(mesh.shape[name] for name in names if name in manual)


def whole(
    tree: Any, where: Callable[[tuple[str, ...]], bool] = lambda path: True, *, dense: bool = True
) -> Any:
  """Dense weights of a layer, or of a model, from all devices; others as they are.

  Experts are gathered over fsdp alone. In the backward pass every device gets the sum of its part.

  Args:
    tree: whose paths are those of a model or of one of its layers.
    where: chooses the paths to gather.
    dense: dense weights are spread; see `parameter_specs`.
  """
  if axis_size(DENSE) == 1:
    return tree

  def gather(key, leaf):
    if not where(path_names(key)):
      return leaf
    of = rule(path_names(key))
    for axis, names in dict(of.stay).items():
      if names == ("fsdp",) and axis_size(names) > 1:
        leaf = lax.all_gather(leaf, names, axis=leaf.ndim + axis, tiled=True)
    if of.gathered and dense:
      leaf = lax.all_gather(leaf, DENSE, axis=leaf.ndim + of.gathered, tiled=True)
    return leaf

  return jax.tree_util.tree_map_with_path(gather, tree)


def summed(tree: Any, specs: Any) -> Any:
  """Gradients over the axes on which their parameters are repeated."""

  def one(spec, leaf):
    spread = {n for part in spec if part for n in ((part,) if isinstance(part, str) else part)}
    left = tuple(name for name in AXES if name not in spread)
    return lax.psum(leaf, left) if left else leaf

  return jax.tree.map(one, specs, tree, is_leaf=_is_spec)


def rows_summed(a: Array) -> Array:
  """Sum over the devices that share the rows of a line."""
  return lax.psum(a, SEQ) if axis_size(SEQ) > 1 else a


def all_rows(tree: Any) -> Any:
  """Arrays [B, T, ...] of the rows of all devices of a line, in order."""
  if axis_size(SEQ) == 1:
    return tree
  return jax.tree.map(lambda a: lax.all_gather(a, SEQ, axis=1, tiled=True), tree)


def before(tree: Any, count: int) -> Any:
  """The last `count` rows [B, count, ...] before those of this device; zeros before the first.

  Rows come from as many devices as it takes: a device may hold fewer than `count`.
  """
  size = axis_size(SEQ)

  def one(a):
    nothing = jnp.zeros((a.shape[0], count, *a.shape[2:]), a.dtype)
    if size == 1:
      return nothing
    parts, own = [], a.shape[1]
    for hop in range(1, min(size - 1, -(-count // own)) + 1):
      part = a[:, max(0, own - (count - (hop - 1) * own)) :]
      parts.insert(0, lax.ppermute(part, SEQ, [(i, i + hop) for i in range(size - hop)]))
    return jnp.concatenate([nothing, *parts], axis=1)[:, -count:]

  return jax.tree.map(one, tree)
