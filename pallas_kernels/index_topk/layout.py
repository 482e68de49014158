"""How index keys and index scores lie in memory."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

LANES = 128
BLOCK = 8  # Entries of a candidate block.
TILE = BLOCK * LANES  # Entries of one tile of scores.
# Tiles of a row of scores come in eights: one entry of each fills the eight sublanes of a register.
TILES = 8


class PackedKeys(NamedTuple):
  """MXFP4 index keys of 128 channels as a cache stores them: 68 bytes an entry.

  Attributes:
    codes: 16 words an entry, one row a candidate block; channel 8w + n is nibble n of word w.
    scales: one word an entry; byte g is the E8M0 scale of channels 32g to 32g + 31.
  """

  codes: Int32[Array, "B blocks 128"]
  scales: Int32[Array, "B scale_rows 128"]

  @property
  def entries(self) -> int:
    return self.codes.shape[1] * BLOCK


def num_tiles(entries: int) -> int:
  """Tiles that hold the scores of `entries` entries."""
  return -(-entries // (TILE * TILES)) * TILES


def to_tiles(scores: Float[Array, "B T C"]) -> Float[Array, "B T N 8 128"]:
  """Scores as tiles: entry 1024·n + 8·l + s at [n, s, l], a block in a lane; −inf pads."""
  b, t, c = scores.shape
  n = num_tiles(c)
  scores = jnp.pad(scores, ((0, 0), (0, 0), (0, n * TILE - c)), constant_values=-jnp.inf)
  return scores.reshape(b, t, n, LANES, BLOCK).swapaxes(-1, -2)


def from_tiles(tiles: Float[Array, "B T N 8 128"], entries: int) -> Float[Array, "B T C"]:
  """Undoes `to_tiles`; `entries` is C."""
  b, t = tiles.shape[:2]
  return tiles.swapaxes(-1, -2).reshape(b, t, -1)[..., :entries]
