"""One layer: optional Engram, attention and MoE, joined by hyper-connections (spec 9)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from deepseek_jax.cache import Tail
from deepseek_jax.config import ComputeConfig, ModelConfig
from deepseek_jax.nn.attention import Attention, Context, Pass, Published
from deepseek_jax.nn.compressor import Entries, visible
from deepseek_jax.nn.engram import Engram
from deepseek_jax.nn.hyper_connections import HyperConnections, Site, Stream
from deepseek_jax.nn.indexer import Straddle, block_starts, index_scores, pool_mask
from deepseek_jax.nn.joint_attention import WindowKeys
from deepseek_jax.nn.layers import RMSNorm, constant, normal
from deepseek_jax.nn.moe import Balance, Bank, MoE
from deepseek_jax.quant import QuantPlan
from deepseek_jax.schedule import LayerSpec, Mode


class LayerOut(NamedTuple):
  """What a layer reports besides its stream.

  Attributes:
    balance: of its router, or None where kernels serve that read weights in place.
    index_loss: Σ over rows of KL(attention mass ‖ index softmax) on the selected entries, or None.
    window: window latents of the rows as later rows will read them, or None.
    routes: experts that the rows visit, or None.
    trace: dict of intermediate values, or None.
  """

  balance: Balance | None
  index_loss: Float[Array, ""] | None
  window: Float[Array, "B T H"] | None
  routes: Int[Array, "B T X"] | None
  trace: dict[str, Any] | None


def index_divergence(
    mass: Float[Array, "B T K"], scores: Float[Array, "B T K"]
) -> Float[Array, ""]:
  """Σ over rows of KL(p ‖ softmax(scores)) over each row's selected entries (spec 14).

  p is the head-summed joint-softmax mass of the entries, renormalised and detached. Rows without
  entries add nothing.
  """
  mass = jax.lax.stop_gradient(mass)
  total = mass.sum(-1, keepdims=True)
  p = mass / jnp.where(total > 0, total, 1.0)
  present = scores > -jnp.inf
  log_q = jax.nn.log_softmax(jnp.where(present, scores, -1e30), axis=-1)
  log_p = jnp.log(jnp.where(p > 0, p, 1.0))
  return jnp.sum(jnp.where(present, p * (log_p - log_q), 0.0))


class Block(nnx.Module):
  """A run of equal layers, parameters stacked on a leading axis; called on one layer's slice."""

  def __init__(
      self, stack: tuple[int, ...], config: ModelConfig, compute: ComputeConfig, spec: LayerSpec,
      plan: QuantPlan, *, rngs: nnx.Rngs, dtype,
  ):  # fmt: skip
    m, d = config.hc_mult, config.hidden_size
    self.config, self.spec = config, spec.kind
    self.hc = HyperConnections(
        m, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps,
        compute.implementation,
    )  # fmt: skip
    if spec.engram is not None:
      self.engram = Engram(stack, config, spec.engram, rngs=rngs, dtype=dtype)
    self.attn_norm = RMSNorm(stack, d, config.rms_norm_eps, dtype=dtype)
    self.attn = Attention(stack, config, compute, spec, plan, rngs=rngs, dtype=dtype)
    self.ffn_norm = RMSNorm(stack, d, config.rms_norm_eps, dtype=dtype)
    self.ffn = MoE(stack, config, compute.implementation, rngs=rngs, dtype=dtype)
    z = (2 + m) * m
    # Unpublished initialisation; this one starts every site near equal mixing (N(0, 0.02²), a = 1).
    self.hc_attn_fn = normal(rngs, (*stack, z, m * d), 0.02, jnp.float32)
    self.hc_attn_base = constant((*stack, z), 0.0)
    self.hc_attn_scale = constant((*stack, 3), 1.0)
    self.hc_ffn_fn = normal(rngs, (*stack, z, m * d), 0.02, jnp.float32)
    self.hc_ffn_base = constant((*stack, z), 0.0)
    self.hc_ffn_scale = constant((*stack, 3), 1.0)

  def site(self, name: str) -> Site:
    """Parameters of "attn" or "ffn"."""
    return Site(*(getattr(self, f"hc_{name}_{part}")[...] for part in Site._fields))

  def bank(self, s: Stream) -> Bank | None:
    """Of a stacked run: what its mixtures read in place, if kernels take them."""
    return self.ffn.bank(self.ffn_norm.weight[...], s.u)

  def remember(self, s: Stream, ngrams: Int[Array, "B T n"]) -> Stream:
    """The stream after this layer's Engram; comes before `publish` and the call."""
    with jax.named_scope("engram"):
      x = s.x.reshape(*s.x.shape[:2], self.config.hc_mult, -1)
      x = self.engram(x, ngrams).reshape(s.x.shape)
      return self.hc.enter(x, s.pre, self.site("attn"))

  def publish(
      self, s: Stream, ctx: Context, tail: Tail | None = None
  ) -> tuple[Entries, Tail | None]:
    """Main KV and index keys of all rows, from the stream that enters this Full layer.

    For the decoder's source this is the encoder's output: it needs no decoder row (spec 6).
    """
    with jax.named_scope("publish"):
      return self.attn.publish(self.attn_norm(s.u), ctx, tail)

  def __call__(
      self, s: Stream, following: Site, ctx: Context, past: WindowKeys, shared: Published,
      how: Pass, bank: Bank | None = None, routes: Int[Array, "B T X"] | None = None,
  ) -> tuple[Stream, Published, LayerOut]:  # fmt: skip
    """The layer on its rows.

    Args:
      s: stream after Engram.
      following: the attention site of the layer that comes next; the last layer may get any.
      ctx: of the rows.
      past: window keys of slots before the rows, at least W − 1 (segment 0 where there are none).
      shared: entries to read; this layer adds the selection it makes.
      how: static facts of the pass.
      bank: weights of the run, if the mixture reads them inside its stack.
      routes: experts chosen before, −1 where the router is to choose.
    """
    x = self.attn_norm(s.u)
    c_q = self.attn.query_latent(x)
    if self.spec.selects:
      with jax.named_scope("select"):
        shared = self.attn.choose(x, c_q, ctx, shared, how)
    with jax.named_scope("attention"):
      own = self.attn.window_kv(x, ctx.tables[self.spec.ratio > 0])
      window = self.attn.window(past, own, ctx.rows, shared)
      y, mass = self.attn(x, c_q, ctx, window, shared, how)
    with jax.named_scope("hyper_connections"):
      middle = self.hc.update(s, y, self.site("ffn"))
    with jax.named_scope("moe"):
      valid, balance = ctx.rows.segments > 0, None
      if bank is None:
        y, balance, routes = self.ffn(self.ffn_norm(middle.u), valid, routes)
      else:
        y = self.ffn.in_place(middle.u, valid, bank, self.config.rms_norm_eps)
    with jax.named_scope("hyper_connections"):
      out = self.hc.update(middle, y, following)
    loss = None
    if how.index_loss:
      loss = index_divergence(mass, shared.selection.scores) if self.spec.ratio else jnp.zeros(())
    trace = self._trace(out, x, c_q, ctx, own, shared) if how.trace else None
    return (
        out,
        shared,
        LayerOut(
            balance, loss, own if how.windows else None, routes if how.routes else None, trace
        ),
    )

  def _trace(self, out, x, c_q, ctx, own, shared) -> dict[str, Any]:
    """Intermediate values under the names of the golden captures; index scores masked as there."""
    x_out = out.x.reshape(*x.shape[:2], self.config.hc_mult, -1)
    trace = dict(x_out=x_out, pre_out=out.pre, window_kv=own)
    if self.spec.mode is Mode.FULL:
      trace.update(entries=shared.entries)
    if self.spec.ratio:
      trace.update(topk=shared.selection.slots)
    if self.spec.selects:
      e, c = shared.entries, self.config
      seen = visible(ctx.rows, e.last, e.segments)
      if shared.pool is not None and (self.spec.makes_pool or self.spec.in_pool):
        m, size = self.spec.ratio, c.candidate_block_size
        straddle = Straddle.of(ctx.rows.reads, e.last, e.segments, m=m, size=size)
        inside = pool_mask(shared.pool, block_starts(e.last, m, size), straddle)
        trace.update(candidates=inside)
        seen = seen & inside if self.spec.in_pool else seen
      scores = index_scores(self.attn.indexer.queries(c_q, x, ctx.tables[1]), e.index_keys)
      trace.update(index_scores=jnp.where(seen, scores, -jnp.inf))
    return trace
