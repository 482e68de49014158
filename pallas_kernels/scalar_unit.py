"""The scalar unit: executes the control flow of a static schedule and counts what it passes.

The scalar program stands in the schedule, so no trip count has to be guessed: scalar instructions
run on the physical registers and on SMEM, vector instructions are only counted. What the vector
unit hands over is unknown; so is all that follows from it. Every straight piece of the program is
turned into a Python function, since a kernel executes millions of words.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pallas_kernels import scalar_ops as ops
from pallas_kernels.scalar_ops import UNKNOWN
from pallas_kernels.schedule import Schedule

GRANULE = 32  # bytes: the unit of DMA sizes and HBM addresses
# Buffers are far enough apart that no index leads from one into the next.
_APART = 1 << 20

_RESULT = re.compile(r"%[sp]\d+_([sp]\d+) = ([a-z][\w.]*)(.*)", re.S)
_EFFECT = re.compile(r"%\d+ = (sst|dma\.[a-z_]+)\b(.*)", re.S)
_TOKEN = re.compile(r"%[sp]\d+_([sp]\d+)|#(\w+)|\$?(-?0x[0-9a-f]+|-?\d+)")
_SMEM = re.compile(r"\[smem:(.*?\]|[^\]]*)\]", re.S)
_OPERAND = re.compile(r"index: (\d+)")
_NAMED = re.compile(r"/\*(\w+)=\*/([^,/]+)")


@dataclasses.dataclass(frozen=True)
class Loop:
  """A loop as executed: address of its first word, words of its body, entries, iterations."""

  header: int
  body: int
  entries: int
  iterations: int


@dataclasses.dataclass(frozen=True)
class Execution:
  """What one run of a schedule passed.

  Attributes:
    cycles: words executed.
    passes: int64 [words], how often each word was executed.
    loops: those that were entered, by address.
    dmas: number of DMA descriptors by kind ("hbm_to_vmem", ...).
    dma_bytes: their bytes, likewise.
    calls: runs of each called kernel, if the schedule is that of a program.
    unknown_branches: addresses of branches on a value of the vector unit, taken as not taken.
    defaulted: names of buffers whose contents were not given and read as zeros.
    unsupported: instructions that gave an unknown value because the interpreter has no meaning
      for them.
  """

  cycles: int
  passes: np.ndarray
  loops: tuple[Loop, ...]
  dmas: dict[str, int]
  dma_bytes: dict[str, int]
  calls: dict[str, int]
  unknown_branches: tuple[int, ...]
  defaulted: tuple[str, ...]
  unsupported: tuple[str, ...]

  @property
  def hbm_bytes(self) -> int:
    """Bytes that DMAs read from HBM plus those they write to it.

    A "general" DMA keeps its memories in a descriptor; it counts as one between HBM and VMEM.
    """
    ends = {kind: kind.split("_to_").count("hbm") for kind in self.dma_bytes}
    return sum(n * (kind == "general" or ends[kind]) for kind, n in self.dma_bytes.items())


def execute(
    schedule: Schedule,
    operands: Mapping[int, int | Sequence[int] | np.ndarray] | None = None,
    trips: Mapping[int, int] | None = None,
    *,
    core: int = 0,
    unwritten: Any = 0,
    limit: int = 200_000_000,
) -> Execution:
  """Runs a schedule from its first word to its last.

  Args:
    schedule: what to run.
    operands: contents of operands that reach the scalar unit, by operand number: an int for a
      scalar, int32 words for an array that is copied to SMEM. Others are zeros.
    trips: iterations of loops whose end the vector unit decides, by the number of the loop in the
      order of their first words (the same in both texts of a kernel).
    core: number of the core, where the schedule asks for it.
    unwritten: what SMEM holds that nobody wrote; `UNKNOWN` runs all of a program (`TLP`), which
      starts with a question whether there is anything to do.
    limit: most words to execute.

  Raises:
    RuntimeError: the program does not end within `limit` words.
  """
  machine = _Machine(schedule, dict(operands or {}), dict(trips or {}))
  machine.smem.unwritten = unwritten
  if schedule.core:
    machine.smem[machine.buffer(schedule.core)] = core
  return machine.run(limit)


class _Smem(dict):
  """SMEM by word address. A word that nobody wrote is noted; an unknown address holds unknowns."""

  def __init__(self):
    super().__init__()
    self.unwritten: Any = 0
    self.missed: set[int] = set()

  def __missing__(self, address):
    if address is UNKNOWN:
      return UNKNOWN
    self.missed.add(address // _APART)
    return self.unwritten


class _Piece:
  """Words `start` to `end` (exclusive), the last of them the last delay slot of a branch."""

  def __init__(self, start: int, end: int, run: Callable[[], int]):
    self.start, self.end, self.run, self.passes = start, end, run, 0


class _Machine:

  def __init__(self, schedule: Schedule, operands: dict, trips: dict[int, int]):
    self.schedule, self.operands = schedule, operands
    self.buffers: dict[str, int] = {}
    self.dmas, self.dma_bytes, self.calls = (collections.Counter() for _ in range(3))
    self.taken, self.unknown, self.unsupported = (collections.Counter() for _ in range(3))
    backward = sorted((b.target, at) for at, b in schedule.branches.items() if b.target <= at)
    headers = sorted({target for target, _ in backward})
    self.backward = backward
    self.forced = {at: trips[headers.index(t)] for t, at in backward if headers.index(t) in trips}
    self.turns = dict.fromkeys(self.forced, 0)
    self.smem = _Smem()
    self.names = {
        "m": self.smem, "U": UNKNOWN, "_dma": self._dma, "_branch": self._branch,
        "_call": self._call, "_min": ops.minimum, "_max": ops.maximum,
    }  # fmt: skip
    for word in schedule.words:
      for instruction in word.instructions:
        for register in re.findall(r"%[sp]\d+_([sp]\d+)", instruction):
          self.names.setdefault(register, UNKNOWN)

  def run(self, limit: int) -> Execution:
    count = len(self.schedule.words)
    pieces: dict[int, _Piece] = {}
    at = cycles = 0
    while at < count:
      piece = pieces.get(at)
      if piece is None:
        piece = pieces[at] = self._piece(at)
      piece.passes += 1
      cycles += piece.end - piece.start
      if cycles > limit:
        raise RuntimeError(f"the schedule does not end within {limit} words; at {piece.start:#x}")
      at = piece.run()
    passes = np.zeros(count + 1, np.int64)
    for piece in pieces.values():
      passes[piece.start] += piece.passes
      passes[piece.end] -= piece.passes
    passes = np.cumsum(passes)[:-1]
    named = {base // _APART: name for name, base in self.buffers.items()}
    return Execution(
        cycles=cycles,
        passes=passes,
        loops=tuple(self._loops(passes)),
        dmas=dict(self.dmas),
        dma_bytes=dict(self.dma_bytes),
        calls=dict(self.calls),
        unknown_branches=tuple(sorted(self.unknown)),
        defaulted=tuple(sorted({named.get(n, "?") for n in self.smem.missed})),
        unsupported=tuple(sorted(self.unsupported)),
    )

  def _loops(self, passes):
    for header, at in self.backward:
      if passes[header]:
        end = min(at + self.schedule.branches[at].delay, len(passes) - 1)
        iterations = int(passes[header])
        yield Loop(header, end + 1 - header, iterations - self.taken[at], iterations)

  def _piece(self, start: int) -> _Piece:
    """The function of the words from `start` to the delay slots of the first branch behind it."""
    lines, count = ["pass"], len(self.schedule.words)
    at, end, jump = start, count, None
    while at < end:
      branch = self.schedule.branches.get(at)
      if branch is not None and jump is None:
        end, jump = min(at + branch.delay + 1, count), branch
        condition = "True"
        if branch.predicate:
          condition = branch.predicate + (" ^ True" if branch.negated else "")
        lines.append(f"_jump = _branch({at}, {condition})")
      lines += self._lines(at)
      at += 1
    lines.append(f"return {jump.target} if _jump else {end}" if jump else f"return {end}")
    assigned = sorted({r for line in lines for r in re.findall(r"\b[sp]\d+\b", line)})
    body = ([f"global {', '.join(assigned)}"] if assigned else []) + lines
    exec("def piece():\n  " + "\n  ".join(body), self.names)
    return _Piece(start, end, self.names["piece"])

  def _lines(self, at: int) -> list[str]:
    """Statements of a word. All its reads see the state before it, so it is one assignment."""
    word = self.schedule.words[at]
    before, targets, values, behind = [], [], [], []
    if word.call:
      before.append(f"_call({word.call!r})")
    for instruction in word.instructions:
      if match := _RESULT.match(instruction):
        if match[2].startswith("sbr") or match[2] in ("sphi", "pphi"):
          continue  # a phi joins values that share a physical register
        if match[2].startswith("int_to_ptr") and match[3].endswith(f"_{match[1]}"):
          continue  # a name for what this word or an earlier one put there
        text, condition, other = ops.guard(match[3])
        value = self._value(match[2], text)
        if condition:
          value = f"({value}) if {condition} else {other or match[1]}"
        targets.append(match[1])
        values.append(value)
      elif match := _EFFECT.match(instruction):
        text, condition, _ = ops.guard(match[2])
        if match[1] == "sst":
          address, value = self._stored(text)
          key = f"_k{len(behind)}"
          targets += [key, f"_v{len(behind)}"]
          values += [f"({address}) if {condition} else U" if condition else address, value]
          behind.append(f"if {key} is not U: m[{key}] = _v{len(behind)}")
        elif not match[1].startswith("dma.done"):
          call = self._transfer(match[1], text)
          before.append(f"if {condition}: {call}" if condition else call)
    if targets:
      before.append(f"{', '.join(targets)} = {', '.join(values)}")
    return before + behind

  def _value(self, name: str, text: str) -> str:
    """Expression of an instruction's result; "U" if it cannot be known."""
    operation, _, kind = name.partition(".")
    if operation == "inlined_call_operand":
      index = int(_OPERAND.search(text)[1])
      if "<no memory space>" in text:
        return repr(ops.signed(int(np.ravel(self.operands.get(index, 0))[0])))
      return repr(self.buffer(f"operand{index}"))
    if operation == "scalar_parameter_address":
      return repr(self.buffer(f"parameter{text.strip()}"))
    if operation == "sld":
      return f"m[{self._sum(_SMEM.search(text)[1])}]"
    if operation in ("spop", "vpop"):
      return "U"
    if operation == "int_to_ptr":
      text = text.partition("]")[2] if "resolvable" in text else text
    arguments = [self._sum(part) for part in ops.plain(text).split(",") if part.strip()]
    if operation in ("smov", "pmov", "int_to_ptr"):
      return arguments[0]
    if operation == "scalar_lea":
      return ops.wrapped(" + ".join(arguments))
    if operation == "scalar_select":
      return "({1} if {0} else {2}) if {0} is not U else U".format(*arguments)
    if operation == "pneg":
      return f"{arguments[0]} ^ True"
    expression = ops.binary(operation, kind, arguments)
    if expression is None:
      self.unsupported[name] += 1
      return "U"
    return expression

  def buffer(self, name: str) -> int:
    # Some DMAs have addresses that are shifted by four bits: no number is a multiple of 16.
    number = len(self.buffers) + 1 + len(self.buffers) // 15
    return self.buffers.setdefault(name, number * _APART)

  def _sum(self, text: str) -> str:
    """A register, a literal, the address of a buffer, or a sum of them."""
    terms = []
    for register, buffer, literal in _TOKEN.findall(text):
      number = self.buffer(buffer) if buffer else None if register else ops.signed(int(literal, 0))
      terms.append(register or repr(number))
    return " + ".join(terms) or "U"

  def _stored(self, text: str) -> tuple[str, str]:
    match = _SMEM.search(text)
    return self._sum(match[1]), self._sum(text[match.end() :])

  def _transfer(self, name: str, text: str) -> str:
    named = dict(_NAMED.findall(text))
    kind = name.removeprefix("dma.")
    source, _, target = kind.partition("_to_")
    size = self._sum(named.get("size_in_granules", "0"))
    places = (self._sum(named.get(each, "")) for each in (source, target))
    return f"_dma({kind!r}, {size}, {', '.join(places)})"

  def _dma(self, kind, granules, source, target):
    self.dmas[kind] += 1
    self.dma_bytes[kind] += 0 if granules is UNKNOWN else granules * GRANULE
    if not kind.endswith("to_smem") or UNKNOWN in (source, target, granules):
      return
    names = {base // _APART: name for name, base in self.buffers.items()}
    for apart in (_APART, _APART << 4):
      name = names.get(source // apart, "")
      if name.startswith("operand"):
        break
    else:
      return
    given = self.operands.get(int(name.removeprefix("operand")))
    if given is None:
      return
    first = source % apart * GRANULE // 4
    words = np.ravel(given)[first : first + granules * GRANULE // 4]
    self.smem.update(enumerate(map(int, words), target))

  def _branch(self, at: int, condition) -> bool:
    if at in self.forced:
      self.turns[at] += 1
      condition = self.turns[at] < self.forced[at]
      self.turns[at] *= condition
    elif condition is UNKNOWN:
      self.unknown[at] += 1
    if condition:
      self.taken[at] += 1
      return True
    return False

  def _call(self, name: str):
    self.calls[name] += 1
