"""A layer on one row a request by kernels that read its weights inside the stack of its run.

The same function as `Block.__call__` on packed caches. There every weight of a scanned layer that a
kernel takes is sliced first: at the released sizes 27 GB of experts copied in each layer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deepseek_jax.cache import Table
from deepseek_jax.nn.attention import Context, Pass, Published
from deepseek_jax.nn.block import Block, LayerOut
from deepseek_jax.nn.hyper_connections import Site, Stream
from deepseek_jax.nn.joint_attention import WindowKeys, decode_kernel, window_mask
from deepseek_jax.nn.layers import plain
from pallas_kernels import dispatch
from pallas_kernels.decode_layer import op as layer_op
from pallas_kernels.decode_layer.lanes import rotation
from pallas_kernels.quantize import op as quantize_op
from pallas_kernels.quantize.stored import LANES, WINDOW
from pallas_kernels.sparse_attention import op as sparse_op


class Vectors(NamedTuple):
  """Small weights of a run in the shape of their blocks, made once for all of its layers."""

  attn_norm: Float[Array, "n 1 D"]
  q_norm: Float[Array, "n 1 L"]
  kv_norm: Float[Array, "n 1 H"]
  sink: Float[Array, "n 1 N"]
  ffn_norm: Float[Array, "n 1 D"]
  bias: Float[Array, "n E 1"]

  @classmethod
  def of(cls, block: Block) -> "Vectors":
    a = block.attn
    rows = block.attn_norm, a.q_norm, a.kv_norm, block.ffn_norm
    *rows, ffn_norm = (norm.weight[...][:, None] for norm in rows)
    return cls(*rows, a.attn_sink[...][:, None], ffn_norm, block.ffn.gate.bias[...][..., None])


class Prepared(NamedTuple):
  """What all layers of a run have in common.

  Attributes:
    vectors: of the run.
    live: not 0 where a line has a row.
    turn: rotation of the rows.
    back: its inverse.
    slots: of the rows in their rings, behind them where a line has none.
    seen: slots of the ring that are keys of the row, its own among them.
  """

  vectors: Vectors
  live: Int[Array, " B"]
  turn: layer_op.Turn
  back: layer_op.Turn
  slots: Int[Array, " B"]
  seen: Int[Array, "B W"]

  @classmethod
  def of(cls, block: Block, ctx: Context, past: WindowKeys) -> "Prepared":
    rows, w = ctx.rows, past.positions.shape[1]
    live = rows.segments > 0
    slot = jnp.where(live, rows.positions % w, w)
    own = slot == jnp.arange(w)[None]
    seen = window_mask(
        rows,
        jnp.where(own, rows.positions, past.positions),
        jnp.where(own, rows.segments, past.segments),
        block.config.sliding_window,
    )
    table = ctx.tables[1]
    cos, sin = table.cos[:, 0], table.sin[:, 0]
    return cls(
        Vectors.of(block),
        live[:, 0].astype(jnp.int32),
        layer_op.Turn(*rotation(cos, sin)),
        layer_op.Turn(*rotation(cos, sin, inverse=True)),
        slot[:, 0],
        # A barrier: XLA would compute it again in every layer.
        jax.lax.optimization_barrier(seen[:, 0].astype(jnp.int32)),
    )


class Chosen(NamedTuple):
  """Entries of all lines in one table [R, 128], and slots in it."""

  entries: Int[Array, "R 128"]
  slots: Int[Array, "B K"]

  @classmethod
  def of(cls, shared: Published) -> "Chosen":
    table, slots = shared.entries.kv, shared.selection.slots[:, 0]
    first = table.layout.rows * jnp.arange(slots.shape[0], dtype=jnp.int32)
    slots = jnp.where(slots < 0, -1, slots + first[:, None])
    return cls(table.data.reshape(-1, LANES), slots)


def takes(block: Block, stream: Stream, past: WindowKeys, shared: Published, how: Pass) -> bool:
  """Whether a layer of a run goes this way. On several devices weights are not all on each."""
  c, ring = block.config, past.kv
  if (
      stream.x.shape[1] != 1
      or not block.spec.ratio
      or not isinstance(ring, Table)
      or how.trace
      or how.routes
  ):
    return False
  if ring.layout.format != WINDOW.format or how.index_loss:
    return False
  if any(m.weight.dtype != stream.x.dtype for m in (block.attn_norm, block.attn.wq_a)):
    return False
  if not plain(block):
    return False
  mesh = jax.sharding.get_abstract_mesh()
  heads, implementation = c.num_attention_heads, block.attn.implementation
  if not mesh.empty and mesh.size > 1:
    return False
  if not decode_kernel(heads, c.index_topk, shared.entries.kv, ring, implementation):
    return False
  refusal = layer_op.refusal(
      stream.x.shape[0], stream.x.dtype, c.hidden_size, c.head_dim, c.q_lora_rank, c.o_lora_rank,
      heads * c.head_dim // c.o_groups, c.moe_intermediate_size,
      experts=c.n_routed_experts, active=c.num_experts_per_tok,
  )  # fmt: skip
  asked = None if refusal else implementation
  return dispatch.resolve(asked, layer_op.AVAILABLE, refusal) == "pallas"


def layer(
    block: Block, one: Block, number: Int[Array, ""], s: Stream, following: Site, ctx: Context,
    rings: Table, shared: Published, prepared: Prepared, chosen: Chosen | None, how: Pass,
) -> tuple[Stream, Published, LayerOut]:  # fmt: skip
  """`Block.__call__` of layer `number` of a run. The window comes back before it is rounded.

  Args:
    block: of the run, stacked.
    one: the layer's slice of it, for what no kernel takes.
    number: of the layer in it.
    s: stream after Engram.
    following: the attention site of the layer that comes next.
    ctx: of the rows.
    rings: of all layers of the run.
    shared: entries to read; this layer adds the selection it makes.
    prepared: of the run and the rows.
    chosen: of `shared`, unless the layer selects.
    how: static facts of the pass.
  """
  a, v, run = block.attn, prepared.vectors, dict(implementation="pallas")
  weight, eps = (lambda module: module.weight[...]), block.config.rms_norm_eps
  with jax.named_scope("attention"):
    own = layer_op.project(
        s.u[:, 0], number, v.attn_norm, weight(a.wq_a), v.q_norm, weight(a.wkv), v.kv_norm,
        weight(a.wq_b), v.sink, prepared.turn, eps=eps, unit=WINDOW.unit, **run,
    )  # fmt: skip
  if block.spec.selects:
    with jax.named_scope("select"):
      shared = one.attn.choose(one.attn_norm(s.u), own.c_q[:, None], ctx, shared, how)
      chosen = Chosen.of(shared)
  with jax.named_scope("attention"):
    packed = quantize_op.pack(own.kv, WINDOW, **run)
    ring = layer_op.ring(prepared.slots, number, *packed, rings.data, rings.scales, **run)
    out = sparse_op.sparse_attention_decode(own.q, *chosen, *ring, prepared.seen, own.sink, **run)
    y = layer_op.outputs(out, number, weight(a.wo_a), weight(a.wo_b), prepared.back, **run)
  with jax.named_scope("hyper_connections"):
    middle = block.hc.update(s, y[:, None], one.site("ffn"))
  with jax.named_scope("moe"):
    f = block.ffn
    banks = (layer_op.Bank(*map(weight, (m.w1, m.w2, m.w3))) for m in (f.experts, f.shared_experts))
    y = layer_op.mixture(
        middle.u[:, 0], prepared.live, number, v.ffn_norm, weight(f.gate), v.bias, *banks,
        active=f.gate.active, scale=f.gate.scale, limit=f.limit, eps=eps, **run,
    )  # fmt: skip
  with jax.named_scope("hyper_connections"):
    out = block.hc.update(middle, y[:, None], following)
  latents = own.kv[: y.shape[0], None]
  return out, shared, LayerOut(None, None, latents, None, None)
