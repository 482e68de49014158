"""The gather of a request's entries: one descriptor of two rows an entry."""

import functools

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


class Gather:
  """Descriptors of one query.

  Args:
    unrolled: see `kernel.Blocks`.
    numbers: SMEM int32 [4, 128], first rows of the entries, by quarters.
    data: int32 [R, 128] in HBM.
    buffer: int32 [2, K, 128]: row of the descriptor, entry.
    semaphore: of all copies.
  """

  def __init__(self, unrolled: bool, numbers, data, buffer, semaphore):
    self.unrolled, self.numbers, self.data = unrolled, numbers, data
    self.buffer, self.semaphore = buffer, semaphore

  def _start(self, part: int, lane):
    source = self.data.at[pl.ds(self.numbers[part, lane], 2)]
    entry = part * (self.buffer.shape[1] // 4) + lane
    pltpu.make_async_copy(source, self.buffer.at[:, entry], self.semaphore).start()

  def start(self, first: float, last: float):
    """Those of a share of the entries."""
    count = self.buffer.shape[1]
    quarter = count // 4
    for part in range(4):
      lanes = [min(max(round(k * count) - part * quarter, 0), quarter) for k in (first, last)]
      start = functools.partial(self._start, part)
      if self.unrolled:
        for lane in range(*lanes):
          start(lane)
      elif lanes[1] > lanes[0]:
        pl.loop(*lanes)(start)

  def wait(self):
    pltpu.make_async_copy(self.buffer, self.buffer, self.semaphore).wait()
