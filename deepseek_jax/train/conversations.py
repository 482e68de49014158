"""Conversations: read, checked, and encoded as examples."""

import importlib.resources
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from deepseek_jax.tokenizer import Tokenizer

# A list of {"role": "system" | "user" | "assistant", "content": str}.
Conversation = list[dict[str, str]]

ROLES = ("system", "user", "assistant")


class Example(NamedTuple):
  """One document as tokens; `loss` is True at the tokens to be predicted."""

  tokens: Int32[np.ndarray, " n"]
  loss: Bool[np.ndarray, " n"]


class Encoded(NamedTuple):
  """Examples, how many of them were cut, and how many of these lost every response token."""

  examples: list[Example]
  truncated: int
  unanswered: int


def _check_keys(value: Any, keys: tuple[str, ...], where: str) -> None:
  if not isinstance(value, dict) or set(value) != set(keys):
    found = sorted(value) if isinstance(value, dict) else type(value).__name__
    raise ValueError(f"{where}: expected an object with exactly {', '.join(keys)}, got {found}")


def check_conversation(messages: Any, where: str) -> None:
  """Raises a ValueError beginning with `where` unless `messages` is an answered `Conversation`."""
  if not isinstance(messages, list) or not messages:
    raise ValueError(f"{where}: messages must be a list of at least one message")
  for i, message in enumerate(messages):
    field = f"{where}: messages[{i}]"
    _check_keys(message, ("role", "content"), field)
    if message["role"] not in ROLES:
      raise ValueError(f"{field}.role: {message['role']!r} is none of {', '.join(ROLES)}")
    if not isinstance(message["content"], str):
      raise ValueError(f"{field}.content: expected text, got {type(message['content']).__name__}")
    try:
      message["content"].encode()
    except UnicodeEncodeError as error:
      raise ValueError(f"{field}.content: not encodable as UTF-8 ({error})") from error
  if all(message["role"] != "assistant" for message in messages):
    raise ValueError(f"{where}: messages hold no response (role assistant)")


def read_jsonl(path: str | pathlib.Path) -> Iterator[Conversation]:
  """Conversations of a JSONL file, one {"messages": [{"role", "content"}, ...]} a line, streamed.

  Raises:
    ValueError: an unfit line, named as file:line with the field and what is allowed; no lines.
  """
  number = 0
  with open(path, "rb") as file:
    for number, line in enumerate(file, 1):
      where = f"{path}:{number}"
      if not line.strip():
        raise ValueError(f"{where}: empty line, expected a JSON object")
      try:
        record = json.loads(line.decode())
      except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not a JSON object in UTF-8 ({error})") from error
      _check_keys(record, ("messages",), where)
      check_conversation(record["messages"], where)
      yield record["messages"]
  if not number:
    raise ValueError(f"{path}: no conversations")


def chatterbot_conversations() -> list[Conversation]:
  """The distinct English conversations of the package chatterbot-corpus, in order of file and line.

  Its lists of lines become user and assistant in turn. Left out are the last line of an odd list,
  which nobody answers, the one entry that is no list, and repetitions: more than half of the
  2,025 lists repeat another one.

  Raises:
    ImportError: a package of the extra `data` is missing.
  """
  try:
    import yaml

    package = importlib.resources.files("chatterbot_corpus")
  except ImportError as error:
    raise ImportError(
        "the default conversations need chatterbot-corpus and pyyaml: install deepseek-jax[data]"
    ) from error
  files = sorted((package / "data" / "english").iterdir(), key=lambda file: file.name)
  found: dict[tuple[str, ...], None] = {}
  for file in files:
    if not file.name.endswith(".yml"):
      continue
    entries = yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]
    found |= {tuple(e[: len(e) // 2 * 2]): None for e in entries if isinstance(e, list)}
  return [
      [{"role": ROLES[1 + i % 2], "content": line} for i, line in enumerate(lines)]
      for lines in found
      if lines
  ]


def encode_conversation(
    messages: Conversation, tokenizer: Tokenizer, name: str = "conversation"
) -> Example:
  """Begin, then each message behind its role marker; responses end with the end token.

  Only response tokens and their end carry loss.

  Raises:
    ValueError: beginning with `name`: unfit messages (see `check_conversation`), a role for which
      the tokenizer has no marker, or text that encodes to a marker and would forge a turn.
  """
  check_conversation(messages, name)
  markers = dict(zip(ROLES, (tokenizer.system_id, tokenizer.user_id, tokenizer.assistant_id)))
  control = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, *markers.values()}
  tokens, loss = [tokenizer.bos_id], [False]
  for i, message in enumerate(messages):
    role, ids = message["role"], tokenizer.encode(message["content"])
    if control.intersection(ids):
      raise ValueError(f"{name}: messages[{i}].content holds a control token of the tokenizer")
    if markers[role] is not None:
      tokens.append(markers[role])
      loss.append(False)
    elif role != "system" or i:
      raise ValueError(f"{name}: messages[{i}].role: the tokenizer has no marker for {role} here")
    answer = role == "assistant"
    if answer:
      ids = [*ids, tokenizer.eos_id]
    tokens += ids
    loss += [answer] * len(ids)
  return Example(np.array(tokens, np.int32), np.array(loss))


def encode_conversations(
    conversations: Iterable[Conversation],
    tokenizer: Tokenizer,
    seq_len: int,
    truncate: bool = False,
) -> Encoded:
  """Examples of at most `seq_len` tokens; with `truncate` longer ones keep their first `seq_len`.

  Raises:
    ValueError: see `encode_conversation`; without `truncate`, a conversation that is longer.
  """
  examples, truncated, unanswered = [], 0, 0
  for i, messages in enumerate(conversations):
    example = encode_conversation(messages, tokenizer, f"conversation {i}")
    length = len(example.tokens)
    if length > seq_len:
      if not truncate:
        raise ValueError(f"conversation {i}: {length} tokens, allowed are {seq_len} (seq_len)")
      example = Example(example.tokens[:seq_len], example.loss[:seq_len])
      truncated += 1
      unanswered += not example.loss.any()
    examples.append(example)
  return Encoded(examples, truncated, unanswered)
