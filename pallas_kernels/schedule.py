"""Static schedules: the text that the TPU compiler writes of the VLIW words of a kernel.

A dump of `pallas_kernels.aot` holds for every kernel and every fused operation of a program
  *-final_bundles.txt            the words as they are emitted: their number is the issue time;
  *-packed-bundles-post-ra.txt   the same schedule with an empty word wherever the hardware would
                                 wait for a result of known latency;
  *-final_hlo-static-per-bundle-utilization.txt   the units that each emitted word uses,
and one `TLP` of the program, which calls them. `read` turns such a text into a `Schedule`, which
`scalar_unit.execute` runs. The cycles are modelled, never measured: nothing waits for memory.
"""

import pathlib
import re
from typing import NamedTuple

import numpy as np

# Words that are executed after a branch, whether it is taken or not.
DELAY_SLOTS = {"v5e": 4, "v5p": 4, "v6e": 4, "tpu7x": 6}

ISSUE = "final_bundles"
LATENCY = "packed-bundles-post-ra"
_UNITS = "final_hlo-static-per-bundle-utilization"

_WORD = re.compile(r"\s*(?:0|0x[0-9a-f]+)\s+(LH|LB|LE|PB|PF|CT)?\s*:\s*((?:> *)*)\{")
# Names of operands are comments of one word with an equals sign, which the interpreter reads.
_COMMENT = re.compile(r"/\*(?!\w+=\*/).*?\*/", re.S)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(
    r"= sbr\.\w+ (?:\((?P<negated>!?)%p\d+_(?P<predicate>p\d+)\) )?"
    r"target (?:= \$region(?P<region>\d+)|bundleno = (?P<address>\d+))"
)
_CALL = re.compile(r"= inlined_call\b.*?/\* (?:%(\S+) = |(<[\w-]+>))", re.S)
_CORE = re.compile(r"= sld \[smem:\[#(\w+)\]\] /\* core id \*/")
_PREDICATED = re.compile(r"\(!?%p\d+_p\d+")


class Word(NamedTuple):
  """One VLIW word: what stands before it, its loop depth, its instructions without comments."""

  label: str
  depth: int
  instructions: tuple[str, ...]
  call: str | None
  regions: tuple[int, ...]


class Branch(NamedTuple):
  """A branch: `delay` words after it, the word `target` follows.

  `predicate` is a physical register, or None where the branch is always taken.
  """

  predicate: str | None
  negated: bool
  target: int
  delay: int


class Schedule(NamedTuple):
  """The words of one kernel, by address, and its branches, by the address they stand at.

  `core` is the name of the SMEM buffer with the number of the core, where two cores run the text.
  """

  words: tuple[Word, ...]
  branches: dict[int, Branch]
  core: str | None

  @property
  def empty(self) -> int:
    """Number of words without an instruction."""
    return sum(not word.instructions for word in self.words)


def read(text: str, generation: str) -> Schedule:
  """Reads a text of either kind.

  Args:
    text: contents of a `final_bundles` or `packed-bundles-post-ra` file.
    generation: a key of `DELAY_SLOTS`.

  Raises:
    ValueError: an unknown generation, or a text without words.
  """
  if generation not in DELAY_SLOTS:
    raise ValueError(f"generation is {generation!r}; it must be one of {', '.join(DELAY_SLOTS)}")
  words = []
  lines: list[str] = []
  for line in text.splitlines():
    if _WORD.match(line):
      if lines:
        words.append(_word("\n".join(lines)))
      lines = [line]
    elif lines:
      lines.append(line)
  if not lines:
    raise ValueError("text has no VLIW word; it must be a schedule of final bundles or post-ra")
  words.append(_word("\n".join(lines)))
  core = _CORE.search(text)
  return Schedule(
      tuple(words), _branches(words, DELAY_SLOTS[generation]), core[1] if core else None
  )


def _word(text: str) -> Word:
  start = _WORD.match(text)
  end = text.rfind("}")
  inside, after = text[start.end() : end], text[end:]
  call = _CALL.search(inside)
  parts = (part.strip() for part in _COMMENT.sub("", inside).split("  ;;  "))
  return Word(
      label=start[1] or "",
      depth=start[2].count(">"),
      instructions=tuple(part for part in parts if part),
      call=call and (call[1] or call[2]),
      regions=tuple(map(int, _REGION.findall(after))),
  )


def _branches(words: list[Word], slots: int) -> dict[int, Branch]:
  starts: dict[int, int] = {}
  for address, word in enumerate(words):
    for region in word.regions:
      starts.setdefault(region, address)
  found = {}
  for address, word in enumerate(words):
    for instruction in word.instructions:
      match = _BRANCH.search(instruction)
      if not match:
        continue
      delay = slots
      if match["region"] is None:
        target = int(match["address"])
      else:
        # A region without a mark is the end: what a second core skips to.
        target = starts.get(int(match["region"]), len(words) - 1)
        if slots > 4:
          delay = _written_slots(words, address, target, slots)
      found[address] = Branch(match["predicate"], match["negated"] == "!", target, delay)
  return found


def _written_slots(words: list[Word], branch: int, target: int, slots: int) -> int:
  """Delay slots that final bundles of TPU7x write out: a run of empty ones at their end is one.

  The first empty word is that run if what follows belongs to something else: another region, or,
  behind a loop, words of a lower depth that do not all depend on a predicate of the loop.
  """
  for number in range(1, slots):
    behind = branch + number + 1
    if behind >= len(words) or words[behind - 1].instructions:
      continue
    word = words[behind]
    left = target <= branch and word.depth < words[target].depth
    if word.label or word.regions or (
        left and any(not _PREDICATED.search(each) for each in word.instructions)
    ):  # fmt: skip
      return number
  return slots


class Units(NamedTuple):
  """Slots of each unit that every emitted word uses: `used` int [words, units]."""

  names: tuple[str, ...]
  capacity: np.ndarray
  used: np.ndarray


def read_units(text: str) -> Units:
  """Reads a utilisation file.

  Raises:
    ValueError: the text has no such table.
  """
  lines = [line for line in text.splitlines() if line.strip() and not line.startswith("==")]
  if len(lines) < 3 or "," not in lines[0]:
    raise ValueError("text has no table of units; it must be a per-bundle utilisation file")
  names = tuple(name.strip() for name in lines[0].split(","))
  rows = np.array([line.split() for line in lines[1:]], np.int64)
  return Units(names, rows[0], rows[1:])


class Dump(NamedTuple):
  """The schedules of one compiled program in a folder."""

  folder: pathlib.Path

  @property
  def names(self) -> tuple[str, ...]:
    """Kernels, fused operations and `TLP`, which calls them."""
    return tuple(sorted(self._files(ISSUE)))

  def text(self, name: str, kind: str) -> str:
    """Contents of the file of `name`; kind is `ISSUE` or `LATENCY`.

    Raises:
      ValueError: there is no such file.
    """
    files = self._files(kind)
    if name not in files:
      known = ", ".join(sorted(files)) or "nothing"
      raise ValueError(f"{self.folder} has no schedule of {name!r}; it has {known}")
    return files[name].read_text(errors="replace")

  def units(self, name: str) -> Units:
    """The utilisation of the words of `name`."""
    return read_units(self.text(name, _UNITS))

  def _files(self, kind: str) -> dict[str, pathlib.Path]:
    pattern = re.compile(rf"\d+-(.+)-\d+-{kind}\.txt")
    matches = ((pattern.fullmatch(file.name), file) for file in sorted(self.folder.iterdir()))
    return {match[1]: file for match, file in matches if match}
