"""Engram: n-gram memory looked up by 64-bit hashes (spec 11), bit-exact with 32-bit arithmetic."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from deepseek_jax import sharding
from deepseek_jax.config import ModelConfig
from deepseek_jax.nn import exchange
from deepseek_jax.nn.layers import Linear, constant, normal, rows_of
from deepseek_jax.quantised import Quantised


class HashConstants(NamedTuple):
  """Of one Engram layer, int64: multipliers [n], primes [n−1, heads], offsets [(n−1)·heads]."""

  multipliers: np.ndarray
  primes: np.ndarray
  offsets: np.ndarray


def _is_prime(n: int) -> bool:
  """Deterministic Miller–Rabin below 3.3e24 with the first thirteen primes as bases."""
  bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
  if n < 2 or any(n % p == 0 for p in bases):
    return n in bases
  d, s = n - 1, 0
  while d % 2 == 0:
    d, s = d // 2, s + 1
  for a in bases:
    x = pow(a, d, n)
    if x in (1, n - 1):
      continue
    if not any((x := x * x % n) == n - 1 for _ in range(s - 1)):
      return False
  return True


@functools.cache
def hash_constants(config: ModelConfig) -> tuple[HashConstants, ...]:
  """Multipliers, primes and row offsets of every Engram layer, re-derived from the configuration.

  Primes: for each n-gram order the search restarts just below `engram_vocab_size` and takes the
  next primes not used by any order or layer before.

  Raises:
    ValueError: the primes do not sum to `engram_num_embeddings`, or one exceeds 2²⁴.
  """
  used: set[int] = set()
  result = []
  for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings):
    table = []
    for _ in range(config.engram_max_ngram_size - 1):
      candidate, heads = config.engram_vocab_size - 1, []
      while len(heads) < config.engram_n_heads:
        candidate += 1
        if candidate not in used and _is_prime(candidate):
          used.add(candidate)
          heads.append(candidate)
      table.append(heads)
    primes = np.array(table, np.int64)
    if primes.sum() != rows:
      raise ValueError(
          f"engram_num_embeddings for layer {layer} is {rows}; the primes from engram_vocab_size ="
          f" {config.engram_vocab_size} sum to {primes.sum()}"
      )
    if primes.max() >= 1 << 24:
      raise ValueError(
          f"engram_vocab_size is {config.engram_vocab_size}; primes must stay below {1 << 24}"
      )
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    draw = np.random.default_rng(10007 * layer).integers(
        0, bound, size=config.engram_max_ngram_size
    )
    flat = primes.reshape(-1)
    result.append(HashConstants(draw * 2 + 1, primes, np.concatenate([[0], np.cumsum(flat)[:-1]])))
  return tuple(result)


def _product(t: UInt32[Array, "..."], m: int) -> tuple[Array, Array]:
  """(high, low) words of the 64-bit product t·m, by 16-bit limbs of m; t below 2³²."""
  t0, t1 = t & 0xFFFF, t >> 16
  limbs = [np.uint32((m >> (16 * i)) & 0xFFFF) for i in range(4)]
  columns = [jnp.zeros_like(t) for _ in range(5)]  # 16-bit columns; carries are resolved below
  for i, limb in enumerate(limbs):
    for k, part in ((0, t0), (1, t1)):
      if i + k < 4:
        p = part * limb
        columns[i + k] = columns[i + k] + (p & 0xFFFF)
        columns[i + k + 1] = columns[i + k + 1] + (p >> 16)
  for i in range(4):
    columns[i + 1] = columns[i + 1] + (columns[i] >> 16)
    columns[i] = columns[i] & 0xFFFF
  return columns[2] | (columns[3] << 16), columns[0] | (columns[1] << 16)


def _modulo(high: Array, low: Array, prime: np.ndarray) -> Array:
  """(high·2³² + low) mod prime, a byte at a time: prime < 2²⁴ keeps every step inside 32 bits."""
  r = jnp.zeros(jnp.broadcast_shapes(high.shape, prime.shape), jnp.uint32)
  for word in (high, low):
    for shift in (24, 16, 8, 0):
      r = (r * np.uint32(256) + ((word >> shift) & 0xFF)) % prime
  return r


def table_rows(ngrams: Int[Array, "B T n"], constants: HashConstants) -> Int[Array, "B T c"]:
  """Table rows of every n-gram: columns by order, then head. Equals int64 arithmetic bit for bit.

  Args:
    ngrams: token classes at i, i − 1, …; a dead position has −1 first and is hashed as class 0
      (its gate is zero anyway).
    constants: of the layer.
  """
  t = jnp.maximum(ngrams, 0).astype(jnp.uint32)
  high, low = _product(t[..., 0], int(constants.multipliers[0]))
  columns = []
  for n in range(1, len(constants.multipliers)):
    h, l = _product(t[..., n], int(constants.multipliers[n]))
    high, low = high ^ h, low ^ l
    primes = constants.primes[n - 1].astype(np.uint32)
    columns.append(_modulo(high[..., None], low[..., None], primes))
  return jnp.concatenate(columns, axis=-1).astype(jnp.int32) + constants.offsets.astype(np.int32)


def allocated_rows(rows: int) -> int:
  """Rows of a table with the unused ones at its end, which let any mesh divide it.

  A multiple of the power of two below a thousandth of the rows, at least 8: the released tables,
  384,006,168 and 384,016,682 rows, have few factors, and grow by 0.01 % to multiples of 262,144.
  """
  unit = max(8, 1 << (rows // 1024).bit_length() >> 1)
  return -(-rows // unit) * unit


def _look_up(table: Array | Quantised, payload: Int[Array, " S"], valid: Array) -> Array:
  del valid
  return rows_of(table, payload)


class Embed(nnx.Module):
  """The table: `allocated_rows(rows)` × `width`. On a mesh every device holds the next rows."""

  def __init__(
      self, stack: tuple[int, ...], rows: int, width: int, *, std: float, rngs: nnx.Rngs, dtype
  ):
    drawn = normal(rngs, (*stack, allocated_rows(rows), width), std, dtype)
    self.weight = nnx.Param(drawn[...].at[..., rows:, :].set(0))

  def __call__(self, ids: Int[Array, "..."], dtype) -> Float[Array, "... H"]:
    table, flat = self.weight.get_value(), ids.reshape(-1)
    own = table.shape[0]
    found = exchange.visit(_look_up, table, flat % own, flat // own, sharding.AXES)
    return found.reshape(*ids.shape, -1).astype(dtype)


class Engram(nnx.Module):
  """Adds a gated value to every residual stream before the block."""

  def __init__(
      self, stack: tuple[int, ...], config: ModelConfig, ordinal: int, *, rngs: nnx.Rngs, dtype
  ):
    self.config, self.ordinal = config, ordinal
    self.eps, self.streams = config.rms_norm_eps, config.hc_mult
    width, d = config.engram_head_dim, config.hidden_size
    rows, columns = (
        config.engram_num_embeddings[ordinal],
        hash_constants(config)[ordinal].primes.size,
    )
    self.embed = Embed(stack, rows, width, std=1.0, rngs=rngs, dtype=dtype)
    self.wkv = Linear(stack, columns * width, (self.streams + 1) * d, rngs=rngs, dtype=dtype)
    self.q_weight = constant((*stack, self.streams, d), 1.0, dtype)
    self.k_weight = constant((*stack, self.streams, d), 1.0, dtype)

  def __call__(
      self, x: Float[Array, "B T M D"], ngrams: Int[Array, "B T n"]
  ) -> Float[Array, "B T M D"]:
    found = self.embed(table_rows(ngrams, hash_constants(self.config)[self.ordinal]), x.dtype)
    return self.mix(x, found.reshape(*found.shape[:2], -1), ngrams[..., 0] >= 0)

  def mix(self, x, found, live) -> Float[Array, "B T M D"]:
    """The gated sum for looked-up rows `found` [B, T, columns · width]; dead rows stay as is."""
    d = x.shape[-1]
    keys = self.wkv(found).reshape(*x.shape[:2], self.streams + 1, d)
    keys, value = keys[..., :-1, :].astype(jnp.float32), keys[..., -1:, :].astype(jnp.float32)
    v = x.astype(jnp.float32)

    def inverse_rms(a):
      return jax.lax.rsqrt(jnp.mean(a * a, axis=-1) + self.eps)

    weight = self.q_weight[...].astype(jnp.float32) * self.k_weight[...].astype(jnp.float32)
    dot = jnp.sum(v * weight * keys, axis=-1) * inverse_rms(v) * inverse_rms(keys) * d**-0.5
    sign = jnp.where(dot < 0, -1.0, 1.0)  # of +0 is +1, as released
    gate = jax.nn.sigmoid(sign * jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6)))
    gate = jnp.where(live[..., None], gate, 0.0)
    return (v + gate[..., None] * value).astype(x.dtype)
