"""Stored words of packed experts: the released bits in an order that decodes cheaply.

A word holds weights of one output, whose number lies along lanes, as the products want them: no
lane moves. `pltpu.bitcast` of a register of words to a byte format puts byte b of sublane r at
row 4r + b, so that a word has the inputs 4i to 4i + 3 of its row i (`Fp8`).

`Fp4` words hold these of the first half of the inputs and those of the second half. Bits 7 and 3 to
1 of a byte are sign and magnitude of the first, bits 0 and 6 to 4 those of the second. Masked by
0x8E, the first is its value times 2^-14 in E5M2, subnormals included; the second takes two shifts.

A scale word has four bytes of one output: byte t of row i is group t·K/128 + i of 32 inputs. Their
rows are padded to a multiple of 8; the compiler copies an array of 18 rows on every call.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int8, Int32, UInt8

LANES = 128
GROUP = 32  # inputs that share a scale byte
UNIT = 256  # inputs that whole registers hold, in both halves of them


class Fp4(NamedTuple):
  """Experts in E2M1 with one E8M0 byte a row and 32 inputs; K' and N' are padded K and N."""

  words: Int32[Array, "*batch K8 N"]
  scales: Int32[Array, "*batch R N"]


class Fp8(NamedTuple):
  """Experts in E4M3 with one E8M0 byte a 32 x 32 square, which `scales` repeats along N."""

  words: Int32[Array, "*batch K4 N"]
  scales: Int32[Array, "*batch R N"]


def pack_fp4(packed: Int8[Array, "*batch N K2"], scale_bytes: UInt8[Array, "*batch N G"]) -> Fp4:
  """Released experts (weights [out, in]) as the kernel reads them; see `unpack_fp4`.

  Inputs are padded to a multiple of 256 and outputs to one of 128; the released sizes are such.

  Args:
    packed: two codes a byte, the even input in the low nibble.
    scale_bytes: E8M0, one for 32 inputs.

  Raises:
    ValueError: there is not one scale byte for every 32 inputs.
  """
  inputs = 2 * packed.shape[-1]
  _check(packed.shape, scale_bytes.shape, (*packed.shape[:-1], inputs // GROUP), inputs)
  released = lax.bitcast_convert_type(packed, jnp.uint8)
  codes = jnp.stack([released & 15, released >> 4], axis=-1).reshape(*packed.shape[:-1], inputs)
  codes = _pad(codes, UNIT)
  first, second = jnp.split(codes, 2, axis=-1)
  joined = (first & 8) << 4 | (first & 7) << 1 | (second & 7) << 4 | second >> 3
  return Fp4(_words(joined), _scale_words(_pad(scale_bytes, UNIT // GROUP)))


def unpack_fp4(
    weights: Fp4, outputs: int, inputs: int
) -> tuple[Int8[Array, "*batch N K2"], UInt8[Array, "*batch N G"]]:
  """The released bytes that `pack_fp4` was given, bit for bit."""
  joined = _bytes(weights.words)
  first = (joined >> 7) << 3 | joined >> 1 & 7
  second = (joined & 1) << 3 | joined >> 4 & 7
  codes = jnp.concatenate([first, second], axis=-1)[..., :outputs, :inputs]
  released = codes[..., 0::2] | codes[..., 1::2] << 4
  scales = _scale_bytes(weights.scales, inputs)[..., :outputs, : inputs // GROUP]
  return lax.bitcast_convert_type(released, jnp.int8), scales


def pack_fp8(codes: UInt8[Array, "*batch N K"], scale_bytes: UInt8[Array, "*batch NT G"]) -> Fp8:
  """Released FP8 matrices likewise.

  Args:
    codes: E4M3 bits.
    scale_bytes: E8M0, one a 32 x 32 square.

  Raises:
    ValueError: there is not one scale byte for every square, or a ragged one.
  """
  *batch, outputs, inputs = codes.shape
  _check(codes.shape, scale_bytes.shape, (*batch, outputs // GROUP, inputs // GROUP), inputs)
  scales = jnp.repeat(scale_bytes, GROUP, axis=-2)
  return Fp8(_words(_pad(codes, UNIT)), _scale_words(_pad(scales, UNIT // GROUP)))


def unpack_fp8(
    weights: Fp8, outputs: int, inputs: int
) -> tuple[UInt8[Array, "*batch N K"], UInt8[Array, "*batch NT G"]]:
  """The released bytes that `pack_fp8` was given, bit for bit."""
  scales = _scale_bytes(weights.scales, inputs)[..., :outputs:GROUP, : inputs // GROUP]
  return _bytes(weights.words)[..., :outputs, :inputs], scales


def _check(shape, scales, expected, inputs):
  if inputs % GROUP or scales != expected:
    raise ValueError(
        f"scale_bytes has shape {scales}: weights of shape {shape} are {inputs} inputs and need"
        f" {expected}, one byte for {GROUP} inputs"
    )


def _pad(a, unit):
  pads = [(0, 0)] * (a.ndim - 2) + [(0, -a.shape[-2] % LANES), (0, -a.shape[-1] % unit)]
  return jnp.pad(a, pads)


def _words(values):
  """Bytes [*, N, 4k] as words [*, k, N]."""
  values = values.reshape(*values.shape[:-1], -1, 4)
  return jnp.swapaxes(lax.bitcast_convert_type(values, jnp.int32), -1, -2)


def _bytes(words):
  values = lax.bitcast_convert_type(jnp.swapaxes(words, -1, -2), jnp.uint8)
  return values.reshape(*values.shape[:-2], -1)


def scale_rows(inputs: int) -> int:
  """Rows of scale words for a multiple of 256 inputs."""
  return -(-inputs // LANES // 8) * 8


def _scale_words(values):
  quarters = values.reshape(*values.shape[:-1], 4, -1)
  words = _words(jnp.swapaxes(quarters, -1, -2).reshape(values.shape))
  rows = words.shape[-2]
  return jnp.pad(
      words, [(0, 0)] * (words.ndim - 2) + [(0, scale_rows(rows * LANES) - rows), (0, 0)]
  )


def _scale_bytes(words, inputs):
  rows = -(-inputs // UNIT) * UNIT // LANES
  values = _bytes(words[..., :rows, :])
  quarters = values.reshape(*values.shape[:-1], -1, 4)
  return jnp.swapaxes(quarters, -1, -2).reshape(values.shape)
