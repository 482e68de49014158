"""A released checkpoint on disk: safetensors shards and the index that says which holds what."""

import hashlib
import json
import pathlib
from collections.abc import Iterator

import numpy as np

from deepseek_jax.checkpoint.safetensors_file import SafetensorsFile, Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Shards:
  """All tensors of a folder, none of them read yet.

  Args:
    directory: holds `model.safetensors.index.json` and its shards, or `model.safetensors` alone.

  Attributes:
    directory: the folder.
    files: shards by file name, in the order of their names.
    tensors: entries by tensor name, over all shards.

  Raises:
    ValueError: no checkpoint, a shard that is missing, truncated or none, an index that names a
      tensor its shard does not hold, or a shard with a tensor that the index does not name.
  """

  def __init__(self, directory: str | pathlib.Path):
    self.directory = pathlib.Path(directory)
    index = self.directory / INDEX
    if not index.is_file() and not (self.directory / SINGLE).is_file():
      raise ValueError(
          f"{self.directory} holds neither {INDEX} nor {SINGLE}; it must be a released checkpoint"
      )
    self._file_of = _read_index(index) if index.is_file() else {}
    names = sorted(set(self._file_of.values())) or [SINGLE]
    for name in names:
      if not (self.directory / name).is_file():
        count = len(names)
        raise ValueError(f"shard {self.directory / name} is missing; {INDEX} names {count} shards")
    self.files = {name: SafetensorsFile(self.directory / name) for name in names}
    if not index.is_file():
      self._file_of = dict.fromkeys(self.files[SINGLE].tensors, SINGLE)
    self.tensors: dict[str, Tensor] = {}
    for tensor, name in self._file_of.items():
      if tensor not in self.files[name].tensors:
        raise ValueError(f"tensor {tensor} is missing: {INDEX} says that {name} holds it")
      self.tensors[tensor] = self.files[name].tensors[tensor]
    for name, file in self.files.items():
      stray = [t for t in file.tensors if self._file_of.get(t) != name]
      if stray:
        raise ValueError(
            f"shard {name} holds tensor {stray[0]} ({len(stray)} such); {INDEX} does not say so"
        )

  @property
  def bytes_read(self) -> int:
    """Bytes of tensors that this process has asked for; headers do not count."""
    return sum(file.bytes_read for file in self.files.values())

  def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    """See `SafetensorsFile.read`."""
    return self.files[self._file_of[name]].read(name, index)

  def blocks(self, name: str, most_bytes: int) -> Iterator[np.ndarray]:
    """A tensor in blocks of rows of at most `most_bytes`, or of one row."""
    tensor = self.tensors[name]
    if not tensor.shape:
      yield self.read(name)
      return
    rows = tensor.shape[0]
    step = max(1, most_bytes * rows // max(1, tensor.num_bytes))
    for start in range(0, rows, step):
      yield self.read(name, (slice(start, min(start + step, rows)),))

  def fingerprint(self) -> str:
    """A digest of names, sizes, times of change and headers; payloads are not read."""
    digest = hashlib.sha256()
    for name, file in self.files.items():
      stat = file.path.stat()
      digest.update(f"{name} {stat.st_size} {stat.st_mtime_ns} ".encode() + file.header)
    return digest.hexdigest()


def _read_index(path: pathlib.Path) -> dict[str, str]:
  try:
    found = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    plain = {str(tensor): pathlib.PurePath(name).name == name for tensor, name in found.items()}
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise ValueError(f"{path} has no weight_map from tensors to shards ({error!r})") from None
  for tensor, is_plain in plain.items():
    if not is_plain:
      raise ValueError(
          f"{path} puts tensor {tensor} into {found[tensor]!r}; allowed are files beside it"
      )
  return found
