"""What the model selects: everything when it may, and inside the pool when it must."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.nn.compressor import Entries, group_rows, visible
from deepseek_jax.nn.indexer import Queries
from deepseek_jax.nn.joint_attention import (
    Part,
    Reach,
    WindowKeys,
    attend,
    joint_attention,
    window_mask,
)
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.selection import select

T = 24


def traced(tiny, **changes):
  """Logits, selections and pools of the short model with a changed configuration."""
  config = dataclasses.replace(tiny.short, **changes)
  segments = np.array([[1] * T, [1] * 15 + [2] * 8 + [0]], np.int32)
  out = tiny.run(tiny.model(config), tiny.inputs(segments, config=config), trace=True)
  return np.asarray(out.hidden), out.trace, segments > 0


@pytest.fixture(scope="module")
def pooled(tiny):
  return traced(tiny)


@pytest.fixture(scope="module")
def free(tiny):
  return traced(tiny, candidate_source_layer_id=None)


def test_a_pool_of_all_blocks_is_no_pool(tiny, free):
  logits, trace, live = traced(tiny, candidate_topk_blocks=T // 2)
  np.testing.assert_array_equal(trace[1]["topk"][live], free[1][1]["topk"][live])
  np.testing.assert_array_equal(logits[live], free[0][live])


def test_a_reindex_layer_selects_inside_the_pool_alone(pooled, free):
  """The source searches everything; the layer that is restricted loses its best entries."""
  _, trace, live = pooled
  pool, slots = np.asarray(trace[0]["candidates"]), np.asarray(trace[1]["topk"])
  inside = np.take_along_axis(pool, np.maximum(slots, 0), axis=-1) | (slots < 0)
  assert inside[live].all()
  wanted = np.asarray(free[1][1]["topk"])
  outside = ~np.take_along_axis(pool, np.maximum(wanted, 0), axis=-1) & (wanted >= 0)
  assert outside[live].any()
  own = np.asarray(trace[0]["topk"])
  np.testing.assert_array_equal(own[live], np.asarray(free[1][0]["topk"])[live])
  assert not (np.take_along_axis(pool, np.maximum(own, 0), axis=-1) | (own < 0))[live].all()


def test_rows_select_as_many_entries_as_exist_up_to_k_and_reuse_layers_the_same(free):
  _, trace, live = free
  at = np.asarray(Rows.of_segments(np.array([[1] * T, [1] * 15 + [2] * 8 + [0]])).positions)
  for layer in trace:
    slots = np.asarray(layer["topk"])
    np.testing.assert_array_equal((slots >= 0).sum(-1)[live], np.minimum(at + 1, 4)[live])
    assert (slots[~live] == -1).all()
  for reuse in trace[2:]:
    np.testing.assert_array_equal(reuse["topk"], trace[1]["topk"])


def test_k_of_all_entries_is_select_all(tiny):
  """Also what the warm-up of the index loss relies on, where Top-K itself is small."""
  few = dataclasses.replace(tiny.short, candidate_source_layer_id=None)
  inputs = tiny.inputs([[1] * T] * 2, config=few)
  everything = tiny.run(tiny.model(few), inputs, select_all=True).hidden
  ours = tiny.run(tiny.model(dataclasses.replace(few, index_topk=T)), inputs).hidden
  np.testing.assert_allclose(ours, everything, atol=1e-6, rtol=0)


def random_entries(rows, m, h=8, seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  b, t = rows.positions.shape
  groups = group_rows(rows, m)
  c = groups.last.shape[1]
  entries = Entries(draw(b, c, h), draw(b, c, h), groups.last, groups.segments)
  queries = Queries(draw(b, t, 8, h), draw(b, t, 8))
  return draw(b, t, 2, h), queries, entries, draw(b, t, h)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("chunk", [5, 100])
def test_k_of_all_entries_is_dense_attention_over_the_visible_ones(m, chunk):
  """One mask of what is visible, no selection and no chunks: the definition, packed documents."""
  rows = Rows.of_segments(jnp.asarray([[1] * 5 + [2] * 3 + [3] * 9 + [4] + [5] * 4 + [0] * 2]))
  reach, sink = 3, jnp.array([0.3, -0.2])
  q, queries, entries, own = random_entries(rows, m)
  ahead = lambda a: jnp.pad(a, ((0, 0), (reach - 1, 0)))
  window = WindowKeys(
      jnp.pad(own, ((0, 0), (reach - 1, 0), (0, 0))), ahead(rows.positions), ahead(rows.segments)
  )

  @jax.jit
  def run(q, queries, entries):
    selection, _ = select(queries, rows, entries, m=m, k=T, chunk=chunk)
    how = Reach(reach, m, same_rows=True)
    ours, _ = attend(q, rows, window, entries.kv, selection.slots, sink, reach=how, chunk=chunk)
    near = Part(own, window_mask(rows, rows.positions, rows.segments, reach))
    every = Part(entries.kv, visible(rows, entries.last, entries.segments))
    return ours, joint_attention(q, (near, every), sink)[0]

  ours, dense = run(q, queries, entries)
  np.testing.assert_allclose(ours, dense, atol=1e-6, rtol=0)


def test_the_best_entry_outside_the_pool_is_not_selected():
  """A pool of 2 blocks of 8; the Reindex layer's favourite lies in a third."""
  rows = Rows.single(1, 40)
  keys = jnp.eye(40)[None]
  entries = Entries(keys, keys, rows.positions, rows.segments)

  def liking(**scores):
    q = jnp.zeros((1, 40, 1, 40))
    for slot, score in scores.items():
      q = q.at[:, :, 0, int(slot[1:])].set(score)
    return Queries(q, jnp.ones((1, 40, 1)))

  @jax.jit
  def run(source, reindex):
    how = dict(m=1, k=4, chunk=7, block_size=8)
    own, pool = select(source, rows, entries, blocks=2, **how)
    return own.slots, select(reindex, rows, entries, pool=pool, **how)[0].slots, pool

  own, inside, pool = run(liking(s9=5.0, s20=1.0), liking(s20=9.0, s10=3.0, s34=2.0))
  assert pool[0, 39].tolist() == [8, 32]
  assert {9, 20} < set(own[0, 39].tolist())
  chosen = set(inside[0, 39].tolist())
  assert {10, 34} < chosen
  assert 20 not in chosen
  assert all(8 <= slot < 16 or 32 <= slot < 40 for slot in chosen)
