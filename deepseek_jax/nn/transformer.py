"""The text backbone: causal encoder, decoder that reads its KV, state shared by layers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from deepseek_jax.config import ComputeConfig, ModelConfig
from deepseek_jax.nn import hyper_connections as hc
from deepseek_jax.nn.attention import Context, Pass, Published
from deepseek_jax.nn.block import Block, LayerOut, Stream
from deepseek_jax.nn.joint_attention import WindowKeys
from deepseek_jax.nn.layers import Linear, RMSNorm, normal
from deepseek_jax.nn.rows import Rows
from deepseek_jax.quant import QuantPlan
from deepseek_jax.schedule import LayerSpec, Mode, Schedule


class Output(NamedTuple):
  """Result of a pass.

  Attributes:
    hidden: of the decoder's rows after the final norm; `Transformer.logits` turns it into logits.
    load: tokens per expert and layer (float32 counts).
    balance_loss: Σ over layers and lines of (tokens · Σ_e f_e P_e).
    index_loss: Σ over layers and rows of the index divergence; 0 unless asked for.
    trace: one dict a layer, or None.
  """

  hidden: Float[Array, "B T D"]
  load: Float[Array, "layers E"]
  balance_loss: Float[Array, ""]
  index_loss: Float[Array, ""]
  trace: list[dict[str, Any]] | None


class Embedding(nnx.Module):
  """Token embeddings [V, D]."""

  def __init__(self, vocab: int, width: int, *, std: float, rngs: nnx.Rngs, dtype):
    self.weight = normal(rngs, (vocab, width), std, dtype)

  def __call__(self, tokens: Int[Array, "B T"], dtype) -> Float[Array, "B T D"]:
    return self.weight[...].at[tokens].get(mode="clip").astype(dtype)


class Transformer(nnx.Module):
  """DeepSeek-V4.1-Flash's text backbone (report 2).

  Its parameters are its only variables; a call changes nothing. Runs of equal layers are stacked
  in `runs`, in the order of `schedule.runs`.

  Args:
    config: sizes and schedule.
    compute: precision, quantisation, remat, chunks.
    rngs: `nnx.Rngs` for the initial weights.
  """

  def __init__(self, config: ModelConfig, compute: ComputeConfig | None = None, *, rngs: nnx.Rngs):
    compute = compute or ComputeConfig()
    self.config, self.compute = config, compute
    self.schedule = Schedule.from_config(config)
    dtype = jnp.dtype(compute.param_dtype)
    released = QuantPlan.released()
    plan = QuantPlan(**{
        part: getattr(released, part) if part in compute.quantize else None
        for part in ("main_kv", "index", "window_kv")
    })  # fmt: skip
    d = config.hidden_size
    self.embed = Embedding(config.vocab_size, d, std=1.0, rngs=rngs, dtype=dtype)
    self.runs = nnx.List(
        [
            Block(
                (len(run),), config, run[0], plan, chunk=compute.row_chunk, rngs=rngs, dtype=dtype
            )
            for run in self.schedule.runs
        ]
    )
    self.norm = RMSNorm((), d, config.rms_norm_eps, dtype=dtype)
    self.head = Linear((), d, config.vocab_size, rngs=rngs, dtype=dtype)

  def __call__(
      self, tokens: Int[Array, "B T"], rows: Rows, ngrams: Int[Array, "B T n"] | None = None, *,
      index_loss: bool = False, select_all: bool = False, trace: bool = False,
  ) -> Output:  # fmt: skip
    """All layers over all rows.

    Args:
      tokens: ids; padding rows may hold any id.
      rows: positions, floors, segments and writes of the rows.
      ngrams: token classes at i, i − 1, … for Engram; required when the schedule has Engram layers.
      index_loss: return the index divergence, with gradients to the indexers alone.
      select_all: let Top-K take every visible entry (the index loss's warm-up).
      trace: return every layer's intermediate values.

    Raises:
      ValueError: an Engram layer without `ngrams`.
    """
    if self.config.engram_layer_ids and ngrams is None:
      raise ValueError(f"ngrams is None; layers {self.config.engram_layer_ids} are Engram layers")
    how = Pass(index_loss=index_loss, select_all=select_all, trace=trace)
    ctx = Context.of(rows, self.config)
    stream = self.start(tokens)
    shared, outs = Published(), []
    for block, run in zip(self.runs, self.schedule.runs):
      if run[0].engram is not None:
        stream = _layer(block, 0).remember(stream, ngrams)
      if run[0].mode is Mode.FULL:
        shared = Published(entries=_layer(block, 0).publish(stream, ctx))
      stream, shared, out = self._run(block, run, stream, ctx, shared, how)
      outs.extend(out)
    h = self.norm(hc.collapse(stream.x, stream.pre))
    return Output(
        h,
        jnp.stack([o.balance.load for o in outs]),
        sum(o.balance.loss for o in outs),
        sum(o.index_loss for o in outs) if index_loss else jnp.zeros(()),
        [o.trace for o in outs] if trace else None,
    )

  def start(self, tokens: Int[Array, "B T"]) -> Stream:
    """The embedding in every stream; the first collapse reads stream 0 alone."""
    m = self.config.hc_mult
    x = self.embed(tokens, jnp.dtype(self.compute.dtype))
    pre = jnp.zeros((*tokens.shape, m), jnp.float32).at[..., 0].set(1.0)
    return Stream(jnp.broadcast_to(x[:, :, None], (*x.shape[:2], m, x.shape[-1])), pre)

  def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Logits in f32 with the head in f32 (spec 9)."""
    return self.head(hidden.astype(jnp.float32))

  def _past(self, rows: Rows, dtype) -> WindowKeys:
    """No window keys before the rows."""
    batch, front = rows.positions.shape[0], self.config.sliding_window - 1
    nothing = jnp.zeros((batch, front), jnp.int32)
    return WindowKeys(jnp.zeros((batch, front, self.config.head_dim), dtype), nothing, nothing)

  def _run(
      self, block: Block, run: tuple[LayerSpec, ...], stream: Stream, ctx: Context,
      shared: Published, how: Pass,
  ) -> tuple[Stream, Published, list[LayerOut]]:  # fmt: skip
    """A run of equal layers: scanned, or one after another."""
    past = self._past(ctx.rows, stream.x.dtype)

    def layer(one, stream, shared):
      return one(stream, ctx, past, shared, how)

    if self.compute.remat != "none":
      policy = {
          "layer": jax.checkpoint_policies.nothing_saveable,
          "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
      }[self.compute.remat]
      layer = jax.checkpoint(layer, policy=policy)
    if len(run) > 1 and self.compute.scan_layers:

      def body(stream, one):
        stream, _, out = layer(one, stream, shared)
        return stream, out

      stream, stacked = jax.lax.scan(body, stream, block)
      return stream, shared, [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(len(run))]
    outs = []
    for i in range(len(run)):
      stream, shared, out = layer(_layer(block, i), stream, shared)
      outs.append(out)
    return stream, shared, outs


def _layer(block: Block, i: int) -> Block:
  """Layer i of a stacked run."""
  return jax.tree.map(lambda a: a[i], block)
