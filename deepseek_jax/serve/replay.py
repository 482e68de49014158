"""The five serving arms: which rows each stack runs to answer a prompt (spec 17).

An arm is a choice of rows. What the rows compute is `nn/`'s affair, and the same as in training.
"""

from typing import NamedTuple

import numpy as np

from deepseek_jax.nn.rows import Rows


class Plan(NamedTuple):
  """Rows of both stacks for one prompt; encoder-only rows come before `decoder_start`.

  Attributes:
    arm: 'A' to 'E'.
    length: tokens of the prompt.
    cached: global entries of tokens [0, cached) are kept and not written again.
    encoder_start: first encoder row.
    encoder_floor: window floor of the encoder's rows, generated ones included.
    decoder_start: first decoder row.
    decoder_floor: likewise.
  """

  arm: str
  length: int
  cached: int
  encoder_start: int
  encoder_floor: int
  decoder_start: int
  decoder_floor: int

  def encoder_rows(self) -> Rows:
    """Rows [encoder_start, length) as the encoder sees them, NumPy, [n]."""
    return self._rows(self.encoder_start, self.encoder_floor)

  def decoder_rows(self) -> Rows:
    """Rows [decoder_start, length) as the decoder sees them."""
    return self._rows(self.decoder_start, self.decoder_floor)

  def _rows(self, start: int, floor: int) -> Rows:
    positions = np.arange(start, self.length, dtype=np.int32)
    same = lambda value: np.full_like(positions, value)
    return Rows(positions, same(floor), same(1), positions >= self.cached)


def _check(length: int, cached: int) -> None:
  if length < 1:
    raise ValueError(f"length is {length}; a prompt has at least 1 token")
  if not 0 <= cached <= length:
    raise ValueError(f"cached is {cached}; it must be within 0..{length}, the prompt's length")


def exact(length: int) -> Plan:
  """Arm A: both stacks over everything."""
  _check(length, 0)
  return Plan("A", length, 0, 0, 0, 0, 0)


def cold(length: int, window: int) -> Plan:
  """Arm B, a production prefill: the decoder reads the last W rows alone."""
  _check(length, 0)
  start = max(0, length - window)
  return Plan("B", length, 0, 0, 0, start, start)


def continued(length: int, cached: int, window: int, floor: int = 0) -> Plan:
  """Arm C: entries of `cached` tokens and the encoder's window state are alive.

  The decoder's last W rows need the encoder's output, so rows of them that are cached run again,
  over older window keys than their own: the state must reach back to W − 1 positions before
  `encoder_start`, or to its floor.

  Args:
    length: tokens of the prompt.
    cached: tokens whose entries are kept.
    window: W.
    floor: encoder floor of the kept window state.

  Raises:
    ValueError: a floor behind the first row that runs.
  """
  _check(length, cached)
  tail = max(0, length - window)
  start = min(cached, tail)
  if not 0 <= floor <= start:
    raise ValueError(f"floor is {floor}; it must be within 0..{start}, the first row that runs")
  return Plan("C", length, cached, start, floor, tail, tail)


def replayed(length: int, cached: int, window: int) -> Plan:
  """Arm D, bounded replay: the last W cached tokens run again and write no entry.

  Hits of at most W tokens save nothing and are recomputed whole, as arm B.
  """
  _check(length, cached)
  if cached <= window:
    return cold(length, window)
  start, tail = cached - window, max(0, length - window)
  return Plan("D", length, cached, start, start, tail, tail)


def exact_replay(length: int, cached: int, window: int, encoder: int, decoder: int) -> Plan:
  """Arm E: as many rows as make both stacks exact, at most all.

  A stack of n layers is exact from n·(W − 1) rows on: its outputs from there, and its W window
  latents n·(W − 1) + 1 rows after the start (spec 17).

  Args:
    length: tokens of the prompt.
    cached: tokens whose entries are kept.
    window: W.
    encoder: layers of the encoder.
    decoder: layers of the decoder.
  """
  _check(length, cached)
  reach = window - 1
  tail = max(0, length - decoder * reach - 1)
  start = max(0, min(cached, tail) - encoder * reach)
  return Plan("E", length, cached, start, start, tail, tail)
