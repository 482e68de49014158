"""The joint softmax: released values, empty rows, sinks, masks, two ways to read entries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deepseek_jax.config import ComputeConfig
from deepseek_jax.nn import joint_attention as joint
from deepseek_jax.nn.attention import Attention
from deepseek_jax.nn.joint_attention import (
    Part,
    Reach,
    WindowKeys,
    attend,
    gather_entries,
    joint_attention,
    selection_mask,
    window_mask,
)
from deepseek_jax.nn.rope import frequencies, rotate, rotation
from deepseek_jax.nn.rows import Rows
from deepseek_jax.quant import QuantPlan
from deepseek_jax.schedule import Schedule

attention_of = jax.jit(joint_attention)


@pytest.mark.parametrize(
    ("name", "q_scale", "kv_scale", "dtype", "limit"),
    [
        ("out_f32", 1, 1, jnp.float32, 2e-6),
        ("out_f32_big", 40, 2, jnp.float32, 1e-5),
        ("out_bf16", 1, 1, jnp.bfloat16, 4.4e-3),
    ],
)
def test_released_sparse_attention(golden, name, q_scale, kv_scale, dtype, limit):
  """Scattered -1, a row of -1 alone, repeated slots that count each time, sinks of ±30."""
  ops = golden("ops")
  q = jnp.asarray(ops["attn/q"] * q_scale, dtype)
  kv = jnp.asarray(ops["attn/kv"] * kv_scale, dtype)
  slots = jnp.asarray(ops["attn/idx"])
  gathered = Part(gather_entries(kv, slots), slots >= 0)
  out, _, mass = attention_of(q, (gathered,), jnp.asarray(ops["attn/sink"]))
  assert out.dtype == dtype
  np.testing.assert_allclose(np.asarray(out, np.float32), ops[f"attn/{name}"], atol=limit, rtol=0)
  assert not np.asarray(out[0, 2], np.float32).any()
  assert not np.asarray(mass[0, 2]).any()


def test_masked_entries_equal_gathered_ones_where_no_slot_repeats(golden):
  ops = golden("ops")
  q, kv, sink = (jnp.asarray(ops[f"attn/{k}"]) for k in ("q", "kv", "sink"))
  idx = ops["attn/idx"]
  unique = [t for t in range(7) if len(set(r := idx[0, t][idx[0, t] >= 0])) == len(r)]
  assert {1, 2} < set(unique)
  mask = jax.jit(selection_mask, static_argnums=1)(jnp.asarray(idx), 40)
  dense = attention_of(q, (Part(kv, mask),), sink)[0]
  np.testing.assert_allclose(dense[0, unique], ops["attn/out_f32"][0, unique], atol=2e-6, rtol=0)


def test_a_selection_mask_marks_slots_and_nothing_for_absent_ones():
  """Slot 0 next to -1 is the row that an index of -1 clamped to 0 would lose."""
  slots = jnp.array([[[0, 3, -1, -1], [-1, -1, 2, 5], [-1] * 4, [5, 0, -1, 3], [0, 1, 2, 3]]])
  mask = jax.jit(selection_mask, static_argnums=1)(slots, 6)
  found = [list(np.flatnonzero(row)) for row in np.asarray(mask)[0]]
  assert found == [[0, 3], [2, 5], [], [0, 3, 5], [0, 1, 2, 3]]


def test_one_softmax_wherever_a_key_is_kept(golden):
  """Window keys and entries share a denominator: moving keys between them changes nothing."""
  ops = golden("ops")
  q, kv, sink = (jnp.asarray(ops[f"attn/{k}"]) for k in ("q", "kv", "sink"))
  seen = jnp.asarray(np.random.default_rng(0).random((1, 7, 40)) < 0.5)
  whole = attention_of(q, (Part(kv, seen),), sink)[0]
  for n in (1, 13):
    parts = Part(kv[:, :n], seen[..., :n]), Part(kv[:, n:], seen[..., n:])
    np.testing.assert_allclose(attention_of(q, parts, sink)[0], whole, atol=2e-6, rtol=0)


def test_mass_is_the_probability_of_each_entry_over_all_heads(golden):
  ops = golden("ops")
  q, kv, sink = (jnp.asarray(ops[f"attn/{k}"]) for k in ("q", "kv", "sink"))
  mass = attention_of(q, (Part(kv, jnp.ones((1, 7, 40), bool)),), sink)[2]
  logits = np.einsum("btnh,bch->btnc", ops["attn/q"], ops["attn/kv"]) / 8
  weights = np.exp(logits)
  weights /= weights.sum(-1, keepdims=True) + np.exp(ops["attn/sink"])[:, None]
  np.testing.assert_allclose(mass, weights.sum(2), atol=1e-5)


class Case:
  """Nine rows of two documents, one pad row, and two entries selected of nine, at random."""

  reach, entries, k, h = 3, 9, 2, 8

  def __init__(self):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    self.rows = Rows.of_segments(jnp.asarray([[1] * 5 + [2] * 3 + [0]]))
    t = self.rows.positions.shape[1]
    self.args = (
        draw(1, t, 2, self.h),
        draw(1, t + 2, self.h),
        draw(1, self.entries, self.h),
        draw(2),
    )
    slots = np.sort(rng.random((t, self.entries)).argsort(-1)[:, : self.k], -1)
    # A row t sees slots up to t; the first row and the pad select nothing.
    slots = np.where(
        (slots > np.arange(t)[:, None]) | np.isin(np.arange(t), [0, 8])[:, None], -1, slots
    )
    self.slots = jnp.asarray(np.sort(slots, -1)[:, ::-1].copy()[None], jnp.int32)

  def keys(self, window):
    ahead = lambda a: jnp.pad(a, ((0, 0), (self.reach - 1, 0)))
    return WindowKeys(window, ahead(self.rows.positions), ahead(self.rows.segments))

  def attend(self, q, window, kv, sink, *, chunk):
    reach = Reach(self.reach, 1, same_rows=True, mass=True)
    return attend(q, self.rows, self.keys(window), kv, self.slots, sink, reach=reach, chunk=chunk)

  def formula(self, q, window, kv, sink):
    """One softmax over all window slots, all entries and the sink."""
    keys = self.keys(window)
    near = window_mask(self.rows, keys.positions, keys.segments, self.reach)
    far = (self.slots[..., None] == jnp.arange(self.entries)).any(2)
    all_keys, seen = jnp.concatenate([window, kv], 1), jnp.concatenate([near, far], -1)
    logits = jnp.einsum("btnh,bch->btnc", q, all_keys) * self.h**-0.5
    logits = jnp.where(seen[:, :, None], logits, -jnp.inf)
    sinks = jnp.broadcast_to(sink[:, None], (*logits.shape[:3], 1))
    p = jax.nn.softmax(jnp.concatenate([logits, sinks], -1), axis=-1)[..., :-1]
    mass = jnp.take_along_axis(
        p.sum(2)[..., window.shape[1] :], jnp.maximum(self.slots, 0), axis=-1
    )
    return jnp.einsum("btnc,bch->btnh", p, all_keys), jnp.where(self.slots < 0, 0.0, mass)


@pytest.fixture(scope="module")
def case():
  return Case()


def differentiated(fn):
  @jax.jit
  def run(*args):
    out, pull = jax.vjp(lambda *a: fn(*a)[0], *args)
    return fn(*args), pull(jnp.cos(out))

  return run


@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("per_choice", [0, 100], ids=["gathered", "masked"])
def test_values_mass_and_gradients_are_those_of_the_formula(monkeypatch, case, chunk, per_choice):
  """Both sides of the size at which `attend` changes its way, in one chunk and in bands."""
  monkeypatch.setattr(joint, "DENSE_ENTRIES_PER_CHOICE", per_choice)
  ours = differentiated(functools.partial(case.attend, chunk=chunk))(*case.args)
  expected = differentiated(case.formula)(*case.args)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected)):
    np.testing.assert_allclose(a, b, atol=3e-6, rtol=0)


def test_an_empty_row_is_exactly_zero_and_masked_keys_are_never_read(case):
  """Whatever the sink: huge masked keys reach neither values nor gradients, which stay finite."""
  q, window, kv, _ = case.args
  run = differentiated(functools.partial(case.attend, chunk=100))
  chosen = set(np.asarray(case.slots).reshape(-1).tolist())
  unread = next(slot for slot in range(case.entries) if slot not in chosen)
  for sink in (-30.0, 0.0, 30.0):
    sinks = jnp.full(2, sink)
    (out, mass), gradients = run(q, window, kv, sinks)
    assert (np.asarray(out[0, 8]) == 0).all()
    assert (np.asarray(mass[0, 8]) == 0).all()
    assert np.abs(out[0, :8]).min() > 0
    assert all(np.isfinite(g).all() for g in gradients)
    assert (np.asarray(gradients[0][0, 8]) == 0).all()
    assert (np.asarray(gradients[1][0, [0, 1, 10]]) == 0).all()
    assert (np.asarray(gradients[2][0, unread]) == 0).all()
    for huge in (1e4, -1e4, 1e18):
      masked = run(
          q, window.at[0, jnp.array([0, 1, 10])].set(huge), kv.at[0, unread].set(huge), sinks
      )
      for a, b in zip(jax.tree.leaves(masked), jax.tree.leaves(((out, mass), gradients))):
        np.testing.assert_array_equal(a, b)


def test_the_sink_enters_the_denominator_once_and_unscaled():
  q, kv = jnp.zeros((1, 1, 1, 4)), jnp.ones((1, 2, 4))
  for sink in (-2.0, 0.0, 1.5):
    out = attention_of(q, (Part(kv, jnp.ones((1, 1, 2), bool)),), jnp.array([sink]))[0]
    np.testing.assert_allclose(out, np.full((1, 1, 1, 4), 2 / (2 + np.exp(sink))), rtol=1e-6)


def test_the_window_by_hand():
  """W = 3; a floor of 2; a second document; padding."""
  rows = Rows.of_segments(np.array([[1, 1, 1, 1, 1, 2, 2, 0]], np.int32))
  rows = rows._replace(floors=np.array([[0, 0, 2, 2, 2, 0, 0, 0]], np.int32))
  rows = jax.tree.map(jnp.asarray, rows)
  mask = jax.jit(window_mask, static_argnums=3)(rows, rows.positions, rows.segments, 3)
  expected = """
    1.......
    11......
    ..1.....
    ..11....
    ..111...
    .....1..
    .....11.
    ........
  """
  assert ["".join(".1"[int(x)] for x in row) for row in np.asarray(mask)[0]] == expected.split()


def test_released_output_projection(golden, golden_config, filled):
  ops = golden("ops")
  spec = Schedule.from_config(golden_config).layers[0]
  d, n, h, l = 40, 4, 64, 24
  make = lambda: Attention(
      (), golden_config, ComputeConfig(), spec, QuantPlan.none(), rngs=nnx.Rngs(0), dtype=np.float32
  )
  zeros = {
      "attn_sink": (n,), "wq_a.weight": (l, d), "q_norm.weight": (l,), "wq_b.weight": (n * h, l),
      "wkv.weight": (h, d), "kv_norm.weight": (h,),
  }  # fmt: skip
  weights = {name: np.zeros(shape) for name, shape in zeros.items()}
  weights |= {f"{k}.weight": ops[f"oproj/{k}"] for k in ("wo_a", "wo_b")}
  module = filled(make, weights)
  positions = jnp.tile(ops["oproj/positions"].astype(np.int32)[None], (2, 1))

  @jax.jit
  def run(o):
    table = rotation(positions, frequencies(golden_config, 2))
    turned = rotate(o, table, inverse=True)
    return turned, module.project(turned)

  turned, out = run(ops["oproj/o"])
  np.testing.assert_allclose(turned, ops["oproj/o_unrotated"], atol=1e-6, rtol=0)
  np.testing.assert_allclose(out, ops["oproj/out"], atol=2e-6, rtol=0)
