"""Learning rate by step."""

import math
from typing import Literal

import jax
import optax


def learning_rate_schedule(
    kind: Literal["constant", "cosine", "report"],
    peak: float,
    warmup_steps: int,
    total_steps: int,
    final: float,
) -> optax.Schedule:
  """Learning rate by step: linear from 0 at step 0 to `peak` at `warmup_steps`, then `kind`.

  - constant: `peak` for ever; `final` is not read.
  - cosine: half a cosine from `peak` to `final * peak` at `total_steps`, constant after it.
  - report: `peak` up to 28/45 of `total_steps`, half a cosine to `final * peak` at 40/45, constant
    after it (report, pre-training: 2,000 warm-up steps, 2.6e-4 to 28T tokens, 2.6e-5 from 40T to
    45T).

  Args:
    kind: the shape after the warm-up.
    peak: largest learning rate.
    warmup_steps: steps; 0 starts at `peak`.
    total_steps: steps of the run, warm-up included.
    final: last learning rate as a fraction of `peak` (report: 0.1).

  Returns:
    An optax schedule.

  Raises:
    ValueError: an unknown kind, or a number out of range.
  """
  if kind not in ("constant", "cosine", "report"):
    raise ValueError(f"kind is {kind!r}; allowed: 'constant', 'cosine', 'report'")
  if not 0 < peak < math.inf:
    raise ValueError(f"peak is {peak}; allowed: finite and > 0")
  if not 0 <= final <= 1:
    raise ValueError(f"final is {final}; allowed: 0 to 1, a fraction of peak")
  hold_end = {"constant": total_steps, "cosine": warmup_steps}.get(
      kind, round(total_steps * 28 / 45)
  )
  decay_end = round(total_steps * 40 / 45) if kind == "report" else total_steps
  if not 0 <= warmup_steps <= hold_end:
    raise ValueError(f"warmup_steps is {warmup_steps}; allowed for {kind!r}: 0 to {hold_end}")
  if kind != "constant" and decay_end <= hold_end:
    raise ValueError(
        f"total_steps is {total_steps}; {kind!r} with {warmup_steps} warm-up steps leaves no step"
        " to decay in"
    )

  pieces, ends = [], []
  if warmup_steps:
    pieces.append(optax.linear_schedule(0.0, peak, warmup_steps))
    ends.append(warmup_steps)
  if hold_end > warmup_steps or kind == "constant":
    pieces.append(optax.constant_schedule(peak))
    ends.append(hold_end)
  if kind == "constant":
    ends.pop()
  else:
    pieces.append(optax.cosine_decay_schedule(peak, decay_end - hold_end, alpha=final))
  schedule = optax.join_schedules(pieces, ends)

  def at(step):
    with jax.numpy_dtype_promotion("standard"):
      return schedule(step)

  return at
