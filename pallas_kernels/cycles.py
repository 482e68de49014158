"""Modelled cycles of a compiled program and of the kernels in it, from a dump of its schedules.

Modelled, never measured. `issue` counts the VLIW words that are executed, `latency` the same with
the results' known latencies still in the schedule; a core without other guests needs at least the
latter where DMAs are hidden. What neither holds: waiting for DMAs, bank conflicts, back-pressure
of the matrix unit, limits of the DMA engines.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping

from pallas_kernels import scalar_unit, schedule
from pallas_kernels.chips import CHIPS


@dataclasses.dataclass(frozen=True)
class Cycles:
  """One run of a kernel, or of a whole program.

  Attributes:
    issue: VLIW words, of the slower core where two share a grid.
    latency: words with result latencies, likewise.
    hbm_bytes: bytes that the DMAs of all cores read from HBM and write to it.
    descriptors: number of DMAs of all cores.
    units: share of a unit's slots in use while issuing, of the first core.
    unknown: what a reader should know before quoting the figures; empty if all was known.
  """

  issue: int
  latency: int
  hbm_bytes: int
  descriptors: int
  units: dict[str, float]
  unknown: tuple[str, ...] = ()

  def binds(self, generation: str) -> str:
    """What a kernel waits for: "HBM", or the fullest unit with its share."""
    if self.hbm_bytes / CHIPS[generation].bytes_per_cycle > self.latency:
      return "HBM"
    if not self.units:
      return "nothing"
    # "VLOAD:FILL" and "VSTORE:SPILL" are parts of another unit.
    name = max((unit for unit in self.units if ":" not in unit), key=self.units.get)
    return f"{name} {self.units[name]:.0%}"


def base_name(kernel: str) -> str:
  """Name of a Pallas kernel without the number that XLA gives it."""
  return re.sub(r"\.\d+$", "", kernel)


class Program:
  """A dumped program: `total()`, or `kernel(name)` of one of `calls`.

  Args:
    folder: of the dump, see `pallas_kernels.aot`.
    generation: that it was compiled for.
    operands: contents of operands that reach the scalar unit, by base name of the kernel and number
      of the operand; see `scalar_unit.execute`.
    trips: iterations of loops, by base name and number of the loop; see there.
  """

  def __init__(
      self,
      folder: str | pathlib.Path,
      generation: str,
      operands: Mapping[str, Mapping] | None = None,
      trips: Mapping[str, Mapping[int, int]] | None = None,
  ):
    self.dump, self.generation = schedule.Dump(pathlib.Path(folder)), generation
    self.operands, self.trips = operands or {}, trips or {}
    self._kernels: dict[str, Cycles] = {}

  @functools.cached_property
  def _top(self) -> scalar_unit.Execution:
    text = self.dump.text("TLP", schedule.LATENCY)
    return scalar_unit.execute(schedule.read(text, self.generation), unwritten=scalar_unit.UNKNOWN)

  @property
  def calls(self) -> dict[str, int]:
    """How often each kernel and fused operation runs in one run of the program."""
    return {name: n for name, n in self._top.calls.items() if not name.startswith("<")}

  @property
  def missing(self) -> tuple[str, ...]:
    """Operations without a schedule: what runs on a SparseCore."""
    return tuple(name for name in self.calls if self._file(name) is None)

  def _file(self, name: str) -> str | None:
    """Name in the dump: the compiler makes equal operations once, under one of their names."""
    names = self.dump.names
    if name in names:
      return name
    return next((other for other in names if base_name(other) == base_name(name)), None)

  def kernel(self, name: str) -> Cycles:
    """One run of a kernel or fused operation.

    Raises:
      ValueError: the program has none of that name.
    """
    if name not in self._kernels:
      self._kernels[name] = self._run(name)
    return self._kernels[name]

  def total(self) -> Cycles:
    """All that one run of the program executes, what calls the kernels left out.

    HBM bytes include the copies that XLA starts between them.
    """
    runs = {
        name: (self.kernel(name), n) for name, n in self.calls.items() if name not in self.missing
    }
    summed = {
        key: sum(getattr(each, key) * n for each, n in runs.values())
        for key in ("issue", "latency", "hbm_bytes", "descriptors")
    }
    summed["hbm_bytes"] += self._top.hbm_bytes
    summed["descriptors"] += sum(self._top.dmas.values())
    units = {}
    for each, n in runs.values():
      for unit, share in each.units.items():
        units[unit] = units.get(unit, 0.0) + share * each.issue * n / max(1, summed["issue"])
    unknown = {f"{name}: {what}" for name, (each, _) in runs.items() for what in each.unknown}
    unknown |= {f"{name}: not in the dump" for name in self.missing}
    return Cycles(**summed, units=units, unknown=tuple(sorted(unknown)))

  def _run(self, called: str) -> Cycles:
    name = self._file(called)
    if name is None:
      raise ValueError(f"{called!r} is not in {self.dump.folder}; it has {self.dump.names}")
    cycles: dict[str, list[int]] = {schedule.ISSUE: [], schedule.LATENCY: []}
    executions = []
    for kind, found in cycles.items():
      text = schedule.read(self.dump.text(name, kind), self.generation)
      # On TPU7x, whose device is one core, kernels ask for its number too, to address DMAs.
      for core in range(CHIPS[self.generation].cores if text.core else 1):
        execution = scalar_unit.execute(
            text, self.operands.get(base_name(name)), self.trips.get(base_name(name)), core=core
        )
        found.append(execution.cycles)
        if kind == schedule.ISSUE:
          executions.append(execution)
    first = executions[0]
    used = self.dump.units(name)
    slots = first.passes @ used.used / (used.capacity * max(1, first.cycles))
    unknown = [f"branch at {at:#x} on a vector" for at in first.unknown_branches]
    unknown += [f"{operation} is not understood" for operation in first.unsupported]
    return Cycles(
        issue=max(cycles[schedule.ISSUE]),
        latency=max(cycles[schedule.LATENCY]),
        hbm_bytes=sum(each.hbm_bytes for each in executions),
        descriptors=sum(sum(each.dmas.values()) for each in executions),
        units=dict(zip(used.names, map(float, slots))),
        unknown=tuple(unknown),
    )
