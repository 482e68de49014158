"""Laws of rollouts: what is written is what serving writes, and what training then sees."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deepseek_jax.config import ReplayConfig, ServeConfig
from deepseek_jax.nn.attention import Pass
from deepseek_jax.nn.moe import Gate
from deepseek_jax.nn.transformer import Routes
from deepseek_jax.serve import generate
from deepseek_jax.train import loss, rollouts
from tests.train import policies
from tests.train.policies import HITS, LENGTHS, NEW, PROMPT_LEN, Given, W

pytestmark = pytest.mark.usefixtures("quick_compile")

REPLAYS = ReplayConfig(decoder_len=14, encoder=1.0)
LINES = len(LENGTHS)
# Draws of this seed end some responses early.
SEED = 0


class Seen(NamedTuple):
  """What training makes of a micro-batch: log p of targets, loss, and experts of both stacks."""

  logprobs: jax.Array
  nll: jax.Array
  routes: Routes


class Case:
  """A rollout of every line, and the training pass over its shares."""

  def __init__(self, model, replay):
    self.config = policies.experiment(model, replay, dict(seed=SEED))
    self.graphdef, self.params = policies.split_model(model)
    # Rewards that differ within groups.
    self.made = Given(self.config, policies.prompts(), reward=lambda text, _: float(ord(text[0])))
    self.shares = [next(self.made).batch for _ in range(2)]
    self.rollout = self.made._rollout
    self.micros = [jax.tree.map(lambda a, g=g: a[g], s) for s in self.shares for g in range(2)]
    self._seen = jax.jit(self._pass)

  def _pass(self, params, batch):
    model, how = nnx.merge(self.graphdef, params), Pass(routes=True)
    above, below = batch.policy.routes
    encoded = model.encode(batch.tokens, batch.rows, batch.ngrams, how=how, routes=above)
    stream, rows = encoded.stream, batch.rows
    if batch.decoder is not None:
      at = batch.decoder.source[..., None]
      stream, rows = jax.tree.map(lambda a: jnp.take_along_axis(a, at, axis=1), stream), None
      rows, how = batch.decoder.rows, dataclasses.replace(how, same_rows=False)
    out = model.decode(stream, rows, encoded.entries, how=how, routes=below)
    logp = jax.nn.log_softmax(model.logits(out.hidden))
    picked = jnp.take_along_axis(logp, batch.targets[..., None], axis=-1)[..., 0]
    nll = loss.token_losses(
        model, out.hidden, batch, self.config.train.rollout, None, chunk=batch.targets.shape[1]
    )
    experts = lambda outs: jnp.stack([o.routes for o in outs])
    return Seen(picked, nll, Routes(experts(encoded.outs), experts(out.outs)))

  def seen(self, params=None, *, routed=True) -> list[Seen]:
    """Of every micro-batch; not `routed`, the routers choose."""
    found = []
    for batch in self.micros:
      if not routed:
        free = jax.tree.map(lambda a: np.full_like(a, -1), batch.policy.routes)
        batch = batch._replace(policy=batch.policy._replace(routes=free))
      found.append(self._seen(self.params if params is None else params, batch))
    return jax.device_get(found)

  def recorded(self, batch):
    """Experts of both stacks [layers, B, T, X] with where they are recorded."""
    for routes in batch.policy.routes:
      yield routes, routes[..., 0] >= 0


@pytest.fixture(scope="module")
def replays():
  return Case(policies.EVERY_MODE, REPLAYS)


@pytest.fixture(scope="module")
def exact():
  return Case(policies.SMALL, None)


@pytest.fixture(params=["replays", "exact"])
def case(request):
  return request.getfixturevalue(request.param)


@pytest.mark.slow
class TestTrainingSeesWhatWasWritten:

  def test_the_rollout_has_short_prompts_hits_and_early_stops(self, case):
    r = case.rollout
    assert r.lengths.tolist() == list(LENGTHS)
    assert min(LENGTHS) < W
    assert r.hits.tolist() == list(HITS if case.config.train.replay else [0] * LINES)
    stopped = r.responses[np.arange(LINES), r.written - 1] == policies.Letters.eos_id
    assert (r.written[~stopped] == NEW).all()
    assert (r.written < NEW).any()
    assert len(np.unique(r.advantages)) > 4

  def test_targets_are_the_responses_in_order(self, case):
    r = case.rollout
    for line in range(LINES):
      batch, own = case.micros[line // 2], line % 2
      carries = batch.weights[own] > 0
      np.testing.assert_array_equal(
          batch.targets[own][carries], r.responses[line, : r.written[line]]
      )
      np.testing.assert_array_equal(batch.policy.advantages[own], r.advantages[line])

  def test_the_first_importance_ratios_are_1(self, case):
    for batch, seen in zip(case.micros, case.seen(), strict=True):
      ratio = np.exp(seen.logprobs - batch.policy.logprobs)[batch.weights > 0]
      assert len(ratio) > 2
      np.testing.assert_allclose(ratio, 1, atol=1e-4, rtol=0)
      expected = -np.sum(batch.weights * batch.policy.advantages)
      np.testing.assert_allclose(seen.nll, expected, rtol=1e-4, atol=1e-3)

  def test_all_rows_that_serving_read_are_recorded(self, case):
    """The last token is read by nobody, and of a hit's first pass only what it found counts."""
    r, exact = case.rollout, case.config.train.replay is None
    for line in range(LINES):
      batch, own = case.micros[line // 2], line % 2
      end, hit = LENGTHS[line] + r.written[line], r.hits[line]
      (_, above), (_, below) = case.recorded(batch)
      replayed = end + end - (hit - W) if hit else end
      expected = np.zeros(above.shape[-1], bool)
      expected[: hit or end - 1] = True
      if hit:
        expected[end : replayed - 1] = True
      np.testing.assert_array_equal(above[:, own], np.broadcast_to(expected, above[:, own].shape))
      rows = end - 1 - (0 if exact else max(0, LENGTHS[line] - W))
      expected = np.arange(below.shape[-1]) < rows
      np.testing.assert_array_equal(below[:, own], np.broadcast_to(expected, below[:, own].shape))

  def test_recorded_experts_are_those_that_training_picks_itself(self, case):
    for batch, seen in zip(case.micros, case.seen(routed=False), strict=True):
      for (routes, there), own in zip(case.recorded(batch), seen.routes, strict=True):
        np.testing.assert_array_equal(own[there], routes[there])

  def test_recorded_experts_are_visited_whatever_the_routers_prefer_now(self, case):
    other = policies.other_routers(case.params)
    differ = 0
    for batch, seen, free in zip(
        case.micros, case.seen(other), case.seen(other, routed=False), strict=True
    ):
      for (routes, there), own, now in zip(
          case.recorded(batch), seen.routes, free.routes, strict=True
      ):
        np.testing.assert_array_equal(own[there], routes[there])
        differ += np.mean(now[there] != routes[there])
      above, now = seen.routes[0][0], free.routes[0][0]
      there = batch.policy.routes.encoder[0, ..., 0] >= 0
      # Of the first layer, whose rows are the same: deeper ones follow what other rows visited.
      np.testing.assert_array_equal(above[~there], now[~there])
    assert differ > 4


def test_a_gate_takes_experts_as_given_and_weighs_them_by_its_affinities():
  gate = Gate((), policies.SMALL, rngs=nnx.Rngs(0), dtype=jnp.float32)
  gate.bias[...] = jnp.arange(4.0) / 4
  x = jax.random.normal(jax.random.key(0), (1, 3, 32))
  free = gate(x)
  given = jnp.array([[[3, 0], [-1, -1], [1, 2]]], jnp.int32)
  found = gate(x, given)
  np.testing.assert_array_equal(found.ids[0, [0, 2]], given[0, [0, 2]])
  np.testing.assert_array_equal(found.ids[0, 1], free.ids[0, 1])
  picked = np.take_along_axis(np.asarray(free.affinities), np.asarray(found.ids), axis=-1)
  expected = picked / picked.sum(-1, keepdims=True) * policies.SMALL.routed_scaling_factor
  np.testing.assert_allclose(found.weights, expected, rtol=1e-6)


@pytest.mark.slow
class TestDraws:

  def test_they_follow_from_key_line_and_step_alone(self, replays):
    """With a head of zeros all tokens are as likely, whatever was read."""
    params = jax.tree.map(lambda a: a, replays.params)
    params["head"]["weight"][...] = jnp.zeros_like(params["head"]["weight"][...])
    key = jax.random.fold_in(jax.random.key(SEED), 5)
    of = lambda line, n: jax.random.fold_in(jax.random.fold_in(key, line), n)
    level = jnp.full(64, -np.log(64), jnp.float32)
    expected = [
        [int(jax.random.categorical(of(line, n), level)) for n in range(NEW)]
        for line in range(LINES)
    ]
    for seed in range(2):
      made = Given(replays.config, policies.prompts(seed), reward=lambda *_: 0.0)
      made.see(params)
      r = made._write(5)
      np.testing.assert_array_equal(r.responses, expected)
      np.testing.assert_allclose(r.logprobs, -np.log(64), rtol=1e-5)
      for line, n in zip(expected, r.written):
        ends = [i for i, token in enumerate(line) if token == policies.Letters.eos_id]
        assert n == (ends[0] + 1 if ends else NEW)
    assert (r.written < NEW).any()

  def test_a_line_does_not_depend_on_the_others(self, replays):
    given = policies.prompts()
    others = policies.prompts(1)
    made = Given(replays.config, [*given[:4], *others[4:]], reward=lambda *_: 0.0)
    r = made._write(0)
    np.testing.assert_array_equal(r.responses[:4], replays.rollout.responses[:4])
    np.testing.assert_allclose(r.logprobs[:4], replays.rollout.logprobs[:4], atol=1e-5)
    assert (r.responses[4:] != replays.rollout.responses[4:]).any(axis=1).all()
    alike = Given(replays.config, [given[3]] * LINES, reward=lambda *_: 0.0)
    assert len({tuple(line) for line in alike._write(0).responses}) == LINES

  def test_one_program_serves_all_prompts_and_hits(self, replays):
    before = rollouts.program._cache_size()
    for lengths, ends in (
        ([1] * LINES, [0] * LINES),
        ([PROMPT_LEN] * LINES, [PROMPT_LEN] * LINES),
        (range(12, 12 + LINES), range(4, 4 + LINES)),
    ):
      made = Given(replays.config, policies.prompts(2, lengths, ends), reward=lambda *_: 0.0)
      made._write(1)
    assert rollouts.program._cache_size() == before >= 1


@pytest.mark.slow
def test_the_likeliest_tokens_are_those_that_serving_writes():
  graphdef, params = policies.split_model(policies.SMALL)
  model, given = nnx.merge(graphdef, params), [prompt.tokens for prompt in policies.prompts()]
  engine = generate.Engine(model, policies.Letters(), ServeConfig(buckets=(8,)))
  served = engine.generate([p.tolist() for p in given], max_new_tokens=NEW, stop=()).replies
  stop = served[4].tokens[3]
  plans = [rollouts.plan_of(len(text), 0, W, narrowed=True) for text in given]
  parts, floors = rollouts.parts_of(
      given, plans, longest=PROMPT_LEN, window=W, classes=None, pad_class=0, order=0, replays=False
  )
  cache = rollouts.empty_cache(model, LINES, PROMPT_LEN + NEW, 0)
  found = rollouts.write(
      model, cache, parts, floors, None, (0, 0), new=NEW, temperature=0.0, stop=stop
  )  # fmt: skip
  tokens, live = np.asarray(found.tokens), np.asarray(found.live)
  for line, reply in enumerate(served):
    assert reply.arm == "B"
    ends = [i for i, token in enumerate(reply.tokens) if token == stop]
    expected = reply.tokens[: ends[0] + 1] if ends else reply.tokens
    assert tokens[line][live[line]].tolist() == expected
  assert live.sum(axis=1).min() < NEW == live.sum(axis=1).max()
