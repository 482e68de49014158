"""Order of the 72 words of one main-KV entry in the flat table int32 [N·72/128, 128].

Entry i lies at words 72·i to 72·i + 71, so it starts at lane o = 72·i mod 128, a multiple of 8, and
reaches at most into the next row. Code word w (channels 8w to 8w + 7) stands at a lane that is w
modulo 64: whatever o is, the words of an entry are in place after one choice between its halves,
without a rotation by o. Each of the lanes o to o + 7 modulo 64 occurs twice; the 8 scale words take
those below lane 64, in order.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Integer

LANES = 128
CODES = 64
SCALES = 8
WORDS = CODES + SCALES
# Places of entries repeat: 16 entries fill 9 rows.
PERIOD = 16

# Order of channels that suits decoded words: 4 planes of 128 lanes, plane m with channels 8w + m at
# lane w and 8w + 4 + m at lane 64 + w.
CHANNELS = np.arange(8 * CODES).reshape(CODES, 2, 4).transpose(2, 1, 0).reshape(-1)
PLACES = np.argsort(CHANNELS)


def _turned(words: Integer[Array, "*n 64"], by: Int[Array, "*n"]) -> Integer[Array, "*n 64"]:
  """Word w + `by` modulo 64 at place w; `by` is a multiple of 8."""
  for step in (8, 16, 32):
    moved = jnp.concatenate([words[..., step:], words[..., :step]], axis=-1)
    words = jnp.where((by & step)[..., None] > 0, moved, words)
  return words


def to_stored(
    codes: Integer[Array, "*n c"], scales: Integer[Array, "*n s"], slots: Int[Array, "*n"]
) -> Integer[Array, "*n w"]:
  """Words of the entries at `slots` as the table holds them.

  Entries of another width than 64 + 8 words keep the natural order: codes, then scales.
  """
  if (codes.shape[-1], scales.shape[-1]) != (CODES, SCALES):
    return jnp.concatenate([codes, scales], axis=-1)
  first, scales_first = _start(slots)
  codes = _turned(codes, first + SCALES * scales_first)
  either = [jnp.concatenate(pair, axis=-1) for pair in ((scales, codes), (codes, scales))]
  return jnp.where(scales_first[..., None] > 0, *either)


def from_stored(
    words: Integer[Array, "*n w"], slots: Int[Array, "*n"], codes: int = CODES
) -> tuple[Integer[Array, "*n c"], Integer[Array, "*n s"]]:
  """Undoes `to_stored`: code words and scale words; `codes` is the number of the former."""
  if (codes, words.shape[-1]) != (CODES, WORDS):
    return words[..., :codes], words[..., codes:]
  first, scales_first = _start(slots)
  front = scales_first[..., None] > 0
  scales = jnp.where(front, words[..., :SCALES], words[..., CODES:])
  turned = jnp.where(front, words[..., SCALES:], words[..., :CODES])
  return _turned(turned, -first - SCALES * scales_first), scales


def _start(slots: Int[Array, "*n"]) -> tuple[Int[Array, "*n"], Int[Array, "*n"]]:
  """Lane of the entries' first word, and 1 where their scales stand before their codes.

  An entry that starts below lane 64 has its scales there; one that starts above ends below 64 of
  the next row, and has them there.
  """
  lane = WORDS * (slots & (PERIOD - 1)) & (LANES - 1)
  return lane, (lane < CODES).astype(lane.dtype)
