"""Training's simulation of serving: every turn of a batch has the logits that serving gives it."""

import contextlib
import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deepseek_jax.config import ReplayConfig
from deepseek_jax.nn.attention import Attention
from deepseek_jax.nn.block import Block
from deepseek_jax.nn.rows import DecoderRows, Reads
from deepseek_jax.nn.transformer import Embedding, Transformer
from deepseek_jax.serve import replay, state
from deepseek_jax.train import loss
from deepseek_jax.train.conversations import Example
from deepseek_jax.train.data import collate
from deepseek_jax.train.turns import Turn, Views

W, LINES, CAPACITY = 4, 12, 28
SEQ_LEN, DECODER_LEN = 110, 60
# Conversations of a line each: ends of prompt and response, hit. Hits at whole groups and inside
# of one, at the turn before, later, and at the prompt's own end; prompts shorter than the window.
COLD = [[(1, 3, 0), (5, 9, 0), (14, 15, 0)], [(2, 8, 0)], [(9, 12, 0), (20, 26, 0)]]
HITS = [[(3, 6, 0), (10, 13, 6), (19, 22, 12)], [(9, 11, 8), (15, 17, 15), (24, 26, 18)]]
INSIDE = [[(9, 12, 7), (13, 16, 5), (20, 25, 19)], [(11, 13, 11), (22, 27, 14)], [(3, 4, 0)]]
slow = pytest.mark.slow


def example(turns, seed):
  n = turns[-1][1]
  loss = np.zeros(n, bool)
  for prompt, end, _ in turns:
    loss[prompt:end] = True
  tokens = np.random.default_rng(seed).integers(0, 64, n).astype(np.int32)
  return Example(tokens, loss)


def simulation(conversations, packed, served, q=1.0):
  """Examples, and the batch of them."""
  examples = [example(turns, seed) for seed, turns in enumerate(conversations)]
  turns = [[Turn(*turn) for turn in each] for each in conversations]
  replays = ReplayConfig(decoder_len=DECODER_LEN, encoder=q)
  views = Views(examples, replay=replays, window=W, multiple=2, turns=turns)
  order = served.config.engram_max_ngram_size
  assert served.classes[1] == served.pad_class
  return examples, collate(views, packed, SEQ_LEN, 1, served.classes, order)


@jax.jit
def simulated_logits(model, batch):
  return model.logits(model(batch.tokens, batch.rows, batch.ngrams, batch.decoder).hidden)


def served_turns(conversations, examples, served, model):
  """Logits [rows, V] of the decoder's rows of every turn: prefill, then one token at a time."""
  turns = [(e, *turn) for e, each in enumerate(conversations) for turn in each]
  prompts, plans, cache = [], [], served.cache(model)
  ids = np.zeros((LINES, CAPACITY), np.int32)
  schedule, whole = model.schedule, served.cache(model)
  texts = [examples[e].tokens for e, *_ in turns] + [None] * (LINES - len(turns))
  alone = [None if text is None else replay.exact(len(text)) for text in texts]
  whole, _, _ = served.reader(model).prefill(whole, texts, alone)
  whole = jax.device_get(whole)
  for line, (e, prompt, end, hit) in enumerate(turns):
    ids[line, :end] = examples[e].tokens[:end]
    prompts.append(examples[e].tokens[:prompt])
    plans.append(replay.replayed(prompt, hit, W) if hit else replay.cold(prompt, W))
    if hit:
      state.put_entries(cache, schedule, line, state.take_entries(whole, schedule, line, hit))
  rest = [None] * (LINES - len(turns))
  cache, _, first = served.reader(model).prefill(cache, prompts + rest, plans + rest, every=True)
  for line, (_, prompt, end, _) in enumerate(turns):
    one = np.full((LINES, end), 0, np.int32)
    one[line] = ids[line, :end]
    lengths = [end] * LINES
    lengths[line] = prompt
    cache, more = served.write(cache, one, lengths, model)
    yield np.concatenate([first[line], more[line, prompt:end]])


class TestEveryTurnEqualsServing:

  @pytest.fixture(scope="class", params=["cold", "hits", "inside"])
  @classmethod
  def both(cls, request, served, quick_compile):
    conversations = {"cold": COLD, "hits": HITS, "inside": INSIDE}[request.param]
    packed = [[1, 0], [2]] if len(conversations) > 2 else [[1, 0], []]
    model = served.model()
    with jax.default_matmul_precision("highest"):
      examples, batch = simulation(conversations, packed, served)
      logits = np.asarray(simulated_logits(model, batch))
      expected = list(served_turns(conversations, examples, served, model))
    return conversations, packed, batch, logits, expected

  @slow
  def test_logits(self, both):
    conversations, packed, batch, logits, expected = both
    served_turn = iter(expected)
    by_example = [[next(served_turn) for _ in turns] for turns in conversations]
    compared = 0
    for line, ids in enumerate(packed):
      start = 0
      for i in ids:
        for turn in by_example[i]:
          np.testing.assert_allclose(logits[line, start : start + len(turn)], turn, atol=1e-5)
          start += len(turn)
          compared += 1
      assert not batch.decoder.rows.segments[line, start:].any()
    assert compared == len(expected)


def test_a_whole_hit_changes_what_a_turn_sees(served, quick_compile):
  """The equalities above would hold for a simulation that ignores hits if replay cost nothing."""
  model, turns = served.model(), HITS
  cold = [[turn[:2] + (0,) for turn in each] for each in turns]
  (_, one), (_, other) = (simulation(each, [[0], [1]], served) for each in (turns, cold))
  a, b = (np.asarray(simulated_logits(model, batch)) for batch in (one, other))
  hit = np.concatenate([[turn[2] > 0] * (turn[1] - max(0, turn[0] - W)) for turn in turns[0]])
  off = np.abs(a - b).max(-1)[0, : len(hit)]
  assert off[~hit].max() < 1e-5
  assert off[hit].max() > 0.01


class TestGradients:
  """Of a turn's loss, to the embedding of every row of both passes, by the ways it can take.

  The turn has a prompt of 19 tokens, a hit at 12 and a response up to 22; its replay begins at 8.
  """

  @staticmethod
  def reached(model, batch, way):
    """Largest gradient of every row: along entries, windows or both."""
    embed, publish, window = Embedding.__call__, Block.publish, Attention.window_kv
    stop = jax.lax.stop_gradient

    def through(added):
      with contextlib.ExitStack() as patches:
        put = lambda *what: patches.enter_context(mock.patch.object(*what))
        put(Embedding, "__call__", lambda *args: embed(*args) + added)
        if way == "windows":
          put(Block, "publish", lambda *args: stop(publish(*args)))
        if way == "entries":
          put(Attention, "window_kv", lambda *args: stop(window(*args)))
        logits = model.logits(model(batch.tokens, batch.rows, batch.ngrams, batch.decoder).hidden)
      picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], axis=-1)
      return -jnp.sum(picked[..., 0] * batch.weights)

    batch = jax.tree.map(jnp.asarray, batch)
    zero = jnp.zeros((*batch.tokens.shape, model.config.hidden_size))
    return np.abs(np.asarray(jax.jit(jax.grad(through))(zero))).max(-1)[0]

  @pytest.fixture(scope="class", params=["windows", "entries"])
  @classmethod
  def found(cls, request, served, quick_compile):
    run = lambda hit: cls.reached(
        served.model(), simulation([[(19, 22, hit)]], [[0]], served)[1], request.param
    )
    hit, cold = run(12), run(0)
    first, replayed = hit[:22], hit[22 : 22 + 14]
    assert not hit[36:].any()  # padding
    return request.param, first, replayed, cold[:22]

  @slow
  def test_a_row_reaches_no_row_behind_its_floor(self, found):
    """Windows end at the replay's first row; a cold prefill has older ones, 9 before row 15."""
    way, first, replayed, cold = found
    if way == "windows":
      assert not first.any()
      assert (replayed[:-1] > 0).all()
      assert (cold[6:-1] > 0).all()
      assert not cold[:6].any()

  @slow
  def test_entries_before_the_hit_lead_to_the_first_pass_and_later_ones_to_the_replay(self, found):
    way, first, replayed, _ = found
    if way == "entries":
      assert first[:12].any()
      assert not first[12:].any()
      assert not replayed[:4].any()  # rows 8 to 11 run for their windows alone
      assert replayed[4:].any()


class TestPlainStep:
  """A decoder that runs all rows without floors is what training computes without a simulation."""

  @slow
  def test_the_loss_bitwise_and_the_gradient_to_rounding(self, served, quick_compile):
    graphdef, params = nnx.split(served.model())
    compute = dataclasses.replace(served.model().compute, row_chunk=128)
    make = lambda: Transformer(served.config, compute, rngs=nnx.Rngs(0))
    model = nnx.merge(nnx.split(nnx.eval_shape(make))[0], params)
    examples = [example(turns, seed) for seed, turns in enumerate(COLD)]
    order = served.config.engram_max_ngram_size
    plain = collate(Views(examples), [[0, 1], [2]], 28, 1, served.classes, order)
    every = np.broadcast_to(np.arange(28, dtype=np.int32), (2, 28))
    reads = Reads(plain.rows.segments, *(np.zeros((2, 28), np.int32) for _ in range(3)))
    whole = plain._replace(decoder=DecoderRows(every, plain.rows._replace(reads=reads)))

    @jax.jit
    @jax.value_and_grad
    def run(model, batch):
      return loss.sums(model, batch, index_loss="sparse")[0].nll

    (one, its), (other, grads) = run(model, plain), run(model, whole)
    assert float(one) == float(other)
    for a, b in zip(jax.tree.leaves(its), jax.tree.leaves(grads), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(a).max()), rtol=0)
