"""Data of small runs."""

import json

import pytest

TEXTS = ["yes", "no", "hello", "good day", "a cat", "a dog", "two", "three", "red", "blue"]


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
  """A JSONL file of 90 short conversations."""
  path = tmp_path_factory.mktemp("data") / "talk.jsonl"
  pairs = [(a, b) for a in TEXTS for b in TEXTS if a != b]
  told = lambda a, b: [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
  path.write_text("".join(json.dumps({"messages": told(a, b)}) + "\n" for a, b in pairs))
  return path
