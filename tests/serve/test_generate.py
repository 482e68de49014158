"""Laws of writing: what comes is what the arm says, whatever the batch, the stops and the draws."""

import dataclasses

import jax
import numpy as np
import pytest

from deepseek_jax.config import ReplayConfig
from deepseek_jax.serve import generate, sampling
from deepseek_jax.train.conversations import Example
from deepseek_jax.train.data import collate
from deepseek_jax.train.turns import Views
from tests.serve.engines import EPS, NEW, Letters, Serving, same

# Of a prompt longer than W. All forward passes here have LENGTH + NEW rows: one compilation.
LENGTH = 13


@pytest.fixture(scope="module")
def serving(served, quick_compile):
  with Serving(served) as made:
    yield made


class TestWriting:

  @pytest.mark.slow
  def test_replies_to_at_most_w_tokens_are_those_of_the_full_forward_pass(self, serving):
    """No decoder row is left out, so that arm B is arm A."""
    texts = [serving.text(n, n) for n in range(1, serving.window + 1)]
    asked = serving.ask(serving.engine(), *texts)
    whole = [text + reply.tokens for text, (reply, _) in zip(texts, asked)]
    ids = np.array([line + [0] * (LENGTH + NEW - len(line)) for line in whole], np.int32)
    logits = serving.served.forward(serving.model(), ids)
    for text, line, (reply, drawn) in zip(texts, logits, asked):
      expected = line[len(text) - 1 : len(text) - 1 + NEW]
      same((reply, drawn), (expected.argmax(-1), expected))

  @pytest.mark.slow
  def test_longer_prompts_are_read_by_arm_b(self, serving):
    """The one pass that stands for arm B in training: every text a turn of its own line."""
    texts = [serving.text(LENGTH, seed) for seed in range(serving.window)]
    asked = serving.ask(serving.engine(), *texts)
    ids = np.array([text + reply.tokens for text, (reply, _) in zip(texts, asked)], np.int32)
    served, w, start = serving.served, serving.window, LENGTH - serving.window
    examples = [Example(line, np.arange(ids.shape[1]) >= LENGTH) for line in ids]
    views = Views(examples, replay=ReplayConfig(decoder_len=w + NEW), window=w)
    lines, order = [[i] for i in range(len(ids))], served.config.engram_max_ngram_size
    batch = collate(views, lines, ids.shape[1], 1, served.classes, order)
    run = jax.jit(lambda model, b: model(b.tokens, b.rows, b.ngrams, b.decoder).hidden)
    model = serving.model()
    logits = np.asarray(model.logits(run(model, batch)))
    exact = serving.served.forward(serving.model(), ids)
    assert np.abs(logits - exact[:, start:]).max() > 1e-3
    for line, found in zip(logits[:, serving.window - 1 : -1], asked):
      same(found, (line.argmax(-1), line))

  @pytest.mark.slow
  def test_a_ragged_batch_is_its_lines_alone(self, serving):
    texts = [serving.text(n, n) for n in (30, 3, 17, 8)]
    engine = serving.engine()
    for text, found in zip(texts, serving.ask(engine, *texts)):
      assert (found[0].arm, found[0].cached) == ("B", 0)
      same(found, *serving.ask(engine, text))

  def test_stops_end_a_line_and_leave_the_others(self, serving):
    texts = [serving.text(n, n) for n in (30, 3, 17, 8)]
    engine, came = serving.engine(), []
    free = serving.ask(engine, *texts)
    stops = {free[0][0].tokens[2], free[2][0].tokens[-1]}
    before = dataclasses.replace(engine.traffic)
    found = serving.ask(engine, *texts, stop=stops, on_token=lambda *one: came.append(one))
    for line, ((reply, drawn), (whole, logits)) in enumerate(zip(found, free)):
      ends = [i for i, token in enumerate(whole.tokens) if token in stops]
      count = ends[0] + 1 if ends else NEW
      assert (reply.stopped, reply.tokens) == (bool(ends), whole.tokens[:count])
      np.testing.assert_array_equal(drawn, logits[:count])
      assert [token for number, token in came if number == line] == reply.tokens
    assert {len(reply.tokens) for reply, _ in found} >= {3, NEW}
    assert engine.traffic.read - before.read == 58
    assert engine.traffic.written - before.written == len(came)

  def test_the_end_token_stops_unless_told_otherwise(self, serving, monkeypatch):
    engine, text = serving.engine(), serving.text(30)
    tokens = serving.ask(engine, text)[0][0].tokens
    monkeypatch.setattr(Letters, "eos_id", tokens[3])
    (reply, _), = serving.ask(engine, text, stop=None)  # fmt: skip
    assert reply.stopped
    assert reply.tokens == tokens[: tokens.index(tokens[3]) + 1]

  def test_draws_are_those_of_seed_line_and_position(self, serving):
    engine, text = serving.engine(), serving.text(30)

    def ask(*texts, seed=0):
      how = sampling.Sampling(temperature=2.0, top_p=0.9, seed=seed)
      return [reply.tokens for reply, _ in serving.ask(engine, *texts, sampling=how)]

    (alone,) = ask(text)
    assert ask(text) == [alone]
    assert ask(text, seed=1) != [alone]
    others = serving.text(3), serving.text(17), serving.text(8)
    batch = ask(text, text, *others[1:])
    assert batch[0] == alone != batch[1]

  def test_bad_input_is_refused_and_named(self, serving):
    engine, text = serving.engine(), serving.text(3)
    for texts, more, says in (
        ([], {}, "prompts is empty; give at least one"),
        ([text, []], {}, "a prompt is empty; it must have at least 1 token"),
        ([text, [64]], {}, r"token id 64 at index 0 is outside \[0, 64\)"),
        ([[-1]], {}, "token id -1 at index 0"),
        ([[1.5]], {}, "must be integers"),
        ([text], {"stop": [64]}, r"token id 64 at index 0 is outside \[0, 64\)"),
        ([text], {"new": 0}, "max_new_tokens is 0; it must be at least 1"),
        ([text], {"new": 510}, "has 3 tokens, max_new_tokens is 510; the model has 512 positions"),
    ):
      with pytest.raises(ValueError, match=says):
        serving.ask(engine, *texts, **more)
    assert engine.traffic == generate.Traffic()

  @pytest.mark.slow
  def test_prompt_log_probabilities_are_of_every_row_whatever_is_kept(self, serving, tmp_path):
    """A18: an arm that leaves rows out has no logits of them."""
    engine, text = serving.engine(tmp_path), serving.text(LENGTH + NEW)
    ids = np.array([text] * serving.window, np.int32)
    logits = serving.served.forward(serving.model(), ids)[0].astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = logp[np.arange(len(text) - 1), text[1:]]
    for _ in range(2):
      np.testing.assert_allclose(engine.prompt_logprobs(text), expected, atol=EPS, rtol=0)
      serving.ask(engine, text)
    assert engine.store.counters()["persistent/hits"] == 1
    for bad in ([], [5], [5] * 513):
      with pytest.raises(ValueError, match=f"has {len(bad)} tokens; .* need within 2..512"):
        engine.prompt_logprobs(bad)

  def test_turns_need_markers(self, monkeypatch):
    assert generate.user_turn(Letters(), "ab", first=True) == [0, 3, 49, 50, 4]
    assert generate.user_turn(Letters(), "ab", first=False) == [3, 49, 50, 4]
    monkeypatch.setattr(Letters, "assistant_id", None)
    with pytest.raises(ValueError, match="no markers for user and assistant"):
      generate.user_turn(Letters(), "ab", first=True)
