"""Laws of index scores and exact selection: kernels against the reference, reference against nn."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from deepseek_jax import cache
from deepseek_jax.nn import indexer
from pallas_kernels.index_topk import decode as index_decode
from pallas_kernels.index_topk import (
    kernel_pool,
    kernel_rows,
    kernel_scores,
    kernel_topk,
    kernel_vjp,
    layout,
    op,
    reference,
)
from pallas_kernels.index_topk.layout import PackedKeys
from pallas_kernels.quantize import decode
from pallas_kernels.quantize import op as quantize
from pallas_kernels.quantize.formats import MXFP4

HEADS = 2
each_decode = pytest.mark.parametrize(
    "arithmetic", [decode.FLOAT32, decode.BFLOAT16, decode.FLOAT4]
)


def interpreted():
  return pltpu.force_tpu_interpret_mode(
      pltpu.InterpretParams(
          detect_races=True,
          uninitialized_memory="nan",
          out_of_bounds_reads="raise",
          dma_execution_mode="on_wait",
      )
  )


@pytest.fixture(name="interpreter")
def fixture_interpreter():
  return interpreted


def packed_keys(rng, batch, entries):
  """Packed keys with a block of zeros, a huge and a tiny entry."""
  x = rng.standard_normal((batch, entries, 128)).astype(np.float32)
  x[0, 5], x[0, 6], x[-1, 7] = 0, 1e20 * x[0, 6], 1e-30 * x[-1, 7]
  table = cache.Table.zeros((batch,), cache.Layout("mxfp4", entries, 128))
  slots = jnp.broadcast_to(jnp.arange(entries), (batch, entries))
  table = jax.jit(cache.Table.append)(table, slots, jnp.asarray(x))
  return PackedKeys(table.data, table.scales), table


def spoilt(keys, line, entry, group=1):
  """Keys with a NaN scale."""
  scales = np.array(keys.scales)
  words = scales.view(np.uint32)
  words[line, entry // 128, entry % 128] |= np.uint32(255 << 8 * group)
  return keys._replace(scales=jnp.asarray(scales))


def queries(rng, batch, rows):
  q = jnp.asarray(rng.standard_normal((batch, rows, HEADS, 128)), jnp.bfloat16)
  weights = jnp.asarray(rng.standard_normal((batch, rows, HEADS)), jnp.float32)
  return quantize.fake_quantize(q, MXFP4), weights


def assert_scores(got, want):
  """Equal but for the order of f32 sums."""
  got, want = np.asarray(got), np.asarray(want)
  finite = np.isfinite(want)
  np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
  np.testing.assert_array_equal(got[~finite & ~np.isnan(want)], want[~finite & ~np.isnan(want)])
  np.testing.assert_allclose(got[finite], want[finite], rtol=2e-5, atol=2e-5)
  np.testing.assert_array_equal(got[want == 0], 0)
  assert not np.any(np.signbit(got[got == 0]))


def awkward_scores(c):
  """Rows that selections go wrong on."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((8, c)).astype(np.float32)
  # Equals run out inside a word that goes on with equals and with better ones.
  x[1] = rng.choice([3, 1, -2], c, p=[0.018, 0.5, 0.482])
  x[2] = 1
  x[3] = -np.inf
  x[4, 300:] = -np.inf
  x[5, ::2] = np.nan
  x[6] = np.where(rng.random(c) < 0.01, 0.0, -0.0)
  x[6, c - 10 :] = np.arange(10)
  # More of the best in one column of the tiles than the first step keeps.
  x[7] = -np.abs(x[7])
  x[7, ::1024] = np.arange(1, c // 1024 + 1)
  return jnp.asarray(x)[None]


class TestReference:

  def test_packed_keys_are_those_that_the_cache_writes(self):
    keys, table = packed_keys(np.random.default_rng(0), 2, 256)
    np.testing.assert_array_equal(reference.unpack(keys), table.read(jnp.float32))

  def test_scores_are_the_models(self):
    rng = np.random.default_rng(1)
    keys, table = packed_keys(rng, 2, 256)
    q, weights = queries(rng, 2, 3)
    seen = jnp.full((2, 3), 256, jnp.int32)
    want = indexer.index_scores(indexer.Queries(q, weights), table.read(jnp.bfloat16))
    assert_scores(reference.packed_scores(q, weights, keys, seen), want)

  @pytest.mark.parametrize("k", [1, 40, 300])
  def test_top_k_is_the_models(self, k):
    scores = awkward_scores(1024)[:, :, :256]
    scores = jnp.where(scores == 0, 0.0, scores)
    want = indexer.top_k(scores, jnp.ones(scores.shape, bool), k).slots
    np.testing.assert_array_equal(op.top_k(scores, k), want)

  def test_zeros_of_both_signs_are_equal(self):
    scores = jnp.asarray([[[-0.0, 0.0, -0.0, -1.0]]])
    np.testing.assert_array_equal(op.top_k(scores, 2), [[[0, 1]]])

  @given(seed=st.integers(0, 99), blocks=st.sampled_from([1, 5, 128]))
  @settings(max_examples=10, deadline=None)
  def test_candidate_blocks_are_the_models(self, seed, blocks):
    rng = np.random.default_rng(seed)
    c, rows = 512, 4
    scores = rng.integers(-2, 3, (1, rows, c)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.1] = np.nan
    seen = rng.integers(0, c + 1, (1, rows)).astype(np.int32)
    seen[0, 0] = 0
    visible = np.arange(c) < seen[..., None]
    want = indexer.pool_top(
        jnp.asarray(scores), jnp.asarray(visible), jnp.arange(c)[None], jnp.asarray(seen) - 1,
        m=1, size=8, blocks=blocks,
    )  # fmt: skip
    tiles = layout.to_tiles(jnp.asarray(np.where(visible, scores, -np.inf)))
    got = op.top_blocks(tiles, jnp.asarray(seen), blocks)[..., : want.shape[-1]]
    np.testing.assert_array_equal(np.where(got < 0, -1, 8 * got), want)

  def test_tiles_keep_every_score(self):
    scores = jnp.arange(3000.0).reshape(1, 2, 1500)
    tiles = layout.to_tiles(scores)
    assert tiles.shape == (1, 2, 8, 8, 128)
    assert tiles[0, 0, 1, 3, 5] == 1024 + 5 * 8 + 3
    np.testing.assert_array_equal(layout.from_tiles(tiles, 1500), scores)


class TestScores:

  @each_decode
  def test_keys_of_a_tile(self, arithmetic, interpreter):
    rng = np.random.default_rng(3)
    words = lambda *shape: rng.integers(-(2**31), 2**31, shape).astype(np.int32)
    # Scales that the kernels do not read as other ones.
    scales = np.clip(words(8, 128).view(np.uint8), 2, 252).view(np.int32)
    packed = PackedKeys(jnp.asarray(words(1, 128, 128)), jnp.asarray(scales)[None])

    def body(codes, scales, out, words, bits):
      words[...] = codes[...].T
      index_decode.put_scales(bits, index_decode.stored_words(scales[...]), arithmetic)
      for e in range(8):
        out[e] = index_decode.keys(words, bits, e, arithmetic)

    with interpreter():
      got = pl.pallas_call(
          body,
          out_shape=jax.ShapeDtypeStruct((8, 128, 128), jnp.bfloat16),
          scratch_shapes=[pltpu.VMEM((128, 128), jnp.int32), pltpu.VMEM((4, 8, 128), jnp.int32)],
      )(packed.codes[0], packed.scales[0])
    channels = jnp.eye(128, dtype=jnp.bfloat16)
    # What the queries' order makes of channel numbers is the order of the keys.
    order = np.asarray(index_decode.ordered(channels, arithmetic)).argmax(axis=0)
    want = np.asarray(reference.unpack(packed)[0]).reshape(128, 8, 128).transpose(1, 2, 0)
    np.testing.assert_array_equal(np.asarray(got, np.float32), want[:, order])

  @pytest.mark.slow
  @each_decode
  def test_a_row_a_line(self, arithmetic, interpreter):
    rng = np.random.default_rng(2)
    keys, _ = packed_keys(rng, 3, 1152)
    keys = spoilt(spoilt(keys, 0, 77), 0, 1100)
    q, weights = queries(rng, 3, 1)
    seen = jnp.asarray([[1090], [1152], [0]], jnp.int32)
    want = reference.packed_scores(q, weights, keys, seen)
    assert np.isnan(want).sum() == 1
    with interpreter():
      got = jax.jit(kernel_scores.scores, static_argnames="arithmetic")(
          q, weights, *keys, seen, arithmetic=arithmetic
      )
    assert_scores(layout.from_tiles(got, 1152), want)

  @pytest.mark.slow
  def test_no_tile_beyond_the_bound_is_read(self, interpreter):
    rng = np.random.default_rng(4)
    keys, _ = packed_keys(rng, 1, 16384)
    q, weights = queries(rng, 1, 1)
    seen = jnp.full((1, 1), 8000, jnp.int32)
    changed = keys._replace(codes=keys.codes.at[:, 1024:].set(0x12345678))
    with interpreter():
      first, second = (
          op.packed_scores(q, weights, k, seen, implementation="pallas") for k in (keys, changed)
      )
    np.testing.assert_array_equal(first, second)
    assert np.all(np.isneginf(layout.from_tiles(first, 16384)[..., 8000:]))

  @pytest.mark.slow
  @each_decode
  def test_rows_of_one_line(self, arithmetic, interpreter):
    rng = np.random.default_rng(5)
    keys, _ = packed_keys(rng, 1, 1152)
    keys = spoilt(keys, 0, 77)
    q, weights = queries(rng, 1, 16)
    seen = jnp.asarray(rng.integers(0, 1153, (1, 16)), jnp.int32).at[0, 3].set(1152).at[0, 4].set(0)
    want = reference.packed_scores(q, weights, keys, seen)
    with interpreter():
      got = jax.jit(kernel_rows.scores, static_argnames="arithmetic")(
          q, weights, *keys, seen, arithmetic=arithmetic
      )
    assert_scores(layout.from_tiles(got, 1152), want)

  @pytest.mark.slow
  @given(seed=st.integers(0, 99), rows=st.integers(2, 11), heads=st.sampled_from([1, 2, 9]))
  @settings(max_examples=3, deadline=None)
  def test_any_number_of_rows(self, seed, rows, heads):
    rng = np.random.default_rng(seed)
    keys, _ = packed_keys(rng, 1, 128)
    q = jnp.asarray(rng.standard_normal((1, rows, heads, 128)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((1, rows, heads)), jnp.float32)
    seen = jnp.asarray(rng.integers(0, 129, (1, rows)), jnp.int32)
    want = reference.packed_scores(q, weights, keys, seen)
    with interpreted():
      got = op.packed_scores(q, weights, keys, seen, implementation="pallas")
    assert_scores(layout.from_tiles(got, 128), want)

  @pytest.mark.slow
  @each_decode
  def test_a_pool(self, arithmetic, interpreter):
    rng = np.random.default_rng(6)
    keys, _ = packed_keys(rng, 2, 1152)
    keys = spoilt(keys, 0, 77)
    q, weights = queries(rng, 2, 1)
    seen = jnp.asarray([[1152], [901]], jnp.int32)
    pool = np.full((2, 1, 1024), -1, np.int32)
    pool[0, 0, :4], pool[1, 0, :20] = [0, 9, 16, 143], np.arange(94, 114)
    pool = jnp.asarray(pool)
    want = reference.packed_scores(q, weights, keys, seen, pool)
    with interpreter():
      got = jax.jit(kernel_pool.scores, static_argnames="arithmetic")(
          q, weights, *keys, seen, pool, arithmetic=arithmetic
      )
    assert_scores(layout.from_tiles(got, 8192), want)
    assert np.isnan(want).sum() == 1
    chosen = op.pool_entries(op.top_k(got, 32), pool)
    everything = reference.packed_scores(q, weights, keys, seen)
    inside = np.isin(np.arange(1152) // 8, np.asarray(pool)[1, 0])
    best = op.top_k(jnp.where(inside, everything[1:], -jnp.inf), 32)
    np.testing.assert_array_equal(chosen[1:], best)


class TestTopK:

  @pytest.mark.parametrize(
      "tiled",
      [pytest.param(True, id="tiles"), pytest.param(False, marks=pytest.mark.slow, id="flat")],
  )
  def test_every_awkward_row(self, tiled, interpreter):
    scores = awkward_scores(16384)
    want = reference.top_k(scores, 512)
    with interpreter():
      got = op.top_k(layout.to_tiles(scores) if tiled else scores, 512, implementation="pallas")
    np.testing.assert_array_equal(got, want)

  @pytest.mark.slow
  @given(seed=st.integers(0, 99), rows=st.integers(1, 9), entries=st.integers(1, 3000))
  @settings(max_examples=3, deadline=None)
  def test_any_number_of_rows_and_entries(self, seed, rows, entries):
    rng = np.random.default_rng(seed)
    scores = jnp.asarray(rng.integers(-9, 10, (1, rows, entries)), jnp.float32)
    with interpreted():
      got = op.top_k(scores, 128, implementation="pallas")
    np.testing.assert_array_equal(got, reference.top_k(scores, 128))

  @pytest.mark.slow
  def test_more_than_there_are(self, interpreter):
    scores = awkward_scores(1024)[:, :7, :200]
    with interpreter():
      got = op.top_k(scores, 256, implementation="pallas")
    np.testing.assert_array_equal(got, reference.top_k(scores, 256))

  @pytest.mark.slow
  def test_candidate_blocks(self, interpreter):
    scores = awkward_scores(32768)
    seen = jnp.asarray([[32768, 20000, 1, 0, 300, 9, 32761, 31000]], jnp.int32)
    tiles = layout.to_tiles(jnp.where(jnp.arange(32768) < seen[..., None], scores, -jnp.inf))
    want = op.top_blocks(tiles, seen, 2048)
    with interpreter():
      got = op.top_blocks(tiles, seen, 2048, implementation="pallas")
    np.testing.assert_array_equal(got, want)
    newest = (np.asarray(seen) - 1) // 8
    assert all(newest[0, t] in got[0, t] for t in range(8) if seen[0, t])

  @pytest.mark.parametrize(("groups", "rows"), [(512, 8), (8192, 2), (1 << 14, 1)])
  def test_rows_of_a_step_follow_from_vmem(self, groups, rows):
    assert kernel_topk.rows_at_once(16, groups, kernel_topk.VMEM) == rows


class TestGradient:

  def test_is_that_of_the_definition(self):
    rng = np.random.default_rng(7)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    args = draw(2, 3, 4, 16), draw(2, 3, 4), draw(2, 9, 16)
    weight = draw(2, 3, 9)
    loss = lambda f: lambda *args: jnp.sum(weight * f(*args))
    got = jax.grad(loss(kernel_vjp.index_scores), (0, 1, 2))(*args)
    want = jax.grad(loss(reference.index_scores), (0, 1, 2))(*args)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5), got, want)


class TestBadInput:

  def refused(self, match):
    return pytest.raises(ValueError, match=match)

  def test_keys_and_queries(self):
    rng = np.random.default_rng(8)
    keys, _ = packed_keys(rng, 1, 128)
    q, weights = queries(rng, 1, 1)
    seen = jnp.zeros((1, 1), jnp.int32)
    with self.refused("q has dtype float32"):
      op.packed_scores(q.astype(jnp.float32), weights, keys, seen)
    with self.refused("keys.codes has 8 rows"):
      op.packed_scores(q, weights, keys._replace(codes=keys.codes[:, :8]), seen)
    with self.refused("on cpu"):
      op.packed_scores(q, weights, keys, seen, implementation="pallas")

  @pytest.mark.parametrize(
      ("k", "implementation", "match"),
      [(100, "pallas", "multiples of 128"), (8192, "pallas", "up to 4096"), (0, None, "k is 0")],
  )
  def test_k(self, k, implementation, match, interpreter):
    with interpreter() if implementation else contextlib.nullcontext(), self.refused(match):
      op.top_k(jnp.zeros((1, 1, 1024)), k, implementation=implementation)

  def test_pool_and_row(self, interpreter):
    rng = np.random.default_rng(9)
    keys, _ = packed_keys(rng, 1, 128)
    q, weights = queries(rng, 1, 1)
    pool = jnp.zeros((1, 1, 100), jnp.int32)
    with interpreter(), self.refused("pool has 100 blocks"):
      op.packed_scores(q, weights, keys, pool[..., 0], pool, implementation="pallas")
    with self.refused("bytes of VMEM hold"):
      kernel_topk.rows_at_once(1, 1 << 16, kernel_topk.VMEM)
