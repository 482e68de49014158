"""Attention: every layer's own window, the shared global entries and one joint softmax (spec 3–5).

A layer is Full, Reindex or Reuse only in how it comes by entries and selection; what it does with
them is the same. All functions speak of rows and know nothing of training, prefill or decode.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from deepseek_jax import sharding
from deepseek_jax.cache import Table, Tail
from deepseek_jax.config import ComputeConfig, ModelConfig
from deepseek_jax.nn.compressor import Compressor, Entries
from deepseek_jax.nn.indexer import Indexer, Selection
from deepseek_jax.nn.joint_attention import Reach, WindowKeys, attend, decode_kernel
from deepseek_jax.nn.layers import Linear, RMSNorm, constant
from deepseek_jax.nn.rope import Rotation, frequencies, rotate, rotation
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.selection import select
from deepseek_jax.quant import QuantPlan, fake_quant
from deepseek_jax.schedule import LayerSpec, Mode


class Context(NamedTuple):
  """What every layer of a stack knows of its rows: themselves and their rotations by ratio > 0."""

  rows: Rows
  tables: tuple[Rotation, Rotation]

  @classmethod
  def of(cls, rows: Rows, config: ModelConfig) -> "Context":
    tables = (rotation(rows.positions, frequencies(config, m)) for m in (0, 1))
    return cls(rows, tuple(table.widened(config.head_dim) for table in tables))


class Published(NamedTuple):
  """Global state that sources publish and later layers read; None before the first source.

  `pool` holds the first slots of each row's candidate blocks (−1 for absent).
  """

  entries: Entries | None = None
  selection: Selection | None = None
  pool: Int[Array, "B T P"] | None = None


@dataclasses.dataclass(frozen=True)
class Pass:
  """Static facts of one pass over the layers.

  Attributes:
    same_rows: entries come from the very rows that read them, so row t sees slots up to t // m.
    index_loss: index scores carry gradients and every layer returns its divergence from them.
    select_all: Top-K takes every visible entry (the index loss's dense warm-up).
    windows: layers return the window latents of their rows.
    routes: layers return the experts of their rows.
    trace: layers return their intermediate values.
  """

  same_rows: bool = True
  index_loss: bool = False
  select_all: bool = False
  windows: bool = False
  routes: bool = False
  trace: bool = False


class Attention(nnx.Module):
  """Projections of one layer, with the compressor and indexer that its mode calls for."""

  def __init__(
      self, stack: tuple[int, ...], config: ModelConfig, compute: ComputeConfig, spec: LayerSpec,
      plan: QuantPlan, *, rngs: nnx.Rngs, dtype,
  ):  # fmt: skip
    d, n, h = config.hidden_size, config.num_attention_heads, config.head_dim
    latent, groups, rank = config.q_lora_rank, config.o_groups, config.o_lora_rank
    make = dict(rngs=rngs, dtype=dtype)
    self.config, self.spec, self.plan = config, spec.kind, plan
    self.chunk, self.implementation = compute.row_chunk, compute.implementation
    self.attn_sink = constant((*stack, n), 0.0)
    self.wq_a = Linear(stack, d, latent, **make)
    self.q_norm = RMSNorm(stack, latent, config.rms_norm_eps, dtype=dtype)
    self.wq_b = Linear(stack, latent, n * h, **make)
    self.wkv = Linear(stack, d, h, **make)
    self.kv_norm = RMSNorm(stack, h, config.rms_norm_eps, dtype=dtype)
    self.wo_a = Linear(stack, n * h // groups, groups * rank, **make)
    self.wo_b = Linear(stack, groups * rank, d, **make)
    if spec.mode is Mode.FULL:
      self.compressor = Compressor(stack, config, spec.ratio, **make)
    if spec.selects:
      self.indexer = Indexer(stack, config, owns_keys=spec.mode is Mode.FULL, plan=plan, **make)

  def publish(
      self, x: Float[Array, "B T D"], ctx: Context, tail: Tail | None = None
  ) -> tuple[Entries, Tail | None]:
    """Main KV and index keys of all rows: keys from the latents, then rotation, then rounding.

    `tail` comes from the rows before, and the new one goes to the rows after (see `Compressor`).
    """
    m = self.spec.ratio
    latents, groups, tail = self.compressor(x, ctx.rows, tail)
    table = rotation(jnp.maximum(groups.last - m + 1, 0), frequencies(self.config, m))
    keys = self.indexer.keys(jax.lax.stop_gradient(latents), table)
    kv = fake_quant(rotate(latents, table), self.plan.main_kv, component="main_kv")
    return Entries(kv, keys, groups.last, groups.segments), tail

  def window_kv(self, x: Float[Array, "B T D"], table: Rotation) -> Float[Array, "B T H"]:
    """This layer's window latents: rotated, then rounded."""
    kv = rotate(self.kv_norm(self.wkv(x)), table)
    return fake_quant(kv, self.plan.window_kv, component="window_kv")

  def window(
      self, past: WindowKeys, own: Float[Array, "B T H"], rows: Rows, shared: Published
  ) -> WindowKeys:
    """Keys of the rows' windows: the slots before them and their own latents.

    Where a line's rows are spread over devices the latents before come from the device before.

    A ring that a kernel reads as it is stays packed and takes the only row of a line in.
    """
    if isinstance(past.kv, Table):
      n, w = self.config.num_attention_heads, past.kv.layout.rows
      if self.spec.ratio and own.shape[1] == 1:
        k = shared.selection.slots.shape[-1]
        if decode_kernel(n, k, shared.entries.kv, past.kv, self.implementation):
          slot = jnp.where(rows.segments > 0, rows.positions % w, w)
          mine = slot == jnp.arange(w)
          return WindowKeys(
              past.kv.append(slot, own),
              jnp.where(mine, rows.positions, past.positions),
              jnp.where(mine, rows.segments, past.segments),
          )
      past = past._replace(kv=past.kv.read(own.dtype))
    if sharding.axis_size(sharding.SEQ) > 1:
      past = past._replace(kv=sharding.before(own, past.positions.shape[1]))
    return WindowKeys(
        jnp.concatenate([past.kv.astype(own.dtype), own], 1),
        jnp.concatenate([past.positions, rows.positions], 1),
        jnp.concatenate([past.segments, rows.segments], 1),
    )

  def choose(
      self, x: Float[Array, "B T D"], c_q: Float[Array, "B T L"], ctx: Context, shared: Published,
      how: Pass,
  ) -> Published:  # fmt: skip
    """Publishes this layer's own Top-K, and the pool if it makes one.

    Inputs are detached: only the index loss trains an indexer, and it trains nothing else.
    """
    spec, config, entries = self.spec, self.config, shared.entries
    queries = self.indexer.queries(*jax.lax.stop_gradient((c_q, x)), ctx.tables[1])
    entries = entries._replace(kv=None)  # a selection reads index keys alone
    if not how.index_loss:
      queries, entries = jax.lax.stop_gradient((queries, entries))
    selection, starts = select(
        queries, ctx.rows, entries, m=spec.ratio, chunk=self.chunk,
        k=entries.last.shape[1] if how.select_all else config.index_topk,
        pool=shared.pool if spec.in_pool else None,
        blocks=config.candidate_topk_blocks if spec.makes_pool else 0,
        block_size=config.candidate_block_size, same_rows=how.same_rows,
        implementation=self.implementation,
    )  # fmt: skip
    selection, starts = jax.tree.map(lambda a: checkpoint_name(a, "selection"), (selection, starts))
    return shared._replace(selection=selection, pool=starts if spec.makes_pool else shared.pool)

  def query_latent(self, x: Float[Array, "B T D"]) -> Float[Array, "B T L"]:
    return self.q_norm(self.wq_a(x))

  def __call__(
      self, x: Float[Array, "B T D"], c_q: Float[Array, "B T L"], ctx: Context,
      window: WindowKeys, shared: Published, how: Pass,
  ) -> tuple[Float[Array, "B T D"], Float[Array, "B T K"] | None]:  # fmt: skip
    """Attention output of all rows, and the mass on their selected entries (see `attend`)."""
    n, h, m = self.config.num_attention_heads, self.config.head_dim, self.spec.ratio
    table = ctx.tables[m > 0]
    q = rotate(self.wq_b(c_q).reshape(*x.shape[:2], n, h), table)
    out, mass = attend(
        q, ctx.rows, window,
        shared.entries.kv if m else None, shared.selection.slots if m else None,
        self.attn_sink[...], chunk=self.chunk, implementation=self.implementation,
        reach=Reach(self.config.sliding_window, m, how.same_rows, mass=how.index_loss and m > 0),
    )  # fmt: skip
    return self.project(rotate(out, table, inverse=True)), mass

  def project(self, out: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
    """Grouped output projection: Woa on each group of heads, then Wob on all (spec 3.8)."""
    z = self.wo_a.grouped(out.reshape(*out.shape[:2], self.config.o_groups, -1))
    return self.wo_b(z.reshape(*out.shape[:2], -1))
