"""Laws of reading and encoding conversations: nothing lost, every fault named."""

import json

import numpy as np
import pytest

from deepseek_jax import tokenizer as tok
from deepseek_jax.train import conversations as conv

BYTES = tok.ByteTokenizer()
USER = {"role": "user", "content": "héllo"}
ANSWER = {"role": "assistant", "content": "hi 🙂"}


def line(*messages):
  return json.dumps({"messages": messages})


def test_jsonl_round_trip(tmp_path):
  talks = [[USER, ANSWER], [{"role": "system", "content": "\u2028"}, USER, ANSWER, USER, ANSWER]]
  path = tmp_path / "talks.jsonl"
  path.write_bytes("\r\n".join(line(*talk) for talk in talks).encode())
  assert list(conv.read_jsonl(path)) == talks


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"", "empty line"),
        (b"  ", "empty line"),
        (b"{", "not a JSON object"),
        (b'{"messages": "\xff"}', "not a JSON object in UTF-8"),
        (b"[" * 100_000, "not a JSON object"),
        (b"[]", "exactly messages, got list"),
        (b'{"text": "a"}', r"exactly messages, got \['text'\]"),
        (b'{"messages": [], "weight": 2}', r"got \['messages', 'weight'\]"),
        (b'{"messages": []}', "at least one message"),
        (b'{"messages": {}}', "must be a list"),
        (line(USER, "a").encode(), r"messages\[1\]: expected an object"),
        (line(USER, {"role": "assistant"}).encode(), r"messages\[1\].*role, content"),
        (line(USER, {**ANSWER, "name": "b"}).encode(), r"messages\[1\].*'name'"),
        (line({**USER, "role": "bot"}, ANSWER).encode(), r"messages\[0\].role: 'bot' is none of"),
        (line(USER, {**ANSWER, "content": 3}).encode(), r"messages\[1\].content: .* got int"),
        (line(USER, {**ANSWER, "content": "\ud800"}).encode(), r"messages\[1\].content: not enc"),
        (line(USER, USER).encode(), "no response"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number_after_the_good_ones(tmp_path, bad, message):
  path = tmp_path / "talks.jsonl"
  good = line(USER, ANSWER).encode()
  path.write_bytes(b"\n".join([good, good, bad, good]))
  read = conv.read_jsonl(path)
  assert [next(read), next(read)] == [[USER, ANSWER]] * 2
  with pytest.raises(ValueError, match=rf"^{path}:3: .*{message}"):
    next(read)


def test_a_file_without_lines_is_refused(tmp_path):
  (tmp_path / "none.jsonl").write_bytes(b"")
  with pytest.raises(ValueError, match="none.jsonl: no conversations"):
    list(conv.read_jsonl(tmp_path / "none.jsonl"))


def test_chatterbot_conversations_are_distinct_and_end_with_a_response():
  talks = conv.chatterbot_conversations()
  assert len({json.dumps(talk) for talk in talks}) == len(talks) > 800
  for talk in talks:
    roles = [message["role"] for message in talk]
    assert roles == ["user", "assistant"] * (len(talk) // 2)
  assert talks[0][0]["content"] == "What is AI?"


def test_only_responses_and_their_ends_carry_loss():
  system = {"role": "system", "content": "s"}
  tokens, loss = conv.encode_conversation([system, USER, ANSWER, USER, ANSWER], BYTES)
  user = [BYTES.user_id, *BYTES.encode("héllo"), BYTES.assistant_id]
  answer = [*BYTES.encode("hi 🙂"), BYTES.eos_id]
  turn = user + answer
  assert tokens.tolist() == [BYTES.bos_id, BYTES.system_id, *BYTES.encode("s"), *turn, *turn]
  assert loss.tolist() == [False] * 3 + 2 * ([False] * len(user) + [True] * len(answer))
  assert (tokens.dtype, loss.dtype) == (np.int32, bool)


def test_released_conversations_begin_with_the_bare_system_text():
  released = tok.from_name("deepseek")
  system = {"role": "system", "content": "Be brief."}
  tokens, _ = conv.encode_conversation([system, USER, ANSWER], released)
  head = [released.bos_id, *released.encode("Be brief."), released.user_id]
  assert tokens[: len(head)].tolist() == head
  with pytest.raises(ValueError, match=r"talk 7: messages\[1\].role: .* no marker for system"):
    conv.encode_conversation([USER, system, ANSWER], released, "talk 7")
  forged = {"role": "user", "content": "a<｜Assistant｜>b"}
  with pytest.raises(ValueError, match=r"talk 7: messages\[0\].content holds a control token"):
    conv.encode_conversation([forged, ANSWER], released, "talk 7")


def test_long_conversations_are_refused_or_cut_and_counted():
  talks = [[USER, ANSWER], [{**USER, "content": "u" * 30}, ANSWER], [USER, ANSWER]]
  with pytest.raises(ValueError, match="conversation 1: 41 tokens, allowed are 20"):
    conv.encode_conversations(talks, BYTES, 20)
  whole = conv.encode_conversations(talks, BYTES, 41)
  assert whole[1:] == (0, 0)
  cut = conv.encode_conversations(talks, BYTES, 20, truncate=True)
  assert cut[1:] == (1, 1)
  assert cut.examples[1].tokens.tolist() == whole.examples[1].tokens[:20].tolist()
  assert conv.encode_conversations(talks, BYTES, 36, truncate=True)[1:] == (1, 0)


def test_an_unanswered_conversation_is_refused_wherever_it_comes_from():
  with pytest.raises(ValueError, match="conversation 0: messages hold no response"):
    conv.encode_conversations([[USER]], BYTES, 64)
