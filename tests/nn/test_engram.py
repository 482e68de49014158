"""Engram: released constants and hashes, integer arithmetic without 64 bits, dead positions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import flash
from deepseek_jax import tokenizer
from deepseek_jax.config import Config
from deepseek_jax.nn import engram

RELEASED = Config.from_config_dict(flash.get_config()).model
CONSTANTS = engram.hash_constants(RELEASED)


def hashed(ngrams, constants):
  return jax.jit(lambda n: engram.table_rows(n, constants))(jnp.asarray(ngrams))


def in_int64(ngrams, constants):
  """The reference's arithmetic."""
  t = np.maximum(np.asarray(ngrams, np.int64), 0)
  r = t[..., 0] * constants.multipliers[0]
  columns = []
  for n in range(1, len(constants.multipliers)):
    r = r ^ (t[..., n] * constants.multipliers[n])
    columns.append(r[..., None] % constants.primes[n - 1])
  return np.concatenate(columns, -1) + constants.offsets


def test_released_constants(golden):
  ops = golden("ops")
  for k, constants in enumerate(CONSTANTS):
    np.testing.assert_array_equal(constants.primes, ops["engram/primes"][k])
    np.testing.assert_array_equal(constants.multipliers, ops["engram/multipliers"][k])
    np.testing.assert_array_equal(constants.offsets, ops["engram/offsets"][k])


@pytest.mark.parametrize("dead", [False, True])
def test_released_hashes(golden, dead):
  ops = golden("ops")
  live = ops["engram/live"] if dead else np.ones_like(ops["engram/live"])
  classes = np.where(live, ops["engram/class_ids"], -1)
  ngrams = np.stack([tokenizer.ngrams(c, int(ops["engram/pad_class"]), 4) for c in classes])
  for k, constants in enumerate(CONSTANTS):
    expected = ops["engram/hash_dead" if dead else "engram/hash"][:, :, k]
    np.testing.assert_array_equal(np.asarray(hashed(ngrams, constants))[live], expected[live])


def test_hashes_equal_int64_arithmetic_bit_for_bit():
  """Products pass 2³¹ and 2⁶²; no 64-bit integer exists in the compiled function."""
  rng = np.random.default_rng(0)
  classes = RELEASED.engram_compressed_vocab_size
  ngrams = rng.integers(0, classes, (2, 500, 4)).astype(np.int32)
  ngrams[0, :4] = [[0] * 4, [classes - 1] * 4, [classes - 1, 0, 0, 0], [0, 0, 0, classes - 1]]
  for k, constants in enumerate(CONSTANTS):
    assert int(ngrams.max()) * int(constants.multipliers.max()) > 2**62
    ours = np.asarray(hashed(ngrams, constants))
    assert ours.dtype == np.int32
    np.testing.assert_array_equal(ours, in_int64(ngrams, constants))
    assert ours.min() >= 0
    assert ours.max() < RELEASED.engram_num_embeddings[k]
    # Rows, never rows times width: the last row of the table times 256 does not fit 32 bits.
    text = str(jax.make_jaxpr(lambda n, c=constants: engram.table_rows(n, c))(jnp.asarray(ngrams)))
    assert "i64" not in text
    assert "u64" not in text


def test_a_text_cut_anywhere_is_hashed_like_the_whole():
  """Also right after the start, where fewer tokens than an n-gram lie behind the cut."""
  classes = np.random.default_rng(0).integers(0, RELEASED.engram_compressed_vocab_size, 40)
  whole = np.asarray(hashed(tokenizer.ngrams(classes, 2, 4)[None], CONSTANTS[0]))[0]
  cuts = [
      tokenizer.ngrams(classes[c:], 2, 4, history=classes[max(0, c - 3) : c]) for c in range(40)
  ]
  padded = np.stack([np.pad(cut, ((40 - len(cut), 0), (0, 0))) for cut in cuts])
  rows = np.asarray(hashed(padded, CONSTANTS[0]))
  for c in range(40):
    np.testing.assert_array_equal(rows[c, c:], whole[c:])


def test_row_counts_must_be_the_sums_of_the_primes():
  wrong = dataclasses.replace(RELEASED, engram_num_embeddings=(384006168, 384016683))
  with pytest.raises(
      ValueError, match=r"engram_num_embeddings for layer 14 is 384016683.*384016682"
  ):
    engram.hash_constants(wrong)


def test_primes_beyond_the_integer_arithmetic_are_refused():
  sums = dataclasses.replace(
      RELEASED, engram_layer_ids=(1,), engram_num_embeddings=(33554432,), engram_vocab_size=2**24,
      engram_n_heads=1, engram_max_ngram_size=2,
  )  # fmt: skip
  prime = 16777259  # the first above 2²⁴
  with pytest.raises(ValueError, match=f"sum to {prime}"):
    engram.hash_constants(sums)
  with pytest.raises(ValueError, match="engram_vocab_size is 16777216.*below 16777216"):
    engram.hash_constants(dataclasses.replace(sums, engram_num_embeddings=(prime,)))


def module_of(golden_config, filled, ops):
  weights = {
      "embed.weight": ops["engram/tiny_table"],
      "wkv.weight": ops["engram/tiny_wkv"],
      "q_weight": ops["engram/tiny_q_weight"],
      "k_weight": ops["engram/tiny_k_weight"],
  }
  make = lambda: engram.Engram((), golden_config, 0, rngs=nnx.Rngs(0), dtype=np.float32)
  return filled(make, weights)


def test_released_module_with_and_without_a_dead_position(golden, golden_config, filled):
  ops = golden("ops")
  module = module_of(golden_config, filled, ops)
  found = ops["engram/tiny_table"][ops["engram/tiny_hash"]].reshape(2, 6, -1)
  mix = jax.jit(lambda x, found, live: module.mix(x, found, live))
  x, live = ops["engram/tiny_x"], ops["engram/tiny_live"]
  assert not live.all()
  assert (x == 0).all(-1).any()
  for name, mask in (("tiny_out", np.ones_like(live)), ("tiny_out_dead", live)):
    out = np.asarray(mix(x, found, mask))
    np.testing.assert_allclose(out, ops[f"engram/{name}"], atol=2e-6, rtol=0)
    np.testing.assert_array_equal(out[~mask], x[~mask])


def test_a_dead_position_keeps_its_stream_and_cuts_the_look_back(golden, golden_config, filled):
  """From n-grams as the model gets them: position 2 is dead, so 3 sees pads behind itself."""
  ops = golden("ops")
  module = module_of(golden_config, filled, ops)
  run = jax.jit(lambda x, ngrams: module(x, ngrams))
  x = ops["engram/tiny_x"][:1]
  classes = np.array([5, 9, -1, 7, 11, 30])
  out = np.asarray(run(x, jnp.asarray(tokenizer.ngrams(classes, 1, 4))[None]))
  np.testing.assert_array_equal(out[0, 2], x[0, 2])
  alone = np.asarray(run(x[:, 3:], jnp.asarray(tokenizer.ngrams(classes[3:], 1, 4))[None]))
  np.testing.assert_array_equal(out[:, 3:], alone)


def test_gradients_are_finite_at_zero_streams_and_zero_dot_products(golden, golden_config, filled):
  ops = golden("ops")
  module = module_of(golden_config, filled, ops)
  x = jnp.asarray(ops["engram/tiny_x"]).at[0, 1].set(0)
  ngrams = jnp.tile(jnp.asarray(tokenizer.ngrams(np.arange(6), 1, 4))[None], (2, 1, 1))
  total = lambda module, x: jnp.sum(jnp.sin(module(x, ngrams)))
  for leaf in jax.tree.leaves(jax.jit(jax.grad(total, argnums=(0, 1)))(module, x)):
    assert np.isfinite(leaf).all()
