"""Rows: what pre-training, prefill, replay and decode have in common."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, Int32


class Reads(NamedTuple):
  """Segments whose global entries a row reads, where that is not its own segment alone.

  A replayed turn and the decoder's rows of a turn are segments of their own as windows go, and read
  what the encoder made of the conversation (spec 17).

  Attributes:
    own: segment of the encoder's line whose entries the row sees up to its position.
    base: another one, of the same document, whose entries it sees likewise; 0 for none.
    until: only entries of the base that end before this position are seen.
    first: row of the encoder's line with the base's position 0.
  """

  own: Int32[Array | np.ndarray, "*B T"]
  base: Int32[Array | np.ndarray, "*B T"]
  until: Int32[Array | np.ndarray, "*B T"]
  first: Int32[Array | np.ndarray, "*B T"]


class Rows(NamedTuple):
  """Tokens as one stack of layers sees them (report: bounded replay; spec section 17).

  Leading axes beyond B are allowed. Arrays are jax or NumPy.

  Attributes:
    positions: absolute token position within the document. RoPE, causality and which global entries
      exist follow from it. Documents start at 0; padding has position 0.
    floors: window floor s. The window keys of the row at position i are rows of the same stack and
      segment at positions [max(s, i - W + 1), i]; 0 means no floor.
    segments: packed document, turn or replay segment, numbered from 1. A row sees only its own
      segment. Segment 0 is padding: it sees nothing, is seen by nothing and writes nothing. The
      rows of a segment are contiguous and their positions increase by one.
    writes: whether the row may add to global entries. False for replayed rows and padding.
    reads: whose global entries the row sees; None for those of its own segment.
  """

  positions: Int32[Array | np.ndarray, "*B T"]
  floors: Int32[Array | np.ndarray, "*B T"]
  segments: Int32[Array | np.ndarray, "*B T"]
  writes: Bool[Array | np.ndarray, "*B T"]
  reads: Reads | None = None

  @classmethod
  def single(cls, batch: int, length: int) -> "Rows":
    """One document from position 0 on each line, [batch, length], without floor or padding."""
    return cls.of_segments(jnp.ones((batch, length), jnp.int32))

  @classmethod
  def of_segments(cls, segments: Int[Array | np.ndarray, "*B T"]) -> "Rows":
    """Rows of packed documents: positions restart where the segment changes, floors are 0.

    Args:
      segments: as in `Rows`. NumPy in gives NumPy out.
    """
    xp, cummax = (
        (jnp, jax.lax.cummax) if isinstance(segments, Array) else (np, np.maximum.accumulate)
    )
    segments = segments.astype(np.int32)
    index = xp.broadcast_to(xp.arange(segments.shape[-1], dtype=np.int32), segments.shape)
    changes = segments[..., 1:] != segments[..., :-1]
    changes = xp.concatenate([xp.ones_like(segments[..., :1], dtype=bool), changes], axis=-1)
    starts = cummax(xp.where(changes, index, 0), axis=segments.ndim - 1)
    return cls(
        positions=xp.where(segments > 0, index - starts, 0),
        floors=xp.zeros_like(segments),
        segments=segments,
        writes=segments > 0,
    )


class DecoderRows(NamedTuple):
  """What the decoder runs of the encoder's rows: some of them, some more than once, in any order.

  Attributes:
    source: row of the encoder's line; any for padding.
    rows: as the decoder sees them. Segments are numbered apart from the encoder's; `reads.own` is
      always an encoder segment.
  """

  source: Int32[Array | np.ndarray, "*B D"]
  rows: Rows
