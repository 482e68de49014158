"""Top-K of rows: over all visible entries or inside a pool, from arrays or packed keys."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from deepseek_jax.cache import Table
from deepseek_jax.nn import chunks
from deepseek_jax.nn.compressor import Entries, visible
from deepseek_jax.nn.indexer import (
    Queries,
    Selection,
    Straddle,
    block_starts,
    index_scores,
    pool_mask,
    pool_of_one,
    pool_top,
    scores_of_each,
    top_k,
)
from deepseek_jax.nn.joint_attention import gather_entries
from deepseek_jax.nn.rows import Rows
from pallas_kernels import dispatch
from pallas_kernels.index_topk import op


def select_in_pool(
    queries: Queries, rows: Rows, entries: Entries, pool: Int[Array, "B T P"], *, k: int,
    block_size: int, implementation: str | None = None,
) -> Selection:  # fmt: skip
  """`select` inside a pool by reading the pool's entries alone: cost does not grow with C."""
  b, t, _ = pool.shape
  slots = jnp.where(pool[..., None] < 0, -1, pool[..., None] + jnp.arange(block_size))
  slots = slots.reshape(b, t, -1)
  inside = (slots >= 0) & (slots < entries.last.shape[1])
  at = jnp.where(inside, slots, 0)
  keys = entries.index_keys
  if isinstance(keys, Table):
    keys = keys.take(at, queries.q.dtype)
  else:
    keys = gather_entries(keys, at)
  last, segments = (jax.vmap(lambda a, i: a[i])(a, at) for a in (entries.last, entries.segments))
  # A block that its document ends early is followed by entries of another segment.
  seen = inside & (segments == rows.segments[..., None]) & (segments > 0)
  seen = seen & (last <= rows.positions[..., None])
  best = top_k(scores_of_each(queries, keys), seen, k, implementation)
  found = jnp.take_along_axis(slots, jnp.maximum(best.slots, 0), axis=-1)
  return best._replace(slots=jnp.where(best.slots < 0, -1, found))


def _packed(
    keys: Array | Table, k: int, blocks: int, block_size: int, implementation: str | None
) -> bool:
  """Whether the kernels that read packed index keys take these."""
  if not isinstance(keys, Table) or keys.layout.storage != "mxfp4":
    return False
  refusal = op.packed_refusal(keys.layout.width, block_size if blocks else op.BLOCK)
  refusal = refusal or op.top_k_refusal(k) or (op.top_k_refusal(blocks) if blocks else None)
  return dispatch.resolve(implementation, op.AVAILABLE, refusal) == "pallas"


def select_packed(
    queries: Queries, rows: Rows, keys: Table, pool: Int[Array, "B T P"] | None, *, m: int, k: int,
    blocks: int,
) -> tuple[Selection, Int[Array, "B T P"] | None]:  # fmt: skip
  """`select` on the packed keys of one document a line; selected scores are not returned (0)."""
  packed = op.PackedKeys(keys.data, keys.scales)
  seen = jnp.where(rows.segments > 0, (rows.positions + 1) // m, 0)
  q, weights = queries.q.astype(jnp.bfloat16), queries.weights
  run = dict(implementation="pallas")
  chosen_blocks = None
  if pool is not None and pool.shape[-1] * op.BLOCK < packed.entries:
    chosen_blocks = jnp.where(pool < 0, -1, pool // op.BLOCK)
  tiles = op.packed_scores(q, weights, packed, seen, chosen_blocks, **run)
  slots = op.top_k(tiles, k, **run)
  if chosen_blocks is not None:
    slots = op.pool_entries(slots, chosen_blocks)
  starts = None
  if blocks:
    starts = op.top_blocks(tiles, seen, blocks, **run)
    starts = jnp.where(starts < 0, -1, starts * op.BLOCK)
  return Selection(slots, jnp.where(slots < 0, -jnp.inf, 0.0)), starts


def select(
    queries: Queries, rows: Rows, entries: Entries, *, m: int, k: int, chunk: int,
    pool: Int[Array, "B T P"] | None = None, blocks: int = 0, block_size: int = 1,
    same_rows: bool = True, implementation: str | None = None,
) -> tuple[Selection, Int[Array, "B T P"] | None]:  # fmt: skip
  """Top-K of every row over the visible entries, inside `pool` if given (spec 5).

  With `blocks` the row's candidate pool is chosen from the same scores and returned.
  """
  length, c = rows.positions.shape[1], entries.last.shape[1]
  size = chunks.chunk_rows(length, chunk, 1)
  if _packed(entries.index_keys, k, blocks, block_size, implementation):
    one = lambda x, _: select_packed(*x[:2], entries.index_keys, x[2], m=m, k=k, blocks=blocks)
    return chunks.over_rows(one, (queries, rows, pool), size)
  one_document = isinstance(entries.index_keys, Table)
  if pool is not None and one_document and 2 * pool.shape[-1] * block_size <= c:
    how = dict(k=k, block_size=block_size, implementation=implementation)
    one = lambda x, _: select_in_pool(*x[:2], entries, x[2], **how)
    return chunks.over_rows(one, (queries, rows, pool), size), None
  if one_document:
    entries = entries._replace(index_keys=entries.index_keys.read(queries.q.dtype))

  def of_chunk(x, stop):
    queries, rows, pool = x
    bound = min(c, -(-stop // m)) if same_rows else c
    keys, last, segments = (a[:, :bound] for a in entries[1:])
    seen = visible(rows, last, segments)
    scores = index_scores(queries, keys)
    starts = straddle = None
    if blocks or pool is not None:
      straddle = Straddle.of(rows.reads, last, segments, m=m, size=block_size)
    if blocks:
      how = dict(m=m, size=block_size, blocks=blocks, implementation=implementation)
      if one_document:
        starts = pool_of_one(scores, seen, rows.positions, **how)
      else:
        starts = pool_top(scores, seen, last, rows.positions, straddle=straddle, **how)
      wide = max(0, min(blocks, c) - starts.shape[-1])
      starts = jnp.pad(starts, ((0, 0), (0, 0), (0, wide)), constant_values=-1)
    if pool is not None:
      seen = seen & pool_mask(pool, block_starts(last, m, block_size), straddle)
    return top_k(scores, seen, k, implementation), starts

  # Without a bound that grows with the rows a second band would be the same program again.
  bands = chunks.BANDS if same_rows else 1
  return chunks.over_rows(of_chunk, (queries, rows, pool), size, bands)
