"""Laws of drawing: greedy, nucleus, frequencies, and what a draw depends on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.serve.sampling import Sampling, nucleus, sample

P = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32)  # sums are exact
LOGITS = np.log(P)[[3, 0, 4, 1, 2]]  # ids by probability: 1, 3, 4, 0, 2
DRAWS = 20_000


def draws(how, logits=LOGITS, count=DRAWS):
  """One line, a position after the other."""
  lines = jnp.asarray(logits)[None]
  one = jax.vmap(lambda at: sample(lines, at[None], how)[0])
  return np.asarray(one(jnp.arange(count)))


def test_greedy_takes_the_likeliest_and_of_equals_the_lowest_id():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(40, 30)).astype(np.float32)
  greedy = lambda a: np.asarray(sample(a, np.zeros(len(a), np.int32), Sampling(top_p=0.1, seed=9)))
  np.testing.assert_array_equal(greedy(logits), logits.argmax(-1))
  for line, row in enumerate(logits):
    row[rng.choice(30, 2 + line % 5, replace=False)] = row.max() + 1
  np.testing.assert_array_equal(greedy(logits), logits.argmax(-1))
  assert greedy(logits).dtype == np.int32


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-6, {1}), (0.5, {1}), (0.5001, {1, 3}), (0.75, {1, 3}), (0.76, {1, 3, 4}),
        (0.875, {1, 3, 4}), (0.9, {0, 1, 3, 4}), (0.9375, {0, 1, 3, 4}), (0.94, {0, 1, 2, 3, 4}),
    ],
)  # fmt: skip
def test_the_nucleus_is_the_fewest_likeliest_tokens_that_reach_top_p(top_p, kept):
  """Of the two equals at the border the lower id is kept."""
  lines = jnp.stack([LOGITS, LOGITS[::-1] + 7.0])
  found = np.asarray(nucleus(lines, top_p))
  assert set(np.flatnonzero(found[0] > -np.inf)) == kept
  inside = found > -np.inf
  np.testing.assert_array_equal(found[inside], np.asarray(lines)[inside])
  assert inside[1].sum() == len(kept)


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (3.0, 1.0), (1.0, 0.8), (2.0, 0.5)]
)
def test_frequencies_are_the_probabilities(temperature, top_p):
  """The nucleus is that of the probabilities at the temperature."""
  p = np.exp(LOGITS.astype(np.float64) / temperature)
  p /= p.sum()
  order = np.argsort(-p, kind="stable")
  outside = order[np.cumsum(p[order]) - p[order] >= top_p]
  p[outside] = 0
  p /= p.sum()
  found = draws(Sampling(temperature, top_p, seed=1))
  counts = np.bincount(found, minlength=len(p))
  sigma = np.sqrt(DRAWS * p * (1 - p))
  assert (np.abs(counts - DRAWS * p) <= 5 * sigma).all()
  assert not counts[outside].any()


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-42, 1e-60])
def test_temperatures_near_0_are_greedy(temperature):
  logits = np.float32([[300.0, -2.0, 305.0, 304.0], [-9.0, -7.0, -8.0, -7.5]])
  for top_p in (1.0, 0.3):
    found = sample(logits, np.zeros(2, np.int32), Sampling(temperature, top_p))
    np.testing.assert_array_equal(found, [2, 1])


def test_a_draw_depends_on_seed_line_and_position_alone():
  how = Sampling(temperature=1.0, top_p=0.95, seed=3)
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(6, 300)).astype(np.float32)
  positions = np.arange(6, dtype=np.int32) * 7
  found = np.asarray(sample(logits, positions, how))
  np.testing.assert_array_equal(found, sample(logits, positions, how))
  np.testing.assert_array_equal(sample(logits[:2], positions[:2], how), found[:2])
  other, elsewhere = logits.copy(), positions.copy()
  other[[0, 1, 3, 4, 5]] = rng.normal(size=(5, 300))
  elsewhere[[0, 1, 3, 4, 5]] += 1
  assert sample(other, elsewhere, how)[2] == found[2]
  same = np.repeat(logits[:1], 50, axis=0)
  at = np.full(50, 5, np.int32)
  by_line = np.asarray(sample(same, at, how))
  by_position = draws(how, logits[0], 50)
  other_seed = np.asarray(sample(same, at, dataclasses.replace(how, seed=4)))
  assert min(len(set(a.tolist())) for a in (by_line, by_position)) > 20
  assert (by_line != other_seed).sum() > 20


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -0.1}, r"temperature is -0.1; it must be finite and at least 0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, r"top_p is 0.0; it must be within \(0, 1\]"),
        ({"top_p": -1.0}, r"top_p is -1.0"),
        ({"top_p": 1.0001}, r"top_p is 1.0001"),
        ({"top_p": float("nan")}, r"top_p is nan"),
        ({"seed": -1}, r"seed is -1; it must be within 0..2\^32 - 1"),
        ({"seed": 1 << 32}, r"seed is 4294967296"),
    ],
)
def test_bad_values_are_refused(values, says):
  with pytest.raises(ValueError, match=says):
    Sampling(**values)


def test_the_largest_seed_is_one():
  draw = sample(LOGITS[None], np.zeros(1, np.int32), Sampling(1.0, seed=(1 << 32) - 1))
  assert 0 <= draw[0] < 5
