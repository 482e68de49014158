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


def _natural_words() -> np.ndarray:
  """int32 [16, 72]: which word, of 64 codes and then 8 scales, stands at each place."""
  start = WORDS * np.arange(PERIOD)[:, None] % LANES
  lane = (start + np.arange(WORDS)) % LANES
  word, first = lane % CODES, start % CODES
  is_scale = (lane < CODES) & (first <= word) & (word < first + SCALES)
  return np.where(is_scale, CODES + word - first, word).astype(np.int32)


_STORED = _natural_words()
_NATURAL = np.argsort(_STORED, axis=1).astype(np.int32)


def to_stored(
    codes: Integer[Array, "*n c"], scales: Integer[Array, "*n s"], slots: Int[Array, "*n"]
) -> Integer[Array, "*n w"]:
  """Words of the entries at `slots` as the table holds them.

  Entries of another width than 64 + 8 words keep the natural order: codes, then scales.
  """
  words = jnp.concatenate([codes, scales], axis=-1)
  if (codes.shape[-1], scales.shape[-1]) != (CODES, SCALES):
    return words
  return jnp.take_along_axis(words, jnp.asarray(_STORED)[slots & (PERIOD - 1)], axis=-1)


def from_stored(
    words: Integer[Array, "*n w"], slots: Int[Array, "*n"], codes: int = CODES
) -> tuple[Integer[Array, "*n c"], Integer[Array, "*n s"]]:
  """Undoes `to_stored`: code words and scale words; `codes` is the number of the former."""
  if (codes, words.shape[-1]) == (CODES, WORDS):
    words = jnp.take_along_axis(words, jnp.asarray(_NATURAL)[slots & (PERIOD - 1)], axis=-1)
  return words[..., :codes], words[..., codes:]
