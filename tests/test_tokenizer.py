"""Laws of the tokenizers, the Engram token classes and the Engram windows."""

import json
import pathlib
import types

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from deepseek_jax import tokenizer as tok

TINY = pathlib.Path(__file__).parent / "golden" / "checkpoint_tiny"


@pytest.fixture(scope="module")
def released():
  return tok.from_name("deepseek")


@pytest.fixture(scope="module")
def expected():
  return np.load(TINY / "expected" / "expected.npz")


@given(st.text())
def test_bytes_decode_to_the_text_they_encode(text):
  tokenizer = tok.ByteTokenizer()
  marked = [tokenizer.bos_id, tokenizer.user_id, *tokenizer.encode(text), tokenizer.eos_id]
  assert tokenizer.decode(marked) == text


def test_half_a_character_decodes_to_the_replacement_character():
  tokenizer = tok.ByteTokenizer()
  assert tokenizer.decode(tokenizer.encode("né")[:-1]) == "n\ufffd"


def test_tokenizer_json_gives_the_stored_ids_and_the_text_back():
  tokenizer = tok.from_name(str(TINY / "tokenizer.json"))
  for case in json.loads((TINY / "expected" / "tokenize.json").read_text(encoding="utf-8")):
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.decode([0, *case["ids"], 1]) == case["text"]
  assert (tokenizer.vocab_size, tokenizer.user_id, tokenizer.assistant_id) == (480, None, None)


def test_released_tokenizer_has_the_released_vocabulary(released):
  assert released.vocab_size == 129280
  text = "Engram ﬁnds <think> 魚 🙂"
  turn = [released.bos_id, released.user_id, *released.encode(text), released.assistant_id, 1, 2]
  assert released.decode(turn) == text
  assert (released.encode("<｜User｜>"), released.encode("<｜Assistant｜>")) == ([128803], [128804])


def test_unknown_tokenizers_are_refused(tmp_path):
  (tmp_path / "broken.json").write_text("{}")
  (tmp_path / "plain.json").write_text(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
  for name, message in {
      "byte": "'bytes', 'deepseek' or the path",
      str(tmp_path / "broken.json"): "broken.json: not a tokenizer.json",
      str(tmp_path / "plain.json"): "must be the special tokens begin, end, pad",
  }.items():
    with pytest.raises(ValueError, match=message):
      tok.from_name(name)


@pytest.mark.parametrize("bad", [-1, 264, 2**40])
def test_an_id_outside_the_vocabulary_is_named(bad):
  tokenizer = tok.ByteTokenizer()
  classes = tok.token_classes(tokenizer)
  message = rf"token id {bad} at index 1 is outside \[0, 264\)"
  with pytest.raises(ValueError, match=message):
    tokenizer.decode([0, bad])
  with pytest.raises(ValueError, match=message):
    tok.classes_of(np.array([263, bad]), classes)
  assert len(tok.classes_of([0, 2, 263], classes)) == 3


def test_token_classes_of_the_golden_tokenizer(expected):
  classes = tok.token_classes(tok.from_name(str(TINY / "tokenizer.json")))
  np.testing.assert_array_equal(classes, expected["token_map"])
  assert classes.dtype == np.int32


def test_token_classes_agree_with_the_rust_normalizers(released):
  sentinel = "\ue000"
  normalizer = normalizers.Sequence(
      [
          normalizers.NFKC(),
          normalizers.NFD(),
          normalizers.StripAccents(),
          normalizers.Lowercase(),
          normalizers.Replace(tokenizers.Regex(r"[ \t\r\n]+"), " "),
          normalizers.Replace(tokenizers.Regex("^ $"), sentinel),
          normalizers.Strip(),
          normalizers.Replace(sentinel, " "),
      ]
  )
  # Texts on which Python's strip and lower alone differ, and which no vocabulary at hand holds.
  hard = ["\x1ca", "a", "\u2028a\x85", "ΑΣ", "ας", "ασ", "İ", "i"]
  pieces = [*released.pieces(), *zip(hard, hard)]
  seen = {}
  theirs = []
  for text, raw in pieces:
    key = raw if "\ufffd" in text else normalizer.normalize_str(text) or text
    theirs.append(seen.setdefault(key, len(seen)))
  classes = tok.token_classes(types.SimpleNamespace(pieces=lambda: pieces))
  np.testing.assert_array_equal(classes, theirs)
  assert classes[: released.vocab_size].max() + 1 == 99092


def test_byte_classes_fold_case_and_white_space_only():
  tokenizer = tok.ByteTokenizer()
  classes = tok.token_classes(tokenizer)
  of = lambda text: classes[tokenizer.encode(text)].tolist()
  assert of("ABZ") == of("abz")
  assert of(" \t\r\n") == of(" ") * 4
  assert len(set(of("\v\f\x1c\x1d ab"))) == 7
  # 264 ids without 26 capitals and 3 of the 4 kinds of space.
  assert len(set(classes.tolist())) == classes.max() + 1 == 264 - 26 - 3


def test_windows_hash_to_the_golden_table_rows(expected):
  classes = expected["token_map"].astype(np.int32)
  for b, ids in enumerate(expected["ids"]):
    windows = tok.ngrams(tok.classes_of(ids, classes), classes[2]).astype(np.int64)
    for e in range(2):
      mixed = windows * expected["engram_multipliers"][e]
      rows = []
      for n in range(1, 4):
        key = np.bitwise_xor.reduce(mixed[:, : n + 1], axis=1)
        rows += [key % p for p in expected["engram_primes"][e].reshape(3, -1)[n - 1]]
      rows = np.stack(rows, axis=1) + expected["engram_offsets"][e]
      np.testing.assert_array_equal(rows, expected["engram_hash"][b, :, e])


def test_windows_pad_before_the_start_and_beyond_dead_positions():
  rows = tok.ngrams([5, 6, -1, 7, 8], pad_class=2, order=3)
  np.testing.assert_array_equal(rows, [[5, 2, 2], [6, 5, 2], [-1, 2, 2], [7, 2, 2], [8, 7, 2]])
  live = np.array([True, False])
  assert tok.classes_of([0, 1], np.array([4, 9], np.int32), live).tolist() == [4, -1]
  assert tok.ngrams([], pad_class=2).shape == (0, 4)


@pytest.mark.parametrize("kept", [3, 40])
def test_a_prompt_cut_anywhere_gives_the_windows_of_the_whole(kept):
  classes = np.random.default_rng(0).integers(-1, 6, 40).astype(np.int32)
  whole = tok.ngrams(classes, 3)
  for cut in range(41):
    history = classes[max(0, cut - kept) : cut]
    parts = [tok.ngrams(classes[:cut], 3), tok.ngrams(classes[cut:], 3, history=history)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(classes=[1], pad_class=0, order=0), "ngram order 0"),
        (dict(classes=[1], pad_class=-1), "pad class -1"),
        (dict(classes=[1, -2], pad_class=0), "token class -2"),
        (dict(classes=[1], pad_class=0, history=[-3]), "token class -3"),
    ],
)
def test_unfit_windows_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    tok.ngrams(**arguments)
