"""Which released tensors fill which array of the model, with which dtype and shape (spec 13)."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from deepseek_jax.checkpoint.released import SKIPPED, slices, tensor_shape
from deepseek_jax.checkpoint.safetensors_file import Tensor
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.parameter_paths import path_names
from deepseek_jax.quantised import Quantised
from deepseek_jax.weight_formats import WeightFormat, storage

# Decides by the path of a parameter whether it stays as stored.
Keep = Callable[[tuple[str, ...]], bool]


@dataclasses.dataclass(frozen=True)
class Part:
  """One array of the model's state: a leaf of a plan, and of the template of a checkpoint.

  Attributes:
    path: of the parameter, as `path_names` gives it.
    role: "values"; or "codes" or "scales" of a parameter that stays as stored.
    shape: of the array, leading axes included. An Engram table has more rows than `released_rows`;
      the others are zeros.
    dtype: of the array, a numpy dtype.
    sharding: that the array is to have, or None.
    stored: block format of the parameter in the file, or None.
    file_dtype: of the tensor that `names` names.
    names: released name of the weight by leading index: (), (layer,) or (layer, expert).
    weight: shape of one such weight, decoded, in the file.
  """

  path: tuple[str, ...]
  role: Literal["values", "codes", "scales"]
  shape: tuple[int, ...]
  dtype: Any
  sharding: jax.sharding.Sharding | None
  stored: WeightFormat | None
  file_dtype: str
  names: Mapping[tuple[int, ...], str]
  weight: tuple[int, ...]

  @property
  def depth(self) -> int:
    """Number of leading axes."""
    return len(self.shape) - len(self.weight)

  @property
  def released_rows(self) -> int:
    """Rows of the array, on its first axis after the leading ones, that the file holds."""
    scales = self.stored and self.role == "scales"
    return (self.stored.scale_shape(self.weight) if scales else self.weight)[0]

  def tensors(self) -> Iterator[tuple[tuple[int, ...], str, str, tuple[int, ...]]]:
    """(leading index, released name, dtype, shape) of every tensor that the array needs."""
    for at, name in self.names.items():
      if self.role != "scales":
        shape = self.stored.code_shape(self.weight) if self.stored else self.weight
        yield at, name, self.file_dtype, shape
      if self.stored and self.role != "codes":
        yield at, scale_name(name), "F8_E8M0", self.stored.scale_shape(self.weight)


def scale_name(name: str) -> str:
  """Released name of the scales that belong to a weight."""
  return name.removesuffix("weight") + "scale"


def plan(model: Transformer, keep: Keep = lambda path: False) -> Any:
  """The state of `model` with a `Part` for every array, `Quantised` of two where it is kept.

  Args:
    model: of arrays or, as `nnx.eval_shape` makes it, of `jax.ShapeDtypeStruct`, whose sharding is
      then that of the parts. Codes and scales take it over along every axis that it divides into
      whole blocks, and are replicated along the others.
    keep: see `Keep`; asked only about parameters that are released in FP8 or FP4.

  Raises:
    ValueError: a width that the released format cannot hold.
  """
  schedule = model.schedule

  def parts(key_path, leaf):
    path = path_names(key_path)
    file_dtype, stored = storage(path)
    names = {at: name for name, at in slices(path, leaf.shape, schedule)}
    weight = tensor_shape(path, leaf.shape, model.config)
    if stored and stored.rows == 1 and weight[-1] % stored.columns:
      raise ValueError(
          f"parameter {'.'.join(path)} has {weight[-1]} inputs; {stored.name} needs a multiple of"
          f" {stored.columns}"
      )
    sharding = getattr(leaf, "sharding", None)
    whole = Part(
        path, "values", leaf.shape, np.dtype(leaf.dtype), sharding, stored, file_dtype, names,
        weight,
    )  # fmt: skip
    if not stored or not keep(path):
      return whole
    made = []
    for role, shape, dtype, unit in (
        ("codes", stored.code_shape(leaf.shape), stored.code_dtype, (1, stored.per_byte)),
        ("scales", stored.scale_shape(leaf.shape), np.uint8, (stored.rows, stored.columns)),
    ):
      split = _split(sharding, leaf.shape, shape, unit)
      made.append(
          dataclasses.replace(whole, role=role, shape=shape, dtype=np.dtype(dtype), sharding=split)
      )
    return Quantised(*made, stored.name)

  return jax.tree_util.tree_map_with_path(parts, nnx.split(model)[1])


def _split(
    sharding: jax.sharding.Sharding | None, whole: tuple[int, ...], shape: tuple[int, ...],
    unit: tuple[int, int],
) -> jax.sharding.Sharding | None:  # fmt: skip
  """The sharding of codes or scales, of which one stands for `unit` values of the last two axes."""
  if not isinstance(sharding, NamedSharding):
    return sharding
  spec = []
  units = (1,) * (len(whole) - 2) + unit
  for axes, size, own, step in zip(sharding.spec, whole, shape, units):
    names = (axes,) if isinstance(axes, str) else axes or ()
    count = math.prod(sharding.mesh.shape[name] for name in names)
    divides = own % count == 0 and size % count == 0 and size // count % step == 0
    spec.append(axes if divides else None)
  return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def leaves(planned: Any) -> list[Part]:
  """Every part of a plan."""
  return jax.tree.leaves(planned)


def wanted(planned: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
  """What a plan needs of a checkpoint: dtype and shape by released name."""
  return {
      name: (dtype, shape) for part in leaves(planned) for _, name, dtype, shape in part.tensors()
  }


def check(tensors: Mapping[str, Tensor], planned: Any) -> list[str]:
  """Checks the tensors of a checkpoint against a plan, before any is read.

  Returns:
    Names of the tensors outside the text backbone, which nothing here reads.

  Raises:
    ValueError: a tensor is missing, has no place in the model, or has another dtype or shape.
  """
  needs = wanted(planned)
  skipped = sorted(name for name in tensors if name.startswith(SKIPPED))
  unknown = sorted(tensors.keys() - needs.keys() - set(skipped))
  if unknown:
    raise ValueError(
        f"tensor {unknown[0]} has no place in the configured model ({len(unknown)} such)"
    )
  missing = sorted(needs.keys() - tensors.keys())
  if missing:
    dtype, shape = needs[missing[0]]
    raise ValueError(
        f"tensor {missing[0]} is missing ({len(missing)} such); the configuration needs it as"
        f" {dtype} {list(shape)}"
    )
  for name, (dtype, shape) in needs.items():
    found = tensors[name]
    if (found.dtype, found.shape) != (dtype, shape):
      raise ValueError(
          f"tensor {name} is {found.dtype} {list(found.shape)}; the configuration needs {dtype}"
          f" {list(shape)}"
      )
  return skipped


def blocks(part: Part, most_bytes: int) -> Iterator[tuple[slice, ...]]:
  """Indices of blocks of whole rows that tile the array in C order, one released tensor each.

  Args:
    part: the array.
    most_bytes: of a block, unless 32 rows (or one, of scales) take more.
  """
  lead, inner = part.shape[: part.depth], part.shape[part.depth :]
  rows = block_rows(part, most_bytes)
  for at in np.ndindex(*lead):
    for start in range(0, inner[0], rows):
      stop = min(start + rows, inner[0])
      yield *(slice(i, i + 1) for i in at), slice(start, stop), *map(slice, inner[1:])


def block_rows(part: Part, most_bytes: int) -> int:
  """Rows of one of `blocks`: a multiple of 32, at which codes and scales can both be cut."""
  inner = part.shape[part.depth :]
  row_bytes = math.prod(inner[1:]) * jnp.dtype(part.dtype).itemsize
  unit = 1 if part.role == "scales" else 32
  return min(inner[0], max(1, most_bytes // row_bytes // unit) * unit)
