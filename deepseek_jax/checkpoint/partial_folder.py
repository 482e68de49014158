"""A folder that has its name only when it is complete, and may be filled in several runs."""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

_JOURNAL = "journal.jsonl"


class PartialFolder:
  """The folder `NAME.partial` beside a target that does not exist yet.

  Its journal holds what is finished. A run that was killed is continued by one with the same
  fingerprint; with another, the folder is emptied first.

  Attributes:
    path: the folder to fill.
    done: what earlier runs have finished: name to the value given to `finish`.
  """

  def __init__(self, target: pathlib.Path, path: pathlib.Path, journal: Any):
    self._target, self.path, self._journal = target, path, journal
    self.done: dict[str, Any] = {}

  def finish(self, name: str, value: Any) -> None:
    """Notes that `name` is complete in the folder."""
    self.done[name] = value
    self._append([name, value])

  def commit(self) -> None:
    """Gives the folder its name, once the disk has all of it."""
    os.sync()
    if self._target.exists():
      self._target.rmdir()
    self.path.rename(self._target)
    (self._target / _JOURNAL).unlink()

  def _append(self, entry: Any) -> None:
    self._journal.write(json.dumps(entry) + "\n")
    self._journal.flush()

  def _read(self, fingerprint: str) -> None:
    self._journal.seek(0)
    entries = []
    for line in self._journal:
      # The last line of a killed run may be cut short.
      with contextlib.suppress(ValueError):
        entries.append(json.loads(line))
    if entries[:1] != [["fingerprint", fingerprint]]:
      entries = [["fingerprint", fingerprint]]
      for path in self.path.iterdir():
        if path.is_dir():
          shutil.rmtree(path)
        elif path.name != _JOURNAL:
          path.unlink()
    self._journal.seek(0)
    self._journal.truncate()
    for entry in entries:
      self._append(entry)
    self.done = dict(entries[1:])


@contextlib.contextmanager
def open_partial(target: str | pathlib.Path, fingerprint: str) -> Iterator[PartialFolder]:
  """The partial folder of `target`, locked until the end of the block.

  Args:
    target: what `commit` creates; its parent is created.
    fingerprint: of all that decides what the folder will hold.

  Raises:
    ValueError: the target exists and is no empty folder, or another process fills it.
  """
  target = pathlib.Path(target).absolute()
  if target.exists() and (not target.is_dir() or any(target.iterdir())):
    raise ValueError(f"target {target} exists; it must be a new or an empty folder")
  path = target.with_name(target.name + ".partial")
  path.mkdir(parents=True, exist_ok=True)
  with (path / _JOURNAL).open("a+", encoding="utf-8") as journal:
    try:
      fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(f"target {target} is being written by another process") from None
    folder = PartialFolder(target, path, journal)
    folder._read(fingerprint)
    yield folder
