"""Weights that stay as released while they are frozen: codes and scales, decoded where used."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from deepseek_jax import weight_formats
from deepseek_jax.parameter_paths import path_names
from pallas_kernels.quantize import op
from pallas_kernels.quantize.formats import FP8_WINDOW


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
  """A weight [..., out, in] in FP8 or FP4 (spec 13): a pytree whose leaves are bytes.

  Leading axes (layers of a run, experts) slice both arrays alike, so a stack of them can be
  scanned.

  Attributes:
    codes: uint8 [..., out, in], E4M3 bits; or int8 [..., out, in / 2], two E2M1, the even input in
      the low nibble.
    scales: uint8, E8M0: [..., ceil(out / 32), ceil(in / 32)] for "fp8_tiles", [..., out, in / 32]
      for "fp8_rows" and "fp4_rows".
    format: a name in `weight_formats.FORMATS`; static.
  """

  codes: Any
  scales: Any
  format: str = dataclasses.field(metadata={"static": True})

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the values."""
    per_byte = weight_formats.FORMATS[self.format].per_byte
    return *self.codes.shape[:-1], self.codes.shape[-1] * per_byte

  @property
  def dtype(self) -> Any:
    """Of the codes: no float, so nothing that multiplies takes it for a plain weight."""
    return self.codes.dtype

  def dequantise(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "..."]:
    """The values; bfloat16 holds every one exactly."""
    if self.format == "fp4_rows":
      return op.dequantize_rows(self.codes, self.scales, 32, dtype)
    if self.format == "fp8_rows":
      return op.dequantize(self.codes, self.scales, FP8_WINDOW, dtype)
    return op.dequantize_tiles(self.codes, self.scales, 32, dtype)

  def take(self, rows: Int[Array, "..."], dtype: DTypeLike = jnp.float32) -> Float[Array, "... in"]:
    """`dequantise()[rows]` of a table [out, in], decoding those rows alone.

    Raises:
      ValueError: the format shares scales between rows.
    """
    if self.format == "fp8_tiles":
      raise ValueError("format is 'fp8_tiles'; rows are taken from 'fp8_rows' or 'fp4_rows'")
    pick = lambda a: a.at[rows].get(mode="clip")
    return dataclasses.replace(self, codes=pick(self.codes), scales=pick(self.scales)).dequantise(
        dtype
    )


def is_quantised(leaf: Any) -> bool:
  """For `is_leaf` of `jax.tree.map`."""
  return isinstance(leaf, Quantised)


def abstract(params: Any, keep: Callable[[tuple[str, ...]], bool] = lambda path: True) -> Any:
  """Shapes of the parameters as a released checkpoint gives them with weights kept as stored.

  For programs that are compiled before there is a checkpoint.

  Args:
    params: tree of arrays or `jax.ShapeDtypeStruct` whose key paths spell the parameters' names.
    keep: decides by path; asked only about parameters that are released in FP8 or FP4.

  Returns:
    The tree with `Quantised` of two `jax.ShapeDtypeStruct` where a weight is kept; they have no
    sharding.
  """

  def one(key_path, leaf):
    path = path_names(key_path)
    stored = weight_formats.storage(path)[1]
    if stored is None or not keep(path):
      return leaf
    return Quantised(
        jax.ShapeDtypeStruct(stored.code_shape(leaf.shape), stored.code_dtype),
        jax.ShapeDtypeStruct(stored.scale_shape(leaf.shape), np.uint8),
        stored.name,
    )

  return jax.tree_util.tree_map_with_path(one, params)


def dequantised(tree: Any, dtype: DTypeLike = jnp.float32) -> Any:
  """`tree` with every `Quantised` decoded; other leaves stay what they are."""
  decode = lambda leaf: _decode(leaf, jnp.dtype(dtype)) if is_quantised(leaf) else leaf
  return jax.tree.map(decode, tree, is_leaf=is_quantised)


# Outside of a program, one compilation a shape and no f32 copy of what becomes bf16.
_decode = jax.jit(Quantised.dequantise, static_argnums=1)
