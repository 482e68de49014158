"""One safetensors file: its header in full, its tensors through memory maps of wanted rows."""

import json
import math
import mmap
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

# Numpy types of the file's dtypes. FP8 and scales stay bytes: their meaning is `weight_formats`'.
DTYPES: Mapping[str, Any] = {
    "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8, "BOOL": np.bool_, "I8": np.int8,
    "U8": np.uint8, "I16": np.int16, "U16": np.uint16, "F16": np.float16,
    "BF16": ml_dtypes.bfloat16, "I32": np.int32, "U32": np.uint32, "F32": np.float32,
    "I64": np.int64, "U64": np.uint64, "F64": np.float64,
}  # fmt: skip
# The format's own limit.
_LONGEST_HEADER = 100_000_000


class Tensor(NamedTuple):
  """An entry of a header: dtype as spelled in the file, shape, byte range in the payload."""

  dtype: str
  shape: tuple[int, ...]
  start: int
  stop: int

  @property
  def num_bytes(self) -> int:
    return self.stop - self.start


class SafetensorsFile:
  """A file whose header has been read and found to describe exactly the bytes that follow it.

  Args:
    path: the file.

  Attributes:
    path: the file.
    header: its raw header, padding included.
    metadata: the strings under `__metadata__`.
    tensors: entries by name, in the header's order.
    bytes_read: payload bytes handed out so far.

  Raises:
    ValueError: the file is truncated, has bytes that no tensor owns, a header that is none, or a
      dtype that is not in `DTYPES`.
    OSError: it cannot be read.
  """

  def __init__(self, path: str | pathlib.Path):
    self.path = pathlib.Path(path)
    self.bytes_read = 0
    size = self.path.stat().st_size
    with self.path.open("rb") as file:
      length = int.from_bytes(file.read(8), "little")
      if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise ValueError(
            f"{self.path} has {size} bytes and asks for a header of {length}; it is truncated or no"
            " safetensors file"
        )
      self.header = file.read(length)
    self._payload = 8 + length
    self.metadata, self.tensors = parse_header(self.header, str(self.path))
    promised = max((t.stop for t in self.tensors.values()), default=0)
    if size - self._payload != promised:
      what = "truncated" if size - self._payload < promised else "longer than its tensors"
      raise ValueError(
          f"{self.path} is {what}: its header describes {promised} bytes of tensors, it holds"
          f" {size - self._payload}"
      )

  def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    """A tensor, or a block of it, as a view of a memory map that lives as long as the view.

    Only the rows of `index[0]` are mapped: one contiguous byte range.

    Args:
      name: in `tensors`.
      index: slices without a step for the leading axes; missing ones take everything.
    """
    tensor = self.tensors[name]
    dtype = np.dtype(DTYPES[tensor.dtype])
    rows = slice(*(index[0].indices(tensor.shape[0])[:2])) if index else slice(0, 1)
    inner = tensor.shape[1:] if index else tensor.shape
    shape = (max(rows.stop - rows.start, 0), *inner)
    row_bytes = math.prod(inner) * dtype.itemsize
    count = math.prod(shape)
    if not count:
      return np.empty(shape if index else inner, dtype)
    start = self._payload + tensor.start + rows.start * row_bytes
    before = start % mmap.ALLOCATIONGRANULARITY
    with self.path.open("rb") as file:
      window = mmap.mmap(
          file.fileno(), before + shape[0] * row_bytes, access=mmap.ACCESS_READ,
          offset=start - before,
      )  # fmt: skip
    view = np.frombuffer(window, dtype, count, before).reshape(shape)
    view = view[(slice(None), *index[1:])] if index else view[0]
    self.bytes_read += view.nbytes
    return view


def parse_header(header: bytes, where: str) -> tuple[dict[str, str], dict[str, Tensor]]:
  """Metadata and entries of a raw header.

  Args:
    header: JSON, perhaps padded with spaces.
    where: names the file in messages.

  Raises:
    ValueError: no JSON object, an unknown dtype, a byte range that does not fit dtype and shape, or
      ranges that overlap or leave a gap.
  """
  try:
    entries = json.loads(header)
    metadata = entries.pop("__metadata__", {})
    tensors = {
        name: Tensor(e["dtype"], tuple(map(int, e["shape"])), *map(int, e["data_offsets"]))
        for name, e in entries.items()
    }
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise ValueError(f"{where} has no safetensors header ({error!r})") from None
  for name, t in tensors.items():
    if t.dtype not in DTYPES:
      raise ValueError(
          f"tensor {name} in {where} has dtype {t.dtype!r}; known are {', '.join(DTYPES)}"
      )
    wanted = math.prod(t.shape) * np.dtype(DTYPES[t.dtype]).itemsize
    if min(t.shape, default=0) < 0 or t.num_bytes != wanted:
      raise ValueError(
          f"tensor {name} in {where} has {t.num_bytes} bytes; {t.dtype} {list(t.shape)} takes"
          f" {wanted}"
      )
  end = 0
  for name, t in sorted(tensors.items(), key=lambda item: item[1][2:]):
    if t.start != end:
      raise ValueError(
          f"tensor {name} in {where} begins at byte {t.start}; the tensor before it ends at {end}"
      )
    end = t.stop
  return metadata, tensors


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping) -> bytes:
  """The raw header of (name, dtype, shape) in this order, padded so that the payload is aligned."""
  entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
  end = 0
  for name, dtype, shape in tensors:
    start, end = end, end + math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
  header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
  return header + b" " * (-len(header) % 8)
