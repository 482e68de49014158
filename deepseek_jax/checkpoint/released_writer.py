"""Parameters of a training checkpoint as released shards (spec 13), a block at a time."""

import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from deepseek_jax.checkpoint import parts, safetensors_file
from deepseek_jax.checkpoint.array_store import ArrayReader
from deepseek_jax.checkpoint.parts import Part
from deepseek_jax.checkpoint.shards import SINGLE, Shards

_BLOCK_BYTES = 32 << 20


class Shard(NamedTuple):
  """A file to write: its raw header and the tensors that follow, in the order of their bytes."""

  header: bytes
  tensors: tuple[str, ...]

  @property
  def num_bytes(self) -> int:
    """Of the payload."""
    found = safetensors_file.parse_header(self.header, "this shard")[1]
    return sum(tensor.num_bytes for tensor in found.values())


class Weights:
  """Released tensors made of the arrays of a training checkpoint.

  What stayed in FP8 or FP4 goes back as it is. Decoded values are encoded; a block of them that
  still has the values of the original keeps the original's bytes.

  Args:
    reader: of the arrays.
    arrays: the parts of a plan by the name of their array.
    original: the checkpoint that the training began with, or None.

  Attributes:
    tensors: dtype and shape by released name.
  """

  def __init__(self, reader: ArrayReader, arrays: Mapping[str, Part], original: Shards | None):
    self._reader, self._original = reader, original
    self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    self._places: dict[str, tuple[str, Part, tuple[int, ...]]] = {}
    for array, part in arrays.items():
      for at, name, dtype, shape in part.tensors():
        self.tensors[name] = dtype, shape
        self._places[name] = array, part, at

  def blocks(self, name: str) -> Iterator[np.ndarray]:
    """The tensor in blocks of rows.

    Raises:
      ValueError: a value is not finite.
      training.DamagedError: the array cannot be read.
    """
    array, part, at = self._places[name]
    lead, inner = tuple(slice(i, i + 1) for i in at), part.shape[part.depth :]
    step = parts.block_rows(part, _BLOCK_BYTES)
    for start in range(0, part.released_rows, step):
      rows = slice(start, min(start + step, part.released_rows))
      found = self._reader.read(array, (*lead, rows, *map(slice, inner[1:])))
      found = found.reshape(-1, *inner[1:])
      if part.role != "values":
        yield found
        continue
      if not np.isfinite(found).all():
        raise ValueError(f"tensor {name} holds values that are not finite; nothing stores them")
      if part.stored is None:
        yield found.astype(safetensors_file.DTYPES[part.file_dtype])
      else:
        codes, scales = self._encode(part, part.names[at], rows, found.astype(np.float32))
        yield codes if name == part.names[at] else scales

  def _encode(self, part: Part, name: str, rows: slice, values: np.ndarray):
    fmt = part.stored
    if self._original is None:
      return fmt.encode(values)
    blocks = slice(rows.start // fmt.rows, -(-rows.stop // fmt.rows))
    codes = self._original.read(name, (rows,))
    scales = self._original.read(parts.scale_name(name), (blocks,))
    return fmt.encode_like(values, codes, scales)


def original_layout(original: Shards) -> dict[str, Shard]:
  """The shards of a checkpoint as they are, headers byte for byte."""
  return {name: Shard(f.header, _in_order(f.tensors)) for name, f in original.files.items()}


def kept_layout(headers: Mapping[str, str], names: Iterable[str]) -> dict[str, Shard]:
  """Shards with the headers of earlier ones, less the tensors that are not in `names`."""
  names, layout = set(names), {}
  for file, text in headers.items():
    header = text.encode()
    metadata, tensors = safetensors_file.parse_header(header, file)
    order = [name for name in _in_order(tensors) if name in names]
    if len(order) < len(tensors):
      left = [(name, tensors[name].dtype, tensors[name].shape) for name in order]
      header = safetensors_file.make_header(left, metadata)
    if order:
      layout[file] = Shard(header, tuple(order))
  return layout


def fresh_layout(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], shard_bytes: int
) -> dict[str, Shard]:
  """New shards of at most `shard_bytes` (or one tensor), layer after layer."""
  groups: list[list[str]] = [[]]
  filled = 0
  for name in sorted(tensors, key=_natural):
    size = _num_bytes(*tensors[name])
    if groups[-1] and filled + size > shard_bytes:
      groups.append([])
      filled = 0
    groups[-1].append(name)
    filled += size
  layout = {}
  for number, names in enumerate(groups, start=1):
    # Wide elements first keep every tensor aligned.
    order = sorted(names, key=lambda n: (-_itemsize(tensors[n][0]), n))
    header = safetensors_file.make_header(((n, *tensors[n]) for n in order), {"format": "pt"})
    file = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else SINGLE
    layout[file] = Shard(header, tuple(order))
  return layout


def make_index(layout: Mapping[str, Shard]) -> str:
  """Text of `model.safetensors.index.json`."""
  where = {name: file for file, shard in layout.items() for name in shard.tensors}
  total = sum(shard.num_bytes for shard in layout.values())
  index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
  return json.dumps(index, indent=2) + "\n"


def tensors_of(headers: Mapping[str, str]) -> set[str]:
  """Names in raw headers by file name."""
  return {
      name
      for file, text in headers.items()
      for name in safetensors_file.parse_header(text.encode(), file)[1]
  }


def write_shard(
    path: pathlib.Path,
    shard: Shard,
    blocks: Callable[[str], Iterable[np.ndarray]],
    progress: Callable[[int], None],
) -> None:
  """Writes one file.

  Args:
    path: the file.
    shard: what it is to hold.
    blocks: gives a tensor in blocks of rows.
    progress: told the bytes of each block.
  """
  with path.open("wb") as file:
    file.write(len(shard.header).to_bytes(8, "little") + shard.header)
    for name in shard.tensors:
      for block in blocks(name):
        file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
        progress(block.nbytes)
    file.flush()
    os.fsync(file.fileno())


def _in_order(tensors: Mapping[str, safetensors_file.Tensor]) -> tuple[str, ...]:
  return tuple(sorted(tensors, key=lambda name: tensors[name][2:]))


def _natural(name: str) -> list[tuple[int, int, str]]:
  return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"\.", name)]


def _itemsize(dtype: str) -> int:
  return np.dtype(safetensors_file.DTYPES[dtype]).itemsize


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
  return int(np.prod(shape)) * _itemsize(dtype)
