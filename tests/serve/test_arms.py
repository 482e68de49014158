"""The five arms: which rows they run, what is exact by construction, and what resumption keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.cache import ring_positions
from deepseek_jax.serve import replay, state

W = 4
ENCODER, DECODER = 3, 4
slow = pytest.mark.slow
HITS = [(n, c) for n in range(1, 3 * W + 1) for c in range(n + 1)]


def every_plan(n, c):
  yield replay.exact(n)
  yield replay.cold(n, W)
  yield replay.continued(n, c, W)
  for floor in range(1, c - W + 1):
    yield replay.continued(n, c, W, floor)
  yield replay.replayed(n, c, W)
  yield replay.exact_replay(n, c, W, ENCODER, DECODER)


class TestPlans:

  @pytest.mark.parametrize(("n", "c"), HITS)
  def test_bounds(self, n, c):
    for plan in every_plan(n, c):
      assert 0 <= plan.encoder_start <= plan.decoder_start < n == plan.length
      assert plan.encoder_floor <= plan.encoder_start
      assert plan.decoder_floor == plan.decoder_start
      # Every token whose entries are not kept is read, and no kept entry is written again.
      assert plan.encoder_start <= plan.cached <= n
      rows = plan.encoder_rows()
      np.testing.assert_array_equal(rows.positions, np.arange(plan.encoder_start, n))
      np.testing.assert_array_equal(rows.writes, rows.positions >= plan.cached)
      assert set(rows.floors) == {plan.encoder_floor}
      below = plan.decoder_rows()
      np.testing.assert_array_equal(below.positions, np.arange(plan.decoder_start, n))
      assert set(below.floors) == {plan.decoder_floor}
      assert (rows.segments == 1).all()
      assert (below.segments == 1).all()

  @pytest.mark.parametrize(("n", "c"), HITS)
  def test_each_arm_runs_what_its_name_says(self, n, c):
    tail = max(0, n - W)
    assert replay.exact(n) == ("A", n, 0, 0, 0, 0, 0)
    cold = replay.cold(n, W)
    assert cold == ("B", n, 0, 0, 0, tail, tail)
    continued = replay.continued(n, c, W)
    assert continued == ("C", n, c, min(c, tail), 0, tail, tail)
    bounded = replay.replayed(n, c, W)
    if c <= W:  # nothing to be saved
      assert bounded == cold
    else:
      assert bounded == ("D", n, c, c - W, c - W, tail, tail)
      assert (~bounded.encoder_rows().writes).sum() == W
    whole = replay.exact_replay(n, c, W, ENCODER, DECODER)
    assert whole.decoder_start == max(0, n - 1 - DECODER * (W - 1))
    assert whole.encoder_start == max(0, min(c, whole.decoder_start) - ENCODER * (W - 1))
    assert whole.encoder_floor == whole.encoder_start

  def test_rows_of_the_released_model(self):
    """Bounded replay runs 128 rows where exact replay runs 20·127 a stack."""
    n, c = 100_000, 90_000
    bounded = replay.replayed(n, c, 128)
    assert c - bounded.encoder_start == 128
    exact = replay.exact_replay(n, c, 128, 20, 20)
    assert c - exact.encoder_start == 20 * 127
    assert n - exact.decoder_start == 20 * 127 + 1

  def test_lengths_out_of_range_are_refused(self):
    for make in (
        replay.exact,
        lambda n: replay.cold(n, W),
        lambda n: replay.continued(n, 0, W),
        lambda n: replay.replayed(n, 0, W),
        lambda n: replay.exact_replay(n, 0, W, ENCODER, DECODER),
    ):
      for length in (0, -1):
        with pytest.raises(ValueError, match=rf"length is {length}; a prompt has at least 1 token"):
          make(length)
    for make in (
        lambda c: replay.continued(9, c, W),
        lambda c: replay.replayed(9, c, W),
        lambda c: replay.exact_replay(9, c, W, ENCODER, DECODER),
    ):
      for cached in (10, -1):
        with pytest.raises(ValueError, match=rf"cached is {cached}; it must be within 0..9"):
          make(cached)
    for floor in (6, -1):
      with pytest.raises(ValueError, match=rf"floor is {floor}; it must be within 0..5"):
        replay.continued(9, 8, W, floor)


def windows(cache, lengths):
  """Encoder window latents by position, float32 [layers, B, W, H]: positions [n − W, n)."""
  at = np.asarray(ring_positions(jnp.asarray(lengths), W))
  order = np.argsort(at, axis=1)
  ring = np.asarray(cache.encoder_window.read(jnp.float32))
  return np.take_along_axis(ring, order[None, :, :, None], axis=2)


def encoder_only(length, cached=0, start=0):
  """The encoder over rows [start, length) with that floor, and no decoder row."""
  return replay.Plan(
      "D", int(length), int(cached), int(start), int(start), int(length), int(length)
  )


class Resume:
  """Texts of 40 tokens, the first 34 of them a prompt; every line may have its own hit."""

  total, prompt = 40, 34

  def __init__(self, served):
    self.served, self.model, self.reader = served, served.model(), served.reader()
    self.schedule = self.model.schedule
    self.ids = served.ids(self.total)
    self.every = len(self.ids)

  def prefill(self, plans, cache=None, **how):
    """Cache on the host and logits of each line's last row; prompts are cut to their plans."""
    prompts = [line[: p.length] for line, p in zip(self.ids, plans)]
    cache = self.served.cache() if cache is None else cache
    cache, logits, _ = self.reader.prefill(cache, prompts, plans, **how)
    return jax.device_get(cache), logits

  def kept(self, source, cached, starts=None):
    """A poisoned cache with the entries of `cached` tokens a line, and windows before `starts`."""
    cache = self.served.cache()
    for line, c in enumerate(cached):
      rows = state.take_entries(source, self.schedule, line, int(c))
      state.put_entries(cache, self.schedule, line, rows)
    if starts is not None:
      before, _ = self.prefill([encoder_only(max(1, s)) for s in starts])
      for line, start in enumerate(starts):
        if start:
          state.put_window(cache, line, state.take_window(before, line, 0), int(start))
    return cache

  def logits(self, plans, cache=None):
    """Of the last prompt row and the given continuation, [B, rows, V]."""
    cache, first = self.prefill(plans, cache)
    _, rest = self.served.write(cache, self.ids, [p.length for p in plans])
    return np.concatenate([np.asarray(first)[:, None], rest[:, plans[0].length :]], axis=1)

  @functools.cached_property
  def exact(self):
    return self.prefill([replay.exact(self.prompt)] * self.every)[0]

  @functools.cached_property
  def exact_logits(self):
    return self.logits([replay.exact(self.prompt)] * self.every)

  @functools.cached_property
  def cold_logits(self):
    return self.logits([replay.cold(self.prompt, W)] * self.every)


@pytest.fixture(scope="module")
def resume(served, quick_compile):
  return Resume(served)


@slow
class TestExactness:
  cached = np.arange(20, 32)

  def rebuilt(self, resume, rows):
    """Largest error of every window latent, [layers, B, W], after a replay of so many rows."""
    kept = resume.kept(resume.exact, self.cached)
    cache, _ = resume.prefill([encoder_only(c, c, c - rows) for c in self.cached], kept)
    whole, _ = resume.prefill([encoder_only(c) for c in self.cached])
    return np.abs(windows(cache, self.cached) - windows(whole, self.cached)).max(-1)

  def test_bounded_replay_is_exact_in_layer_0_and_once_in_layer_1(self, resume):
    error = self.rebuilt(resume, W)
    assert error[0].max() < 1e-6
    assert error[1, :, -1].max() < 1e-5
    assert error[1, :, :-1].min() > 1e-3
    assert error[2].min() > 1e-3

  def test_exact_windows_take_so_many_rows_and_not_one_fewer(self, resume):
    """n·(W − 1) for the W − 1 keys that the next row reads, one more for all W."""
    enough = ENCODER * (W - 1)
    assert self.rebuilt(resume, enough + 1).max() < 1e-5
    error = self.rebuilt(resume, enough)
    assert error[:, :, 1:].max() < 1e-5
    assert error[-1, :, 0].min() > 1e-3
    assert self.rebuilt(resume, enough - 1)[-1, :, 1].min() > 1e-3

  def test_exact_replay_of_the_encoder_takes_so_many_rows_and_not_one_fewer(self, resume):
    """The first token after a hit: its entry, read by the decoder, is made by the last layer."""
    n, cached = resume.prompt, np.arange(10, 22, 2).repeat(2)
    plans = [replay.exact_replay(n, c, W, ENCODER, DECODER) for c in cached]
    assert all(c - p.encoder_start == ENCODER * (W - 1) for c, p in zip(cached, plans))

    def first_entry(plans):
      cache, _ = resume.prefill(plans, resume.kept(resume.exact, cached))
      found, right = (np.asarray(c.main_kv[-1].read(jnp.float32)) for c in (cache, resume.exact))
      own = np.arange(resume.every), cached
      return np.abs(found[own] - right[own]).max(-1)

    assert first_entry(plans).max() < 1e-5
    fewer = [
        p._replace(encoder_start=p.encoder_start + 1, encoder_floor=p.encoder_floor + 1)
        for p in plans
    ]
    assert first_entry(fewer).min() > 1e-4

  def test_exact_replay_gives_the_logits_of_arm_a(self, resume):
    """Hits anywhere, odd ones that lie among the replayed rows too; one decoder row fewer shows."""
    n, cached = resume.prompt, [34, 33, 32, 31, 30, 29, 28, 25, 22, 20, 12, 2]
    plans = [replay.exact_replay(n, c, W, ENCODER, DECODER) for c in cached]
    found = resume.logits(plans, resume.kept(resume.exact, cached))
    np.testing.assert_allclose(found, resume.exact_logits, atol=1e-5, rtol=0)
    fewer = [
        p._replace(decoder_start=p.decoder_start + 1, decoder_floor=p.decoder_floor + 1)
        for p in plans
    ]
    found = resume.logits(fewer, resume.kept(resume.exact, cached))
    assert np.median(np.abs(found - resume.exact_logits)[:, 0].max(-1)) > 1e-5


@slow
class TestArms:

  def test_a_cold_prefill_is_an_approximation(self, resume):
    """What it is equal to: `test_simulation.py`."""
    difference = np.abs(resume.cold_logits - resume.exact_logits).max((1, 2))
    assert difference.min() > 1e-2

  def test_resuming_with_windows_loses_nothing(self, resume):
    """Arm C: hits before, in and at the end of the decoder's rows."""
    cached = [34, 33, 32, 31, 30, 28, 26, 24, 16, 8, 2, 0]
    plans = [replay.continued(resume.prompt, c, W) for c in cached]
    kept = resume.kept(resume.exact, cached, [p.encoder_start for p in plans])
    found = resume.logits(plans, kept)
    np.testing.assert_allclose(found, resume.cold_logits, atol=1e-5, rtol=0)

  def test_resuming_with_windows_is_bitwise_equal_at_equal_shapes(self, resume):
    """The rest of the prompt is read in the very chunks of the cold prefill."""
    cold, first = resume.prefill([replay.cold(resume.prompt, W)] * resume.every)
    # A row behind W rows cannot look past their floor: only here would a lost one show.
    assert (cold.floors == [0, resume.prompt - W]).all()
    cached = [4 * W] * resume.every
    plans = [replay.continued(resume.prompt, c, W) for c in cached]
    found, again = resume.prefill(plans, resume.kept(cold, cached, cached))
    np.testing.assert_array_equal(again, first)
    for name in ("encoder_window", "decoder_window", "lengths", "floors", "history"):
      assert resume.served.same_bytes(getattr(found, name), getattr(cold, name)), name
    np.testing.assert_array_equal(
        resume.served.write(found, resume.ids, [resume.prompt] * resume.every)[1],
        resume.served.write(cold, resume.ids, [resume.prompt] * resume.every)[1],
    )

  def test_exact_replay_of_everything_is_arm_a_bit_for_bit(self, resume):
    n = DECODER * (W - 1) + 1
    plans = [replay.exact_replay(n, c, W, ENCODER, DECODER) for c in range(resume.every)]
    assert {(p.encoder_start, p.decoder_start) for p in plans} == {(0, 0)}
    source, _ = resume.prefill([replay.exact(n)] * resume.every)
    found = resume.logits(plans, resume.kept(source, range(resume.every)))
    np.testing.assert_array_equal(found, resume.logits([replay.exact(n)] * resume.every))

  def test_a_hit_of_at_most_a_window_is_arm_b_even_if_replayed(self, resume):
    n, cached = resume.prompt, [c % (W + 1) for c in range(resume.every)]
    plans = [replay.replayed(n, c, W)._replace(arm="D", cached=c) for c in cached]
    found = resume.logits(plans, resume.kept(resume.exact, cached))
    np.testing.assert_allclose(found, resume.cold_logits, atol=1e-5, rtol=0)

  @pytest.mark.parametrize("arm", ["C", "D", "E"])
  def test_kept_entries_are_never_rewritten(self, resume, arm):
    """Not by replayed rows, odd hits, padding or decode; every later entry is written once."""
    n, cached = resume.prompt, [34, 33, 32, 31, 30, 28, 26, 24, 16, 8, 6, 2]
    make = {
        "C": replay.continued,
        "D": replay.replayed,
        "E": functools.partial(replay.exact_replay, encoder=ENCODER, decoder=DECODER),
    }[arm]
    plans = [make(n, c, W) for c in cached]
    starts = [p.encoder_start for p in plans] if arm == "C" else None
    kept = resume.kept(resume.exact, cached, starts)
    poison = resume.served.rows(resume.served.cache().main_kv[0])[0, 0]
    before = [resume.served.rows(t) for t in kept.main_kv + kept.index_keys]
    cache, _ = resume.prefill(plans, kept)
    cache, _ = resume.served.write(cache, resume.ids, [n] * resume.every)
    cache = jax.device_get(cache)
    for number, table in enumerate(cache.main_kv + cache.index_keys):
      ratio = resume.schedule.kv_sources[number % 2].ratio
      after = resume.served.rows(table)
      for line, plan in enumerate(plans):
        first = plan.cached // ratio
        np.testing.assert_array_equal(after[line, :first], before[number][line, :first])
        written = (after[line] != poison).any(-1)
        expected = np.arange(len(written)) < resume.total // ratio
        np.testing.assert_array_equal(written, expected)

  def test_a_second_turn_continues_from_what_the_first_left(self, resume):
    """Windows of a prompt, of its decoder rows and of generated rows, joined to 2W positions."""
    served, schedule, first_turn, cached = resume.served, resume.schedule, 18, 22
    at_decoder = []

    def take(cache):
      at_decoder.extend(state.take_window(cache, b, 0) for b in range(resume.every))

    plans = [replay.cold(first_turn, W)] * resume.every
    cache, _ = resume.prefill(plans, at_boundary=take)
    after_prompt = [state.take_window(cache, b, 0) for b in range(resume.every)]
    cache, _ = served.write(cache, resume.ids[:, :cached], [first_turn] * resume.every)
    lengths = [cached + 1 + line for line in range(resume.every)]
    plans = [replay.continued(n, cached, W) for n in lengths]
    resumed = served.cache()
    for b, plan in enumerate(plans):
      windows = state.joined(at_decoder[b], after_prompt[b], 2 * W)
      windows = state.joined(windows, state.take_window(cache, b, 0), 2 * W)
      assert (windows.first, windows.stop) == (cached - 2 * W, cached)
      assert state.reaches(windows, plan, W)
      state.put_window(resumed, b, windows, plan.encoder_start)
      rows = state.take_entries(cache, schedule, b, cached)
      state.put_entries(resumed, schedule, b, rows)
    _, found = resume.prefill(plans, resumed)
    _, cold = resume.prefill([replay.cold(n, W) for n in lengths])
    np.testing.assert_allclose(found, cold, atol=1e-5, rtol=0)
