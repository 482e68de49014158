"""What an optimised program moves between devices, read from its text."""

import collections
import math
import re
from typing import NamedTuple

_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4,
    "s64": 8, "u64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1,
    "f8e8m0fnu": 1, "f4e2m1fn": 0.5,
}  # fmt: skip
_KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute",
)  # fmt: skip
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(_KINDS)})(-start)?\(")


class Collectives(NamedTuple):
  """Of one kind, on one device.

  Attributes:
    count: executions of a step; those inside a loop as often as it is known to run, once if that
      is not known.
    bytes: of their results, over all executions.
    largest: bytes of the largest single result.
  """

  count: int
  bytes: int
  largest: int


def result_bytes(text: str) -> int:
  """Bytes of an HLO type; of a tuple, its largest array (a -start holds its operand too)."""
  sizes = [
      math.prod(int(n) for n in dims.split(",") if n) * _BYTES.get(kind, 0)
      for kind, dims in re.findall(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]", text)
  ]
  return int(max(sizes, default=0))


def _executions(hlo: str) -> dict[str, int]:
  """How often each computation runs, by name, as far as trip counts are known."""
  calls: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
  name, entry = None, None
  for line in hlo.splitlines():
    if line.endswith("{") and " = " not in line:
      name = line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")
      entry = name if line.startswith("ENTRY") else entry
      continue
    if name is None:
      continue
    trip = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    times = int(trip[1]) if trip and " while(" in line else 1
    for called in re.findall(
        r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", line
    ):
      calls[name].append((called, times))
    for group in re.findall(r"branch_computations=\{([^}]*)\}", line):
      calls[name] += [(each.strip().lstrip("%"), 1) for each in group.split(",")]
  found: dict[str, int] = collections.Counter()

  def visit(name: str, times: int) -> None:
    found[name] += times
    for called, each in calls.get(name, ()):
      visit(called, times * each)

  if entry is not None:
    visit(entry, 1)
  return found


def collectives(hlo: str) -> dict[str, Collectives]:
  """Collectives of an optimised program by kind."""
  runs, name = _executions(hlo), None
  sizes: dict[str, dict[int, int]] = {}
  for line in hlo.splitlines():
    if line.endswith("{") and " = " not in line:
      name = line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")
      continue
    match = _COLLECTIVE.search(line)
    if match and name is not None:
      counts = sizes.setdefault(match[2], {})
      size = result_bytes(match[1])
      counts[size] = counts.get(size, 0) + max(1, runs.get(name, 1))
  found = {}
  for kind, counts in sizes.items():
    total = sum(size * times for size, times in counts.items())
    found[kind] = Collectives(sum(counts.values()), total, max(counts))
  return found
