"""Sparse attention of many rows: XLA's program against the definition, kernels against XLA's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chips
from pallas_kernels.sparse_attention import (
    kernel_rows,
    kernel_rows_gradient,
    kernel_rows_vjp,
    kernel_vjp,
    op,
    reference,
)

INTERPRETER = pltpu.InterpretParams(
    detect_races=True,
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
    dma_execution_mode="on_wait",
)
WINDOW = 5
# Largest difference in units of the largest value: output, mass, d q, d entries, d kv, d sink. In
# bf16 the parts are rounded before they are merged, and the gradients before they are added.
BUDGET = {jnp.float32: (2e-5,) * 6, jnp.bfloat16: (8e-3, 4e-3, 2e-2, 1e-2, 1e-2, 1e-2)}


def problem(b=1, t=6, n=4, h=64, c=21, k=16, dtype=jnp.float32, seed=0):
  """Two documents, absent and repeated entries, rows that see nothing, NaN where nobody reads."""
  rng = np.random.default_rng(seed)
  front = WINDOW - 1
  segments = np.sort(rng.integers(1, 3, (b, t)), 1)
  positions = np.tile(np.arange(t) + front, (b, 1))
  key_positions = np.tile(np.arange(front + t), (b, 1))
  key_segments = np.concatenate([np.repeat(segments[:, :1], front, 1), segments], 1)
  key_segments[:, 0] = 0
  floors = np.where(rng.random((b, t)) < 0.3, positions - 1, 0)
  slots = rng.integers(-1, c, (b, t, k))
  slots[rng.random((b, t, k)) < 0.2] = -1
  slots[slots == 0] = -1  # what a kernel may read for absent entries is NaN
  if t > 4:
    slots[0, 1] = -1  # only the window
    floors[0, 2] = 10**6  # only entries
    slots[0, 3], floors[0, 3] = -1, 10**6  # nothing
    slots[0, 4] = slots.max()  # one entry K times
  entries = rng.standard_normal((b, c, h))
  unread = ~np.stack([np.isin(np.arange(c), line) for line in slots])
  entries[unread] = np.nan
  kv = rng.standard_normal((b, front + t, h))
  kv[key_segments == 0] = np.nan
  floats = 2 * rng.standard_normal((b, t, n, h)), entries, kv
  integers = positions, floors, segments, key_positions, key_segments
  return (
      *(jnp.asarray(a, dtype) for a in floats),
      jnp.asarray(slots, jnp.int32),
      tuple(jnp.asarray(a, jnp.int32) for a in integers),
      jnp.asarray(rng.standard_normal(n), jnp.float32),
  )


def differentiated(forward, arrays, dtype):
  """Output, mass and gradients of a function of arrays that returns (out, mass)."""

  def both(*x):
    out, pull, mass = jax.vjp(forward, *x, has_aux=True)
    dout = np.random.default_rng(1).standard_normal(out.shape)
    return out, mass, pull(jnp.asarray(dout, dtype))

  with pltpu.force_tpu_interpret_mode(INTERPRETER):
    found = jax.jit(both)(*arrays)
  return [np.asarray(a, np.float32) for a in jax.tree.leaves(found)]


def run(problem, implementation):
  """Output, mass and the gradients of q, entries, kv and sink."""
  q, entries, kv, slots, integers, sink = problem

  def forward(q, entries, kv, sink):
    return op.sparse_attention(
        q, entries, slots, kv, *integers, sink, window=WINDOW, mass=True, chunk=4,
        implementation=implementation,
    )  # fmt: skip

  return differentiated(forward, (q, entries, kv, sink), q.dtype)


def assert_close(ours, theirs, budget):
  for a, b, limit in zip(ours, theirs, budget, strict=True):
    np.testing.assert_allclose(a, b, atol=limit * max(1, np.abs(b).max()), rtol=0)


def assert_equal(problem):
  ours, theirs = (run(problem, name) for name in ("pallas", "reference"))
  assert_close(ours, theirs, BUDGET[problem[0].dtype.type])
  return ours


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        dict(),
        dict(b=2, t=5, n=3, h=80, c=40, k=20, dtype=jnp.bfloat16),
        dict(t=3, n=8, h=200, c=9, k=16),
        dict(t=3, h=256, c=16, k=5, dtype=jnp.bfloat16),
    ],
    ids=["odd", "odd_bfloat16", "more_slots_than_entries", "few_slots_bfloat16"],
)
def test_value_and_gradient(sizes):
  out, mass, dq, *_ = assert_equal(problem(**sizes))
  if sizes.get("t", 6) > 4:
    assert not out[0, 3].any()  # sees nothing
    assert not mass[0, 3].any()
    assert not dq[0, 3].any()


def part(dtype=jnp.float32, **sizes):
  """Operands of `extend`: another part's results instead of a window."""
  q, entries, _, slots, _, _ = problem(dtype=dtype, **sizes)
  rng = np.random.default_rng(3)
  near = jnp.asarray(rng.standard_normal(q.shape), dtype)
  near_lse = jnp.asarray(rng.standard_normal(q.shape[:3]), jnp.float32)
  return q, entries, near, near_lse, slots


def extended(arrays, slots, budget, cores=1):
  """`differentiated` of the kernels in so many bytes of VMEM, and the plan."""
  chip = dataclasses.replace(chips.CHIPS["v5e"], cores=cores, vmem_bytes=budget)

  def forward(q, entries, near, near_lse):
    return kernel_rows_vjp.attend(
        chip, q, entries, slots, near, near_lse, mass=True, unrolled=False, chunk=4
    )

  return differentiated(forward, arrays, arrays[0].dtype)


def defined(arrays, slots):
  def forward(q, entries, near, near_lse):
    return kernel_vjp.extend(4, q, entries, slots, near, near_lse)

  return differentiated(forward, arrays, arrays[0].dtype)


def needs(arrays, slots):
  """Bytes of VMEM of the kernels: all in VMEM, from HBM, gradient in one pass and in two."""
  (_, _, n, h), c, k, dtype = arrays[0].shape, arrays[1].shape[1], slots.shape[-1], arrays[0].dtype
  assert (n % 16, h % 256, c % 32, k % 16) == (0, 0, 0, 0)
  local, remote = (kernel_rows.vmem_bytes(c, n, h, k, dtype, far) for far in (False, True))
  passes = (kernel_rows_gradient.vmem_bytes(c // n_, n, h, k, dtype) for n_ in (1, 2))
  return local, remote, *passes


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
def test_passes_of_the_gradient_and_entries_in_hbm(cores):
  *arrays, slots = part(jnp.bfloat16, b=2, t=3, n=16, h=256, c=512, k=16)
  local, remote, one, two = needs(arrays, slots)
  assert remote < local < two < one
  want = defined(arrays, slots)
  budget = 8e-3, 1e-6, 2e-2, 1e-2, 1e-2, 1e-5
  in_two = extended(arrays, slots, two, cores)
  assert_close(in_two, want, budget)
  for a, b in zip(in_two, extended(arrays, slots, two, cores), strict=True):
    np.testing.assert_array_equal(a, b)
  assert_close(extended(arrays, slots, remote, cores), want, budget)
  with pytest.raises(ValueError, match=f"need {remote} bytes of VMEM; the budget is {remote - 1}"):
    extended(arrays, slots, remote - 1)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(st.integers(1, 2), st.integers(1, 5), st.integers(1, 40), st.integers(1, 20), st.integers())
def test_any_shape(b, t, c, k, seed):
  *arrays, slots = part(b=b, t=t, n=2, h=32, c=c, k=k, seed=seed % 1000)
  ours = extended(arrays, slots, chips.CHIPS["v5e"].vmem_bytes)
  assert_close(ours, defined(arrays, slots), (2e-5,) * 6)


def test_one_row_in_the_kernel():
  q, entries, kv, slots, integers, sink = problem(t=1, k=8, seed=2)
  assert (slots < 0).any()
  attend = lambda name: jax.jit(
      lambda *x: op.sparse_attention(
          *x[:2], slots, x[2], *integers, sink, window=WINDOW, implementation=name
      )
  )(q, entries, kv)
  with pltpu.force_tpu_interpret_mode(INTERPRETER):
    got = attend("pallas")
  np.testing.assert_allclose(got, attend("reference"), atol=2e-5)


@pytest.mark.parametrize("sizes", [dict(), dict(b=2, t=5, c=3, k=7)], ids=["odd", "few_entries"])
def test_xla_program_is_the_definition(sizes):
  """Without NaN, which the definition's gradient would multiply by 0."""
  q, entries, kv, slots, integers, sink = problem(**sizes)
  entries, kv = jnp.nan_to_num(entries), jnp.nan_to_num(kv)
  rows = q, entries, kv, slots, integers, sink

  def defined(q, entries, kv, sink):
    out = reference.sparse_attention(q, entries, slots, kv, *integers, sink, window=WINDOW)
    return out, ()

  out, _, *gradients = run(rows, "reference")
  want = differentiated(defined, (q, entries, kv, sink), q.dtype)
  assert_close([out, *gradients], want, (2e-5,) * 5)


def test_mass_is_what_an_entry_adds():
  """One head: the output moves by mass times the value when a value's first channel moves."""
  q, entries, kv, slots, integers, sink = problem(t=4, n=1, k=6)
  q = q.at[..., 0].set(0.0)  # the channel is no part of the score
  attend = jax.jit(
      lambda entries: op.sparse_attention(
          q, entries, slots, kv, *integers, sink, window=WINDOW, mass=True
      )
  )
  out, mass = attend(entries)
  at = int(slots[0, 0].max())
  assert at > 0
  moved, _ = attend(entries.at[0, at, 0].add(1.0))
  expected = jnp.where(slots == at, mass, 0.0).sum(-1)
  np.testing.assert_allclose((moved - out)[:, :, 0, 0], expected, atol=1e-5)
  assert np.all(np.asarray(mass)[np.asarray(slots) < 0] == 0)


def test_bad_input():
  q, entries, kv, slots, integers, sink = problem()
  attend = lambda q=q, entries=entries, kv=kv, slots=slots, **k: op.sparse_attention(
      q, entries, slots, kv, *integers, sink, **{"window": WINDOW, **k}
  )
  with pytest.raises(ValueError, match="entries has dtype bfloat16; that of q is float32"):
    attend(entries=entries.astype(jnp.bfloat16))
  with pytest.raises(ValueError, match="slots has dtype int16; it must be int32"):
    attend(slots=slots.astype(jnp.int16))
  with pytest.raises(ValueError, match="chunk is 0"):
    attend(chunk=0)
  with pytest.raises(ValueError, match="window=6 with 4 slots before the rows"):
    attend(window=6)
  with pytest.raises(ValueError, match="implementation='pallas' on cpu"):
    attend(implementation="pallas")
  wide = (jnp.zeros((1, *shape, 1032)) for shape in ((6, 4), (21,), (10,)))
  with (
      pltpu.force_tpu_interpret_mode(INTERPRETER),
      pytest.raises(
          ValueError, match="q has 1032 channels: the kernel takes entries of up to 4096"
      ),
  ):
    attend(*wide, implementation="pallas")
