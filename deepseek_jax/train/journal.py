"""What a run writes down: metrics.jsonl, TensorBoard events and the loss curve."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import matplotlib.backends.backend_agg
import matplotlib.figure
import tensorboardX


class Journal:
  """One line of `metrics.jsonl` and one set of TensorBoard scalars a step.

  A line is flushed before its step can be checkpointed; on resume the lines after the restored step
  go, so that no step stands twice.

  Args:
    workdir: receives `metrics.jsonl`, `tensorboard/` and `loss.png`.
    step: finished steps; 0 for a new run.
    writes: False for a process that only remembers, because another one writes.
  """

  def __init__(self, workdir: pathlib.Path, step: int = 0, *, writes: bool = True):
    self._workdir, self._writes = workdir, writes
    path = workdir / "metrics.jsonl"
    self.records = [record for record in _read(path) if record["step"] <= step]
    if not writes:
      return
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in self.records))
    os.replace(partial, path)
    self._file = open(path, "a")
    self._events = tensorboardX.SummaryWriter(
        str(workdir / "tensorboard"), purge_step=step + 1 if step else None
    )

  def write(self, record: Mapping[str, Any]) -> None:
    """Appends `record`: `step` (finished steps, 1 for the first) and numbers or None."""
    self.records.append(dict(record))
    if not self._writes:
      return
    self._file.write(json.dumps(record) + "\n")
    self._file.flush()
    for name, value in record.items():
      if name != "step" and value is not None:
        self._events.add_scalar(name, value, record["step"])

  def plot(self) -> None:
    """Draws `loss.png`: training and evaluation loss by step."""
    if not self._writes:
      return
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    axes = figure.subplots()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o-")):
      of = [record for record in self.records if key in record]
      axes.plot([r["step"] for r in of], [r[key] for r in of], style, label=label)
    axes.set(
        title="Next-token loss over response tokens", xlabel="step", ylabel="loss (nats per token)"
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(self._workdir / "loss.png", dpi=120)

  def close(self) -> None:
    if not self._writes:
      return
    self._file.close()
    self._events.close()


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
  """Records of a metrics file; a last line without its end was cut by a kill and is left out."""
  if not path.exists():
    return []
  whole = path.read_bytes().rpartition(b"\n")[0]
  return [json.loads(line) for line in whole.splitlines()]
