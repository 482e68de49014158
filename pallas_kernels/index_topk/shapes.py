"""Real shapes of index scoring and selection: released heads, contexts to 1M entries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.index_topk import op
from pallas_kernels.index_topk.layout import LANES, TILE, PackedKeys
from pallas_kernels.shape import Shape

HEADS, WIDTH, TOP_K, BLOCKS = 32, 128, 512, 2048
_CONTEXTS = {"64k": 1 << 16, "256k": 1 << 18, "1m": 1 << 20}


def _peer(kind, entries, batch):
  return f"{kind}_{entries}_{batch}" if entries < 1 << 20 else None


def _scoring(name, batch, rows, entries, kernel, pool=0):
  scored = 8 * pool or entries
  reads = batch if rows > 1 else batch * rows
  # Every row sees all entries.
  full = lambda count: np.full(4096, count, np.int32)
  return Shape(
      kernel=name,
      per="query",
      units=batch * rows,
      hbm_bytes=(68 * reads + 4 * batch * rows) * scored,
      flops=2 * batch * rows * scored * HEADS * WIDTH,
      sizes=dict(batch=batch, rows=rows, entries=entries, pool=pool),
      operands=lambda: {kernel: {0: full(entries), 1: full(pool)} if pool else {0: full(entries)}},
      peer=_peer("scores", entries, batch) if rows == 1 and not pool else None,
      reference=False,
  )


def _choosing(name, rows, entries, k):
  return Shape(
      kernel=name,
      per="row",
      units=rows,
      hbm_bytes=rows * (entries + k) * 4,
      sizes=dict(rows=rows, entries=entries, k=k),
      # The search in the whole row, which the vector unit asks for when a column had a ninth
      # score, stands between the loops that run; one turn of each of its loops is the least that a
      # reader of schedules can count. Loops are numbered like this where a grid step follows
      # another on every core.
      trips={f"top_{k}": dict.fromkeys(range(6, 15), 1)} if rows > 16 or entries == 1 << 20 else {},
      peer=_peer("topk", entries, rows) if k == TOP_K else None,
      reference=entries == 1 << 16,
  )


SHAPES: dict[str, Shape] = {}
for _label, _entries in _CONTEXTS.items():
  for _batch in (16, 128):
    SHAPES[f"scores_decode_{_batch}_{_label}"] = _scoring(
        "index_scores_decode", _batch, 1, _entries, "index_scores"
    )
    SHAPES[f"top_{_batch}_{_label}"] = _choosing("top_k", _batch, _entries, TOP_K)
    SHAPES[f"blocks_{_batch}_{_label}"] = _choosing("top_blocks", _batch, _entries, BLOCKS)
  SHAPES[f"scores_prefill_{_label}"] = _scoring(
      "index_scores_prefill", 1, 128, _entries, "index_scores_rows"
  )
SHAPES["scores_pool_16_1m"] = _scoring(
    "index_scores_pool", 16, 1, 1 << 20, "index_scores_pool", BLOCKS
)


def build(name: str, implementation: str = "pallas") -> tuple:
  """The program of a shape, see `pallas_kernels.aot`."""
  sizes, struct = SHAPES[name].sizes, jax.ShapeDtypeStruct
  if "k" in sizes:
    k, entries, rows = sizes["k"], sizes["entries"], sizes["rows"]
    tiles = struct((1, rows, entries // TILE, 8, LANES), jnp.float32)
    if k == TOP_K:
      return functools.partial(op.top_k, k=k, implementation=implementation), (tiles,)
    fn = functools.partial(op.top_blocks, blocks=k, implementation=implementation)
    return fn, (tiles, struct((1, rows), jnp.int32))
  b, t, c = sizes["batch"], sizes["rows"], sizes["entries"]
  keys = PackedKeys(struct((b, c // 8, LANES), jnp.int32), struct((b, c // 128, LANES), jnp.int32))
  args = [
      struct((b, t, HEADS, WIDTH), jnp.bfloat16),
      struct((b, t, HEADS), jnp.float32),
      keys,
      struct((b, t), jnp.int32),
  ]
  if sizes["pool"]:
    args.append(struct((b, t, sizes["pool"]), jnp.int32))
  return functools.partial(op.packed_scores, implementation=implementation), tuple(args)
