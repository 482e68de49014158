"""Index scores, Top-K and the candidate pool: released values, and what no selection may do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deepseek_jax.nn.indexer import (
    Indexer,
    Queries,
    block_starts,
    index_scores,
    pool_mask,
    pool_top,
    top_k,
)
from deepseek_jax.nn.rope import frequencies, rotation
from deepseek_jax.quant import QuantPlan


def chosen(selection, row=0):
  slots = np.asarray(selection.slots[0, row])
  return [int(s) for s in slots if s >= 0]


def of_row(scores, allowed=None, k=4):
  scores = jnp.asarray(scores, jnp.float32)[None, None]
  allowed = jnp.ones(scores.shape, bool) if allowed is None else jnp.asarray(allowed)[None, None]
  return jax.jit(top_k, static_argnums=2)(scores, allowed, k)


@pytest.mark.parametrize(
    ("suffix", "plan"), [("", QuantPlan.none()), ("_quant", QuantPlan.released())]
)
def test_released_keys_scores_and_selection(golden, golden_config, filled, suffix, plan):
  ops = golden("ops")
  weights = {k.removeprefix("index/w/"): v for k, v in ops.items() if k.startswith("index/w/")}
  make = lambda: Indexer(
      (), golden_config, owns_keys=True, plan=plan, rngs=nnx.Rngs(0), dtype=np.float32
  )
  indexer, freqs = filled(make, weights), frequencies(golden_config, 2)
  tokens, entries = 23, 11
  seen = jnp.asarray((np.arange(tokens)[:, None] + 1) // 2 > np.arange(entries))[None]

  @jax.jit
  def run(x, qr, latent):
    keys = indexer.keys(latent, rotation(2 * jnp.arange(entries)[None], freqs))
    queries = indexer.queries(qr, x, rotation(jnp.arange(tokens)[None], freqs))
    scores = index_scores(queries, keys)
    return keys, jnp.where(seen, scores, -jnp.inf), top_k(scores, seen, 8)

  keys, scores, selection = run(ops["index/x"], ops["index/qr"], ops["index/latent"])
  np.testing.assert_allclose(keys, ops[f"index/k{suffix}"], atol=1e-6, rtol=0)
  np.testing.assert_allclose(scores, ops[f"index/scores{suffix}"], atol=2e-6, rtol=0)
  theirs = np.sort(ops[f"index/topk{suffix}"], axis=-1)
  np.testing.assert_array_equal(np.sort(selection.slots, axis=-1), theirs)


POOLS = [("cand/logits", "cand/lens", f"cand/mask_k{k}_b{b}", k, b)
         for k, b in ((3, 8), (16, 8), (1, 8), (2, 5), (5, 4))] + [
    ("cand/few_logits", "cand/few_lens", "cand/few_mask_k3_b4", 3, 4),
    ("cand/pin_logits", "cand/pin_lens", "cand/pin_mask_k2_b8", 2, 8),
]  # fmt: skip


def pool_of(logits, lens, blocks, size):
  c = logits.shape[-1]

  @jax.jit
  def run(logits, lens):
    last = jnp.arange(c)[None]
    seen = last[:, None] < lens[None, :, None]
    starts = pool_top(logits, seen, last, lens[None] - 1, m=1, size=size, blocks=blocks)
    return pool_mask(starts, block_starts(last, 1, size))

  return run(logits, lens.astype(np.int32))


@pytest.mark.parametrize(("logits", "lens", "mask", "blocks", "size"), POOLS)
def test_released_pools(golden, logits, lens, mask, blocks, size):
  ops = golden("ops")
  ours = pool_of(np.nan_to_num(ops[logits], neginf=-1e9), ops[lens], blocks, size)
  np.testing.assert_array_equal(ours, ops[mask])


def test_released_pool_of_one_decode_row(golden):
  ops = golden("ops")
  logits = ops["cand/logits"][:, 30:31, :31]
  ours = pool_of(logits, np.array([31]), 2, 8)
  np.testing.assert_array_equal(ours, ops["cand/decode_len31_k2_b8"])


def test_a_pool_holds_whole_blocks_and_always_the_newest():
  scores = np.array([9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0, -1], np.float32)[None, None]
  ours = pool_of(scores, np.array([9]), 2, 4)
  np.testing.assert_array_equal(np.flatnonzero(ours), [0, 1, 2, 3, 8, 9, 10])


def test_top_k_is_in_slot_order_with_ties_to_the_lowest_slot():
  assert chosen(of_row([1, 5, 3, 5, 2, 3, 3, 9])) == [1, 2, 3, 7]
  assert chosen(of_row(np.zeros(9))) == [0, 1, 2, 3]


def test_nan_is_never_selected_and_zeros_have_no_sign():
  """20 valid of 32 entries, three NaN, six equal values at the k-th place, zeros of both signs."""
  scores = np.full(32, 99.0, np.float32)
  scores[:9] = [4, np.nan, 3, -0.0, 0.0, -0.0, 0.0, 0.0, -0.0]
  scores[9:20] = [np.nan, 2, -1, -2, -3, np.nan, 5, -4, -5, -6, -7]
  allowed = np.arange(32) < 20
  assert chosen(of_row(scores + 0.0, allowed, k=7)) == [0, 2, 3, 4, 5, 10, 15]
  assert chosen(of_row(np.full(8, np.nan))) == []
  some = of_row(np.where(np.arange(8) == 5, 1, np.nan))
  assert chosen(some) == [5]
  np.testing.assert_array_equal(some.scores[0, 0], [1] + [-np.inf] * 3)


def test_a_zero_score_is_positive_zero():
  """ReLU leaves many exact zeros; a negative head weight would make them -0, which ranks lower."""
  queries = Queries(-jnp.ones((1, 1, 2, 4)), jnp.array([[[-1.0, -2.0]]]))
  scores = np.asarray(jax.jit(index_scores)(queries, jnp.ones((1, 3, 4))))
  np.testing.assert_array_equal(scores, np.zeros((1, 1, 3)))
  assert not np.signbit(scores).any()


@pytest.mark.parametrize("visible", range(6))
def test_fewer_entries_than_k_are_all_selected_and_the_rest_is_absent(visible):
  selection = of_row(np.arange(5.0), np.arange(5) < visible, k=8)
  np.testing.assert_array_equal(selection.slots[0, 0], [*range(visible), *[-1] * (8 - visible)])


def test_no_entries_at_all():
  selection = jax.jit(top_k, static_argnums=2)(jnp.zeros((1, 2, 0)), jnp.zeros((1, 2, 0), bool), 3)
  np.testing.assert_array_equal(selection.slots, np.full((1, 2, 3), -1))


def test_minus_infinity_is_not_a_score_and_infinity_is_the_best():
  assert chosen(of_row([-np.inf, 1, np.inf, -np.inf, 0, -9, 2, 3], k=5)) == [1, 2, 4, 6, 7]
  assert chosen(of_row([-np.inf, -1, -np.inf])) == [1]


def test_integer_ties_are_the_same_for_every_split_of_the_rows():
  """Scores of small integers tie exactly: any order of summation must choose the same set."""
  rng = np.random.default_rng(0)
  q = rng.integers(-2, 3, (1, 12, 8, 16)).astype(np.float32)
  w = rng.integers(-2, 3, (1, 12, 8)).astype(np.float32)
  keys = rng.integers(-1, 2, (1, 40, 16)).astype(np.float32)
  allowed = np.ones((1, 12, 40), bool)

  @jax.jit
  def run(q, w, keys, allowed):
    scores = index_scores(Queries(q, w), keys)
    return scores, top_k(scores, allowed, 8).slots

  scores, whole = run(q, w, keys, allowed)
  kth = np.sort(scores, axis=-1)[0, :, -8]
  assert (np.sum(np.asarray(scores)[0] == kth[:, None], axis=-1) > 1).sum() > 6  # ties are real
  for size in (1, 2, 3, 4, 6):
    parts = [
        run(q[:, i : i + size], w[:, i : i + size], keys, allowed[:, i : i + size])[1]
        for i in range(0, 12, size)
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
  half = run(*(a.astype(jnp.bfloat16) for a in (q, w, keys)), allowed)
  np.testing.assert_array_equal(half[1], whole)


def test_slots_are_absolute_where_a_document_starts_late():
  """Of a packed line the second document starts at slot 37: ids count slots of the line."""
  scores = np.zeros(50, np.float32)
  scores[[3, 40, 44]] = 9
  assert chosen(of_row(scores, np.arange(50) >= 37, k=3)) == [37, 40, 44]


def test_blocks_count_from_each_documents_first_entry():
  """A second document at slot 5 has blocks {5..8}, {9..12}: packing changes no pool."""
  last = jnp.asarray(np.r_[np.arange(5), np.arange(8)])[None]
  scores = jnp.asarray(np.r_[np.full(5, 9.0), 1, 2, 3, 4, 8, 7, 6, 0])[None, None].astype(
      jnp.float32
  )
  seen = jnp.asarray(np.r_[np.zeros(5, bool), np.ones(8, bool)])[None, None]
  run = jax.jit(functools.partial(pool_top, m=1, size=4), static_argnames="blocks")
  assert run(scores, seen, last, jnp.array([[7]]), blocks=1)[0, 0].tolist() == [9]
  assert run(scores, seen, last, jnp.array([[7]]), blocks=4)[0, 0].tolist() == [5, 9, -1, -1]
  np.testing.assert_array_equal(block_starts(last, 1, 4)[0], [0, 0, 0, 0, 4, *[5] * 4, *[9] * 4])


def test_a_query_equal_to_a_key_ranks_it_first():
  """Any rotation must cancel between query and key: the score at the same position is q · k."""
  rng = np.random.default_rng(0)
  keys = rng.standard_normal((1, 40, 32)).astype(np.float32)
  keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
  queries = Queries(jnp.asarray(keys)[:, :, None], jnp.ones((1, 40, 1)))
  scores = jax.jit(index_scores)(queries, keys)
  np.testing.assert_array_equal(np.argmax(scores, -1)[0], np.arange(40))
  np.testing.assert_allclose(np.diagonal(np.asarray(scores)[0]), np.ones(40), atol=1e-6)
