"""Groups, pooling and visibility of global entries."""

import jax
import numpy as np
import pytest
from flax import nnx

from deepseek_jax.nn.compressor import Compressor, group_rows, visible
from deepseek_jax.nn.rows import Rows


def released(golden, golden_config, filled, m):
  ops = golden("ops")
  weights = {
      k.removeprefix(f"comp{m}/w/"): v for k, v in ops.items() if k.startswith(f"comp{m}/w/")
  }
  make = lambda: Compressor((), golden_config, m, rngs=nnx.Rngs(0), dtype=np.float32)
  module = filled(make, weights)

  @jax.jit
  def run(x):
    latents, groups, _ = module(x, Rows.single(*x.shape[:2]))
    return latents, groups

  return run, ops


@pytest.mark.parametrize(("length", "name"), [(12, "prefill12"), (7, "prefill7")])
def test_pairs_are_pooled_and_a_pending_token_makes_no_entry(
    golden, golden_config, filled, length, name
):
  run, ops = released(golden, golden_config, filled, 2)
  latents, groups = run(ops["comp2/x"][:, :length])
  complete = length // 2
  np.testing.assert_allclose(latents[:, :complete], ops[f"comp2/{name}"], atol=1e-6, rtol=0)
  filled_slots = np.arange(latents.shape[1]) < complete
  np.testing.assert_array_equal(groups.segments > 0, np.tile(filled_slots, (2, 1)))
  np.testing.assert_array_equal(groups.last[0, :complete], 2 * np.arange(complete) + 1)


def test_entries_emitted_one_by_one_are_those_of_the_whole_text(golden):
  """The recurrence that decode runs gives the same entries, so a prefill defines both."""
  ops = golden("ops")
  np.testing.assert_allclose(ops["comp2/decode"], ops["comp2/prefill12"][:, 3:], atol=1e-6, rtol=0)


def test_ratio_one_copies_a_latent_a_token(golden, golden_config, filled):
  run, ops = released(golden, golden_config, filled, 1)
  latents, groups = run(ops["comp2/x"])
  np.testing.assert_allclose(latents, ops["comp1/out"], atol=1e-6, rtol=0)
  np.testing.assert_array_equal(groups.last, np.tile(np.arange(12), (2, 1)))


@pytest.mark.parametrize("m", [1, 2, 3])
def test_groups_restart_with_every_document_and_skip_padding(m):
  """Documents of every residue, pads before, between and after them."""
  line = np.repeat([0, 1, 2, 3, 0, 4, 5, 0], [1, 5, 3, 9, 2, 1, m, 2]).astype(np.int32)
  rows = Rows.of_segments(line[None])
  groups = jax.jit(group_rows, static_argnums=1)(rows, m)
  found = [
      (int(s), int(last), tuple(int(i) for i in members))
      for s, last, members in zip(groups.segments[0], groups.last[0], groups.members[0])
      if s
  ]
  expected = []
  for s in range(1, 6):
    at = np.flatnonzero(line == s)
    for end in range(m - 1, len(at), m):
      expected.append((s, end, tuple(int(i) for i in at[end - m + 1 : end + 1])))
  assert found == expected
  # Slots ascend with rows, and a row t sees slots up to t // m only: chunks rely on it.
  slots = np.flatnonzero(groups.segments[0])
  np.testing.assert_array_equal(slots, [members[-1] // m for _, _, members in expected])


@pytest.mark.parametrize("m", [1, 2, 3])
def test_a_row_sees_the_entries_complete_at_its_position(m):
  rows = Rows.of_segments(np.array([[1] * 7 + [2] * 6 + [0] * 2], np.int32))
  groups = jax.jit(group_rows, static_argnums=1)(rows, m)
  seen = np.asarray(visible(rows, groups.last, groups.segments))[0]
  for t, (i, s) in enumerate(zip(rows.positions[0], rows.segments[0])):
    own = np.asarray(groups.segments[0]) == s
    assert not seen[t, ~own].any()
    assert seen[t].sum() == ((i + 1) // m if s else 0)


def test_rows_that_do_not_write_end_no_group():
  rows = Rows.of_segments(np.ones((1, 8), np.int32))
  rows = rows._replace(writes=rows.positions >= 4)
  groups = jax.jit(group_rows, static_argnums=1)(rows, 2)
  np.testing.assert_array_equal(groups.segments[0], [0, 0, 1, 1])


def test_a_segment_that_starts_inside_a_group_leaves_that_group_out():
  """A replayed segment may start at any position, here 3, right behind another one."""
  rows = Rows.of_segments(np.array([[1] * 4 + [2] * 4], np.int32))
  rows = rows._replace(positions=np.array([[0, 1, 2, 3, 3, 4, 5, 6]], np.int32))
  groups = jax.jit(group_rows, static_argnums=1)(rows, 2)
  np.testing.assert_array_equal(groups.segments[0], [1, 1, 0, 2])
  np.testing.assert_array_equal(groups.members[0, 3], [5, 6])
