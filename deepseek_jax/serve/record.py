"""Records of the persistent store: keys, bytes, and what makes one unfit to serve.

A record holds one block of tokens with all its parts, so that main KV and index keys live and die
together and one write is atomic. It is stored under

    {space}/{parent}/{own}-{tokens}-{size}-{created}-{trail}

`space` is the digest of model identity and layout, `own` the digest of `parent` and the block's
token ids: a chained hash, which texts share as far as their blocks agree. The rest of the name is
what accounting and eviction need, so that listing a store is enough to index it.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

FORMAT_VERSION = 1

_MAGIC = b"DSV4PREF"
_PREFIX = struct.Struct("<8sII")  # magic, format version, bytes of the JSON that follows
_DIGEST_BYTES = 16
# Two characters a group of tokens: names stay below the 255 that file systems allow.
_TRAIL_GROUPS = 32
_KEY = re.compile(r"([0-9a-f]{32})/([0-9a-f]{32})/([0-9a-f]{32})-(\d+)-(\d+)-(\d+)-([0-9a-f]*)")


class Part(NamedTuple):
  """One kind of global entries: tokens per row, and bytes per row as packed."""

  ratio: int
  row_bytes: int


class Record(NamedTuple):
  """What a record's key says: digests in hex, `size` in bytes, `created` in milliseconds."""

  space: str
  parent: str
  own: str
  tokens: int
  size: int
  created: int
  trail: str

  @property
  def key(self) -> str:
    """Where the record is stored."""
    name = f"{self.own}-{self.tokens}-{self.size}-{self.created}-{self.trail}"
    return f"{self.space}/{self.parent}/{name}"


class Step(NamedTuple):
  """One block of a text: its place in the chain, and its token ids [n]."""

  parent: str
  own: str
  tokens: np.ndarray


class Damaged(Exception):
  """A record that must not be served; the message is the counter that it belongs to."""


def as_tokens(tokens: np.ndarray) -> np.ndarray:
  """Token ids as little-endian int32 [n], the form that is hashed.

  Raises:
    ValueError: not one axis of integers in [0, 2^31).
  """
  array = np.asarray(tokens)
  if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
    raise ValueError(f"tokens: {array.dtype} {array.shape}, allowed one axis of integers")
  if array.size and not 0 <= array.min() <= array.max() < 2**31:
    raise ValueError(f"tokens: in [{array.min()}, {array.max()}], allowed in [0, 2^31)")
  return array.astype("<i4")


def parse_key(key: bytes) -> Record | None:
  """The record of a key; None for a key of something else."""
  if match := _KEY.fullmatch(key.decode(errors="replace")):
    space, parent, own, tokens, size, created, trail = match.groups()
    return Record(space, parent, own, int(tokens), int(size), int(created), trail)
  return None


def _digest(*chunks: bytes) -> str:
  return hashlib.blake2b(b"".join(chunks), digest_size=_DIGEST_BYTES).hexdigest()


def chain(parent: str, tokens: np.ndarray) -> str:
  """Digest of the text that ends with int32 `tokens` after the text of digest `parent`."""
  return _digest(bytes.fromhex(parent), tokens.tobytes())


class Layout:
  """The records of one model: its parts, the tokens per record, and the model's identity.

  Attributes:
    multiple: tokens that a stored prefix is a multiple of, the least common multiple of all ratios.
    space: digest of identity and layout, the root of every chain.
  """

  def __init__(self, identity: str, parts: Mapping[str, Part], block: int):
    if not identity:
      raise ValueError(f"identity: {identity!r}, allowed a digest of the model")
    if not parts:
      raise ValueError(f"parts: {parts}, allowed at least one part")
    for name, part in parts.items():
      if part.ratio < 1 or part.row_bytes < 1:
        raise ValueError(f"parts[{name!r}]: {part}, allowed ratio >= 1 and row_bytes >= 1")
    self.parts = {name: Part(*parts[name]) for name in sorted(parts)}
    self.multiple = math.lcm(*(part.ratio for part in parts.values()))
    if block < 1 or block % self.multiple:
      raise ValueError(f"block: {block}, allowed multiples of every ratio ({self.multiple})")
    self.block = block
    self.space = _digest(json.dumps([identity, block, self.parts]).encode())

  def steps(self, tokens: np.ndarray) -> list[Step]:
    """The blocks of a text from the root on; what exceeds `multiple` is left out."""
    tokens = as_tokens(tokens)
    tokens = tokens[: len(tokens) - len(tokens) % self.multiple]
    steps = []
    parent = self.space
    for start in range(0, len(tokens), self.block):
      block = tokens[start : start + self.block]
      steps.append(Step(parent, chain(parent, block), block))
      parent = steps[-1].own
    return steps

  def empty(self) -> dict[str, np.ndarray]:
    """The parts of no tokens."""
    return {name: np.zeros((0, part.row_bytes), np.uint8) for name, part in self.parts.items()}

  def check(self, parts: Mapping[str, np.ndarray], n: int) -> None:
    """Raises a ValueError unless `parts` are those of the first `n` tokens of a text."""
    if sorted(parts) != list(self.parts):
      raise ValueError(f"parts: {sorted(parts)}, allowed exactly {list(self.parts)}")
    for name, part in self.parts.items():
      array, shape = parts[name], (n // self.multiple * self.multiple // part.ratio, part.row_bytes)
      if array.dtype != np.uint8 or array.shape != shape:
        raise ValueError(f"parts[{name!r}]: {array.dtype} {array.shape}, allowed uint8 {shape}")

  def rows(self, parts: Mapping[str, np.ndarray], start: int, stop: int) -> dict[str, np.ndarray]:
    """The rows of tokens [start, stop)."""
    return {
        name: parts[name][start // part.ratio : stop // part.ratio]
        for name, part in self.parts.items()
    }

  def common(self, a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that two blocks share from the start, in whole multiples."""
    length = min(len(a), len(b))
    differs = np.append(a[:length] != b[:length], True)
    return int(differs.argmax()) // self.multiple * self.multiple

  def trail(self, tokens: np.ndarray) -> str:
    """One byte of hash for each of a block's first groups of `multiple` tokens."""
    groups = tokens[: _TRAIL_GROUPS * self.multiple].reshape(-1, self.multiple)
    return "".join(_digest(group.tobytes())[:2] for group in groups)

  def common_at_most(self, record: Record, tokens: np.ndarray, trail: str) -> int:
    """A bound on what a record shares with a block, from their trails alone.

    A thousand chats after one system prompt are a thousand children of one parent: the bound says
    which of them to read.
    """
    most = min(record.tokens, len(tokens))
    pairs = zip(re.findall("..", trail), re.findall("..", record.trail))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), most)
    return min(same * self.multiple, most)

  def pack(self, step: Step, rows: Mapping[str, np.ndarray], created: int) -> tuple[Record, bytes]:
    """The record of a block and its bytes: header, digest of the header, rows part by part."""
    payload = {name: rows[name].tobytes() for name in self.parts}
    header = json.dumps(
        {
            "space": self.space,
            "parent": step.parent,
            "created": created,
            "tokens": step.tokens.tolist(),
            "parts": [[name, *rows[name].shape, _digest(payload[name])] for name in self.parts],
        }
    ).encode()
    head = _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(header)) + header
    data = b"".join([head, bytes.fromhex(_digest(head)), *payload.values()])
    name = step.own, len(step.tokens), len(data), created, self.trail(step.tokens)
    return Record(self.space, step.parent, *name), data

  def unpack(self, record: Record, data: bytes) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Token ids, and rows by part, of a record of which every byte is verified.

    Raises:
      Damaged: truncated, corrupt_header, corrupt_checksum, wrong_version, wrong_identity, or
        misplaced: whole, but not what its key says.
    """
    if len(data) < _PREFIX.size:
      raise Damaged("truncated")
    magic, version, header_bytes = _PREFIX.unpack_from(data)
    end = _PREFIX.size + header_bytes
    start = end + _DIGEST_BYTES
    if magic != _MAGIC:
      raise Damaged("corrupt_header")
    if version != FORMAT_VERSION:
      raise Damaged("wrong_version")
    if len(data) < start:
      raise Damaged("truncated")
    if data[end:start].hex() != _digest(data[:end]):
      raise Damaged("corrupt_header")
    header = json.loads(data[_PREFIX.size : end])
    if header["space"] != self.space:
      raise Damaged("wrong_identity")
    tokens, parent = np.array(header["tokens"], "<i4"), header["parent"]
    name = chain(parent, tokens), len(tokens), record.size, header["created"], self.trail(tokens)
    if Record(self.space, parent, *name) != record:
      raise Damaged("misplaced")
    if len(data) != record.size:
      raise Damaged("truncated")
    parts = {}
    for name, rows, row_bytes, checksum in header["parts"]:
      payload = data[start : start + rows * row_bytes]
      if _digest(payload) != checksum:
        raise Damaged("corrupt_checksum")
      parts[name] = np.frombuffer(payload, np.uint8).reshape(rows, row_bytes)
      start += len(payload)
    return tokens, parts
