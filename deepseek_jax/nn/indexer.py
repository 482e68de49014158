"""Index scores, exact Top-K and the hierarchical candidate pool (spec 5)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from deepseek_jax.config import ModelConfig
from deepseek_jax.nn.layers import Linear, RMSNorm, dot
from deepseek_jax.nn.rope import Rotation, rotate
from deepseek_jax.nn.rows import Reads
from deepseek_jax.quant import QuantPlan, fake_quant
from pallas_kernels import dispatch
from pallas_kernels.index_topk import op


class Queries(NamedTuple):
  """Index queries of a set of rows; `weights` carry the scale (J·I)^-0.5 and may be negative."""

  q: Float[Array, "B T I J"]
  weights: Float[Array, "B T I"]


class Selection(NamedTuple):
  """Top-K of every row: slots of the source's entries, ascending, −1 where there are fewer.

  `scores` are the index scores of those slots (−inf at −1); only the index loss reads them.
  """

  slots: Int[Array, "B T K"]
  scores: Float[Array, "B T K"]


class Indexer(nnx.Module):
  """Query side of every index source; key side of those that own keys."""

  def __init__(
      self, stack: tuple[int, ...], config: ModelConfig, *, owns_keys: bool, plan: QuantPlan,
      rngs: nnx.Rngs, dtype,
  ):  # fmt: skip
    self.heads, self.width, self.plan = config.index_n_heads, config.index_head_dim, plan
    self.wq_b = Linear(stack, config.q_lora_rank, self.heads * self.width, rngs=rngs, dtype=dtype)
    self.weights_proj = Linear(stack, config.hidden_size, self.heads, rngs=rngs, dtype=dtype)
    if owns_keys:
      self.wk = Linear(stack, config.head_dim, self.width, rngs=rngs, dtype=dtype)
      self.k_norm = RMSNorm(stack, self.width, config.rms_norm_eps, dtype=dtype)

  def keys(self, latents: Float[Array, "B C H"], table: Rotation) -> Float[Array, "B C J"]:
    """Index keys from the latents before their rotation; `table` holds the groups' first tokens."""
    return fake_quant(
        rotate(self.k_norm(self.wk(latents)), table), self.plan.index, component="index"
    )

  def queries(
      self, c_q: Float[Array, "B T L"], x: Float[Array, "B T D"], table: Rotation
  ) -> Queries:
    q = self.wq_b(c_q).reshape(*c_q.shape[:2], self.heads, self.width)
    q = fake_quant(rotate(q, table), self.plan.index, component="index")
    return Queries(q, self.weights_proj(x) * (self.width**-0.5 * self.heads**-0.5))


def index_scores(queries: Queries, keys: Float[Array, "B C J"]) -> Float[Array, "B T C"]:
  """I(i, j) = Σ_h w_h · ReLU(q_h · k_j), accumulated in f32. Zeros are +0: −0 would rank below."""
  if queries.q.shape[1] == 1:
    # Keys first: for a single row XLA's CPU would transpose all keys as it unpacks them.
    return _weighted(queries, jnp.moveaxis(dot("bcj,btij->bcti", keys, queries.q), 1, 3))
  return _weighted(queries, dot("btij,bcj->btic", queries.q, keys))


def scores_of_each(queries: Queries, keys: Float[Array, "B T K J"]) -> Float[Array, "B T K"]:
  """`index_scores` with keys of its own for every row."""
  return _weighted(queries, dot("btij,btkj->btik", queries.q, keys))


def _weighted(queries: Queries, dots: Float[Array, "B T I C"]) -> Float[Array, "B T C"]:
  scores = jnp.einsum("bti,btic->btc", queries.weights.astype(jnp.float32), jax.nn.relu(dots))
  return jnp.where(scores == 0, 0.0, scores)


def top_k(
    scores: Float[Array, "B T C"], allowed: Bool[Array, "B T C"], k: int,
    implementation: str | None = None,
) -> Selection:  # fmt: skip
  """The k best allowed entries, ties to the lowest slot, in ascending slot order; −1 for absent.

  NaN scores are never selected: `lax.top_k` would rank them first.
  """
  c = scores.shape[-1]
  masked = jnp.where(allowed & ~jnp.isnan(scores), scores, -jnp.inf)
  if _on_kernel(k, implementation):
    slots = op.top_k(jax.lax.stop_gradient(masked), k, implementation="pallas")
    best = jnp.take_along_axis(masked, jnp.maximum(slots, 0), axis=-1)
    return Selection(slots, jnp.where(slots < 0, -jnp.inf, best))
  masked = jnp.pad(masked, ((0, 0), (0, 0), (0, max(0, k - c))), constant_values=-jnp.inf)
  best, slots = jax.lax.top_k(masked, k)
  slots = jnp.where(best > -jnp.inf, slots.astype(jnp.int32), masked.shape[-1])
  slots, best = jax.lax.sort((slots, best), num_keys=1)
  return Selection(jnp.where(slots < masked.shape[-1], slots, -1), best)


def _on_kernel(k: int, implementation: str | None) -> bool:
  return dispatch.resolve(implementation, op.AVAILABLE, op.top_k_refusal(k)) == "pallas"


def _best_blocks(
    best: Float[Array, "B T C"], allowed: Bool[Array, "B T C"], blocks: int, implementation
) -> Int[Array, "B T P"]:
  """The pool's places among `best`; the reference leaves out places that are always empty."""
  if not _on_kernel(blocks, implementation):
    blocks = min(blocks, best.shape[-1])
  return top_k(best, allowed, blocks, implementation).slots


def block_starts(last: Int[Array, "B C"], m: int, size: int) -> Int[Array, "B C"]:
  """Slot of the first entry of each entry's block; entries of a document are contiguous."""
  return jnp.arange(last.shape[1]) - (last // m) % size


class Straddle(NamedTuple):
  """The block that a row reads in two parts: from its base, and the rest from its own segment.

  Attributes:
    head: slot of the block's first entry, which the base has; the number of slots for none.
    rest: the entries of the own segment that belong to it.
  """

  head: Int[Array, "B T"]
  rest: Bool[Array, "B T C"]

  @classmethod
  def of(
      cls, reads: Reads | None, last: Int[Array, "B C"], segments: Int[Array, "B C"], *, m: int,
      size: int,
  ) -> "Straddle | None":  # fmt: skip
    """Of rows that read a base of complete entries up to `reads.until`; None where none does."""
    if reads is None:
      return None
    kept = reads.until // m
    block, split = kept // size, (reads.base > 0) & (kept % size > 0)
    head = (reads.first + m - 1) // m + block * size
    same = (segments[:, None] == reads.own[..., None]) & (segments > 0)[:, None]
    inside = (last // m // size)[:, None] == block[..., None]
    return cls(jnp.where(split, head, last.shape[1]), split[..., None] & same & inside)


def pool_of_one(
    scores: Float[Array, "B T C"], seen: Bool[Array, "B T C"], positions: Int[Array, "B T"], *,
    m: int, size: int, blocks: int, implementation: str | None = None,
) -> Int[Array, "B T P"]:  # fmt: skip
  """`pool_top` where a line is one document and slot j holds its entry j."""
  b, t, c = scores.shape
  masked = jnp.where(seen & ~jnp.isnan(scores), scores, -jnp.inf)
  masked = jnp.pad(masked, ((0, 0), (0, 0), (0, -c % size)), constant_values=-jnp.inf)
  best = masked.reshape(b, t, -1, size).max(-1)
  number = jnp.arange(best.shape[-1])
  newest = ((positions + 1) // m - 1)[..., None] // size
  best = jnp.where(number == newest, jnp.inf, best)
  allowed = (number * size * m + m - 1 <= positions[..., None]) & seen.any(-1, keepdims=True)
  chosen = _best_blocks(best, allowed, blocks, implementation)
  return jnp.where(chosen < 0, -1, chosen * size)


def pool_top(
    scores: Float[Array, "B T C"], seen: Bool[Array, "B T C"], last: Int[Array, "B C"],
    positions: Int[Array, "B T"], *, m: int, size: int, blocks: int,
    straddle: Straddle | None = None, implementation: str | None = None,
) -> Int[Array, "B T P"]:  # fmt: skip
  """Best candidate blocks of every row, as the slots of their first entries (−1 for absent).

  A block's score is its maximum over the entries the row sees; the block of the newest entry is
  pinned. Blocks count from each document's own first entry, so packing changes nothing.
  """
  c = scores.shape[-1]
  number = last // m
  masked = jnp.where(seen & ~jnp.isnan(scores), scores, -jnp.inf)
  padded = jnp.pad(masked, ((0, 0), (0, 0), (0, size - 1)), constant_values=-jnp.inf)
  best = masked
  for r in range(1, size):
    inside = (
        jnp.pad(number, ((0, 0), (0, size - 1)), constant_values=-1)[:, r : r + c] == number + r
    )
    best = jnp.maximum(best, jnp.where(inside[:, None], padded[..., r : r + c], -jnp.inf))
  if straddle is not None:
    rest = jnp.max(jnp.where(straddle.rest, masked, -jnp.inf), axis=-1, keepdims=True)
    at_head = jnp.arange(c) == straddle.head[..., None]
    best = jnp.where(at_head, jnp.maximum(best, rest), best)
  newest = ((positions + 1) // m - 1) // size * size
  pinned = seen & (number[:, None] == newest[..., None])
  best = jnp.where(pinned, jnp.inf, best)
  allowed = (number % size == 0)[:, None] & seen
  return _best_blocks(best, allowed, blocks, implementation)


def pool_mask(
    starts: Int[Array, "B T P"], block_of: Int[Array, "B C"], straddle: Straddle | None = None
) -> Bool[Array, "B T C"]:
  """Whether an entry lies in one of the row's candidate blocks. `block_of` from `block_starts`."""
  b, t, _ = starts.shape
  c = block_of.shape[1]
  at = jnp.where(starts < 0, c, starts)
  chosen = jnp.zeros((b, t, c), bool)
  chosen = chosen.at[jnp.arange(b)[:, None, None], jnp.arange(t)[:, None], at].set(
      True, mode="drop"
  )
  # A straddling block's rest begins before its own segment.
  block_of = jnp.maximum(block_of, 0)[:, None]
  if straddle is not None:
    block_of = jnp.where(straddle.rest, straddle.head[..., None], block_of)
  return jnp.take_along_axis(chosen, jnp.broadcast_to(block_of, (b, t, c)), axis=2)
