"""Window attention: kernel against reference, and laws of the window."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from deepseek_jax.nn.joint_attention import Reach, WindowKeys, attend
from deepseek_jax.nn.rows import Rows
from pallas_kernels.window_attention import kernel, op

INTERPRETER = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)
# Largest difference, in units of the largest value of the reference: output, statistics, d q, d kv,
# d sink. In bf16 the reference sums dot products of rounded outputs, the kernel of unrounded ones.
BUDGET = {jnp.float32: (2e-5,) * 5, jnp.bfloat16: (4e-3, 1e-6, 8e-3, 8e-3, 8e-3)}


def problem(b=1, t=20, n=8, h=128, window=8, front=7, dtype=jnp.float32, seed=0):
  """Packed rows with two padding rows, floors, a row that sees nothing, NaN in unread slots."""
  rng = np.random.default_rng(seed)
  segments = np.sort(rng.integers(1, 4, (b, t)), 1)
  positions = np.stack([np.arange(t) - np.searchsorted(row, row) for row in segments]) + front
  floors = np.where(rng.random((b, t)) < 0.3, positions - 3, 0)
  if t > 4:
    floors[:, 3] = 10**6
    segments[:, t // 2 : t // 2 + 2] = 0
  past = np.stack([rng.permutation(front) for _ in range(b)]) + positions[:, :1] - front
  key_positions = np.concatenate([past, positions], 1)
  key_segments = np.concatenate([np.repeat(segments[:, :1], front, 1), segments], 1)
  key_segments[:, 0] = 0
  kv = rng.standard_normal((b, front + t, h))
  kv[key_segments == 0] = np.nan
  arrays = 3 * rng.standard_normal((b, t, n, h)), kv
  integers = positions, floors, segments, key_positions, key_segments
  return (
      tuple(jnp.asarray(a, dtype) for a in arrays),
      tuple(jnp.asarray(a, jnp.int32) for a in integers),
      jnp.asarray(rng.standard_normal(n), jnp.float32),
  )


def run(problem, window, implementation, cotangents=True):
  """Output, statistics and the gradients of q, kv and sink."""
  (q, kv), integers, sink = problem

  def forward(q, kv, sink):
    return op.window_attention(
        q, kv, *integers, sink, window=window, statistics=True, implementation=implementation
    )

  def both(q, kv, sink):
    out, pull = jax.vjp(forward, q, kv, sink)
    rng = np.random.default_rng(1)
    return out, pull(tuple(jnp.asarray(rng.standard_normal(a.shape), a.dtype) for a in out))

  with pltpu.force_tpu_interpret_mode(INTERPRETER):
    out = jax.jit(both if cotangents else forward)(q, kv, sink)
  return [np.asarray(a, np.float32) for a in jax.tree.leaves(out)]


def assert_equal(problem, window):
  dtype = problem[0][0].dtype.type
  ours, theirs = (run(problem, window, name) for name in ("pallas", "reference"))
  for a, b, budget in zip(ours, theirs, BUDGET[dtype]):
    np.testing.assert_allclose(a, b, atol=budget * max(1, np.abs(b).max()), rtol=0)


@pytest.mark.slow
def test_blocks_shorter_than_the_window(monkeypatch):
  """Blocks of 8 rows: rows of three blocks reach back before the first, whose order is free."""
  monkeypatch.setattr(kernel, "BLOCK_BYTES", 1)
  with pytest.raises(ValueError, match="the budget is 1"):
    run(problem(t=44, window=20, front=21), 20, "pallas")
  monkeypatch.setattr(kernel, "BLOCK_BYTES", 8 * 3 * 2 * 8 * 128 * 4)
  assert kernel.sizes_of(44, 21, 20, 8, 128, jnp.float32, 3, 1.0).block == 8
  assert_equal(problem(t=44, window=20, front=21), 20)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(dict(b=2, t=21, front=9), marks=pytest.mark.slow),
        pytest.param(dict(t=20, n=4, h=64, dtype=jnp.bfloat16), marks=pytest.mark.slow),
        dict(b=3, t=1, n=4, h=64, front=8),
        dict(t=5, window=1, front=0),
    ],
    ids=["ragged", "padded_bfloat16", "decode_ring", "own_row_only"],
)
def test_value_and_gradient(sizes):
  assert_equal(problem(**sizes), sizes.get("window", 8))


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 150), st.integers(1, 40), st.integers(0, 3), st.integers(0, 9)
)
def test_any_shape(b, t, window, extra, seed):
  assert_equal(problem(b, t, window=window, front=window - 1 + extra, seed=seed), window)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_rows_that_see_nothing_give_zero(implementation):
  (q, kv), integers, sink = problem(t=8)
  integers = (*integers[:4], jnp.zeros_like(integers[4]))
  out, lse, dq, dkv, _ = run(((q, kv), integers, sink), 8, implementation)
  assert not out.any()
  assert not dq.any()
  assert not dkv.any()
  np.testing.assert_allclose(lse, np.broadcast_to(sink, lse.shape), atol=1e-6)


def test_the_model_computes_the_same():
  (q, kv), integers, sink = problem(b=2, t=24, front=9, window=8)
  positions, floors, segments, key_positions, key_segments = integers
  kv = jnp.where((key_segments > 0)[..., None], kv, 0)
  rows = Rows(positions, floors, segments, segments > 0)
  keys = WindowKeys(kv, key_positions, key_segments)
  reach = Reach(window=8, ratio=0, same_rows=True)
  theirs, _ = jax.jit(functools.partial(attend, reach=reach, chunk=64))(
      q, rows, keys, None, None, sink
  )
  ours = op.window_attention(q, kv, *integers, sink, window=8)
  np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


def test_statistics_merge_two_windows_into_one():
  """Near and far halves of a window, the sink in one of them, are the whole window."""
  (q, kv), integers, sink = problem(t=16, front=7)
  positions, floors, segments, *keys = integers
  attention = jax.jit(
      functools.partial(op.window_attention, statistics=True), static_argnames="window"
  )
  whole, whole_lse = attention(q, kv, *integers, sink, window=8)
  near, near_lse = attention(q, kv, *integers, sink, window=4)
  parts = []
  for t in range(16):  # of each row, the keys that only the whole window holds
    one = lambda a, t=t: a[:, t : t + 1]
    far = jnp.where(keys[0] <= positions[0, t] - 4, keys[1], 0)
    row = map(one, (positions, floors, segments))
    parts.append(attention(one(q), kv, *row, keys[0], far, jnp.full_like(sink, -1e30), window=8))
  far, far_lse = (jnp.concatenate(a, 1) for a in zip(*parts))
  merged = near * jnp.exp(near_lse - whole_lse)[..., None]
  merged = merged + far * jnp.exp(far_lse - whole_lse)[..., None]
  np.testing.assert_allclose(merged, whole, atol=1e-5, rtol=0)


def test_bad_input():
  (q, kv), integers, sink = problem(t=8)
  attention = lambda q=q, kv=kv, sink=sink, window=8: op.window_attention(
      q, kv, *integers, sink, window=window
  )
  with pytest.raises(ValueError, match="window=9 with 7 slots before the rows"):
    attention(window=9)
  with pytest.raises(ValueError, match="q has dtype float16"):
    attention(q=q.astype(jnp.float16))
  with pytest.raises(ValueError, match="kv is bfloat16"):
    attention(kv=kv.astype(jnp.bfloat16))
  with pytest.raises(ValueError, match="implementation='pallas' on cpu"):
    op.window_attention(q, kv, *integers, sink, window=8, implementation="pallas")
  wide = jnp.zeros((1, 8, 129, 128))
  with (
      pltpu.force_tpu_interpret_mode(INTERPRETER),
      pytest.raises(ValueError, match="q has 129 heads: the kernel takes at most 128"),
  ):
    op.window_attention(wide, kv, *integers, jnp.zeros(129), window=8, implementation="pallas")
