"""The text backbone: causal encoder, decoder that reads its KV, state shared by layers."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from deepseek_jax import sharding
from deepseek_jax.cache import Cache, Table, ring_positions
from deepseek_jax.config import ComputeConfig, ModelConfig
from deepseek_jax.nn import one_row
from deepseek_jax.nn.attention import Context, Pass, Published
from deepseek_jax.nn.block import Block, LayerOut
from deepseek_jax.nn.compressor import Entries
from deepseek_jax.nn.hyper_connections import Site, Stream
from deepseek_jax.nn.joint_attention import WindowKeys, row_kernels
from deepseek_jax.nn.layers import KEPT, Linear, RMSNorm, normal, remade
from deepseek_jax.nn.rows import DecoderRows, Rows
from deepseek_jax.quant import QuantPlan
from deepseek_jax.schedule import Mode, Schedule

_PLAIN = Pass()


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


class Encoded(NamedTuple):
  """What the encoder leaves of its rows.

  Attributes:
    stream: as it enters the decoder's first layer.
    entries: of the decoder's KV source: of these rows, or all that the cache holds.
    cache: with the rows added, or None.
    outs: of the layers.
  """

  stream: Stream
  entries: Entries
  cache: Cache | None
  outs: tuple[LayerOut, ...]


class Routes(NamedTuple):
  """Experts of the rows of every layer of each stack, as a pass returned them: routing replay.

  −1 stands where the router is to choose.
  """

  encoder: Int[Array, "E B T X"]
  decoder: Int[Array, "D B T2 X"]


class Decoded(NamedTuple):
  """What the decoder makes of its rows: `hidden` after the final norm, cache, reports of layers."""

  hidden: Float[Array, "B T D"]
  cache: Cache | None
  outs: tuple[LayerOut, ...]


class _State(NamedTuple):
  stream: Stream
  shared: Published
  cache: Cache | None
  outs: tuple[LayerOut, ...]


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
            Block((len(run),), config, compute, run[0], plan, rngs=rngs, dtype=dtype)
            for run in self.schedule.runs
        ]
    )
    self.norm = RMSNorm((), d, config.rms_norm_eps, dtype=dtype)
    self.head = Linear((), d, config.vocab_size, rngs=rngs, dtype=dtype)

  def __call__(
      self, tokens: Int[Array, "B T"], rows: Rows, ngrams: Int[Array, "B T n"] | None = None,
      decoder: DecoderRows | None = None, routes: Routes | None = None, *,
      index_loss: bool = False, select_all: bool = False, trace: bool = False,
  ) -> Output:  # fmt: skip
    """The encoder over all rows, the decoder over the same or over some of them.

    Args:
      tokens: ids; padding rows may hold any id.
      rows: positions, floors, segments and writes of the rows.
      ngrams: token classes at i, i − 1, … for Engram; required when the schedule has Engram layers.
      decoder: rows that the decoder runs, as in a simulated replay; None for all.
      routes: experts that rows visit, whatever the router would choose now.
      index_loss: return the index divergence, with gradients to the indexers alone.
      select_all: let Top-K take every visible entry (the index loss's warm-up).
      trace: return every layer's intermediate values.

    Raises:
      ValueError: an Engram layer without `ngrams`.
    """
    how = Pass(index_loss=index_loss, select_all=select_all, trace=trace)
    above, below = routes or (None, None)
    encoded = self.encode(tokens, rows, ngrams, how=how, routes=above)
    stream = encoded.stream
    if decoder is not None:
      picked = lambda a: jnp.take_along_axis(
          sharding.all_rows(a), decoder.source[..., None], axis=1, mode="clip"
      )
      (stream, ngrams), rows = jax.tree.map(picked, (stream, ngrams)), decoder.rows
      how = dataclasses.replace(how, same_rows=False)
    out = self.decode(stream, rows, encoded.entries, ngrams, how=how, routes=below)
    outs = encoded.outs + out.outs
    return Output(
        out.hidden,
        jnp.stack([o.balance.load for o in outs]),
        sum(o.balance.loss for o in outs),
        sum(o.index_loss for o in outs) if index_loss else jnp.zeros(()),
        [o.trace for o in outs] if trace else None,
    )

  def encode(
      self, tokens: Int[Array, "B T"], rows: Rows, ngrams: Int[Array, "B T n"] | None = None,
      cache: Cache | None = None, *, how: Pass = _PLAIN,
      routes: Int[Array, "layers B T X"] | None = None,
  ) -> Encoded:  # fmt: skip
    """The encoder over rows, and the decoder's global entries of them (spec 6).

    Args:
      tokens: as in a call.
      rows: as in a call.
      ngrams: as in a call.
      cache: what earlier rows left, one document a line; new entries and window latents are added
        to it, live rows come first in a line. None: the rows are all there is.
      how: static facts of the pass.
      routes: see `Routes`.

    Raises:
      ValueError: an Engram layer without `ngrams`.
    """
    if self.config.engram_layer_ids and ngrams is None:
      raise ValueError(f"ngrams is None; layers {self.config.engram_layer_ids} are Engram layers")
    ctx = Context.of(rows, self.config)
    state = self._layers(
        "encoder", self.start(tokens), ctx, Published(), ngrams, cache, how, routes
    )
    first, stream = self._first_decoder_run, state.stream
    if self.runs[first].spec.engram is not None:
      stream = self._first_layer(first).remember(stream, ngrams)
    entries, cache = self._publish(first, stream, ctx, state.cache)
    return Encoded(stream, entries, cache, state.outs)

  def decode(
      self, stream: Stream, rows: Rows, entries: Entries, ngrams: Int[Array, "B T n"] | None = None,
      cache: Cache | None = None, *, how: Pass = _PLAIN,
      routes: Int[Array, "layers B T X"] | None = None,
  ) -> Decoded:  # fmt: skip
    """The decoder over rows that the encoder has read: all of them, or a prompt's last W.

    Args:
      stream: `Encoded.stream` of these rows.
      rows: their decoder view; floors may differ from the encoder's.
      entries: of the decoder's KV source.
      ngrams: of these rows; for Engram layers after the decoder's first layer.
      cache: window rings of earlier decoder rows, or None.
      how: static facts of the pass. `same_rows` only if the entries come from these very rows.
      routes: see `Routes`.
    """
    ctx = Context.of(rows, self.config)
    state = self._layers("decoder", stream, ctx, Published(entries), ngrams, cache, how, routes)
    return Decoded(self.norm(state.stream.u), state.cache, state.outs)

  def start(self, tokens: Int[Array, "B T"]) -> Stream:
    """The embedding in every stream; the first collapse reads stream 0 alone."""
    m, first = self.config.hc_mult, self._first_layer(0)
    x = self.embed(tokens, jnp.dtype(self.compute.dtype))
    pre = jnp.zeros((*tokens.shape, m), jnp.float32).at[..., 0].set(1.0)
    return first.hc.enter(jnp.tile(x, (1, 1, m)), pre, first.site("attn"))

  def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Logits in f32 with the head in f32 (spec 9)."""
    return self.head(hidden.astype(jnp.float32))

  def with_whole_ends(self) -> "Transformer":
    """On a mesh: the model with all of its embedding and head; layers are gathered one by one."""
    return sharding.whole(self, lambda path: path[0] != "runs", dense=self.compute.spread_dense)

  def _whole(self, layer: Any) -> Any:
    """A layer, or parameters of one, as it computes."""
    return sharding.whole(layer, dense=self.compute.spread_dense)

  def _first_layer(self, run: int) -> Block:
    return self._whole(_layer(self.runs[run], 0))

  @property
  def _first_decoder_run(self) -> int:
    starts = [run[0].layer for run in self.schedule.runs]
    return starts.index(self.schedule.decoder_start)

  def _layers(
      self, stack: str, stream: Stream, ctx: Context, shared: Published,
      ngrams: Int[Array, "B T n"] | None, cache: Cache | None, how: Pass,
      routes: Int[Array, "layers B T X"] | None,
  ) -> _State:  # fmt: skip
    """One stack; the decoder's source layer comes with its Engram applied and entries published."""
    spread = sharding.axis_size(sharding.SEQ) > 1
    if spread and cache is not None:
      raise ValueError("mesh.seq must be 1 with a cache: its rows are whole lines")
    how = dataclasses.replace(
        how,
        windows=cache is not None,
        same_rows=how.same_rows and cache is None and not spread,
    )
    outs, first = [], self._first_decoder_run
    numbers = range(first) if stack == "encoder" else range(first, len(self.runs))
    before = self.schedule.runs[numbers[0]][0].layer if numbers else 0
    ring = None
    if cache is not None:
      ring: Table = getattr(cache, f"{stack}_window")
      following = ctx.rows.positions[:, 0]
      positions = ring_positions(following, ring.layout.rows)
      places = jnp.maximum(positions, 0), (positions >= 0).astype(jnp.int32)
    for number in numbers:
      block, run = self.runs[number], self.schedule.runs[number]
      if number != first:
        if block.spec.engram is not None:
          stream = self._first_layer(number).remember(stream, ngrams)
        if block.spec.mode is Mode.FULL:
          entries, cache = self._publish(number, stream, ctx, cache)
          shared = Published(entries)
      layers = slice(run[0].layer - before, run[-1].layer - before + 1)
      if ring is None:
        past = self._nothing_past(ctx.rows, stream.x.dtype)
      else:
        past = WindowKeys(jax.tree.map(lambda a, at=layers: a[at], ring), *places)
      chosen = None if routes is None else routes[layers]
      stream, shared, out = self._run(number, stream, ctx, past, shared, how, chosen)
      outs.extend(out)
    if cache is not None:
      latents = jnp.stack([o.window for o in outs])
      cache = cache.write_window(stack, latents, ctx.rows.positions, ctx.rows.segments > 0)
    return _State(stream, shared, cache, tuple(outs))

  def _publish(
      self, run: int, stream: Stream, ctx: Context, cache: Cache | None
  ) -> tuple[Entries, Cache | None]:
    """What the layers after a KV source read: its new entries, or all that its tables hold."""
    block, spec = self._first_layer(run), self.schedule.runs[run][0]
    if cache is None:
      return sharding.all_rows(block.publish(stream, ctx)[0]), None
    m, source = spec.ratio, self.schedule.kv_sources.index(spec)
    new, tail = block.publish(stream, ctx, cache.tails[source])
    rows = cache.main_kv[source].layout.rows
    slots = jnp.where(new.segments > 0, new.last // m, rows)
    cache = cache.write_entries(source, new.kv, new.index_keys, slots, tail)
    entries = stored_entries(cache, source, m)
    c, dtype = self.config, stream.x.dtype
    if stream.x.shape[1] > 1 and row_kernels(
        c.num_attention_heads, c.head_dim, dtype, self.compute.implementation
    ):
      # Decoded once for all layers that read them; a single row's kernel decodes what it selects.
      entries = entries._replace(kv=entries.kv.read(dtype))
    return entries, cache

  def _nothing_past(self, rows: Rows, dtype) -> WindowKeys:
    """No window keys before the rows, or the places of those that another device has."""
    batch, front = rows.positions.shape[0], self.config.sliding_window - 1
    places = sharding.before((rows.positions, rows.segments), front)
    return WindowKeys(jnp.zeros((batch, front, self.config.head_dim), dtype), *places)

  def _following(self, number: int) -> Site:
    """Attention sites of the layers that follow those of a run; the last layer's is its own."""
    own = self.runs[number].site("attn")
    after = own if number + 1 == len(self.runs) else self.runs[number + 1].site("attn")
    last = -1 if after is own else 0
    return jax.tree.map(lambda a, b: jnp.concatenate([a[1:], b[last, None]]), own, after)

  def _run(
      self, number: int, stream: Stream, ctx: Context, past: WindowKeys, shared: Published,
      how: Pass, routes: Int[Array, "n B T X"] | None,
  ) -> tuple[Stream, Published, list[LayerOut]]:  # fmt: skip
    """A run of equal layers: scanned, or one after another. A table of rings leads with layers."""
    block, run = self.runs[number], self.schedule.runs[number]
    rings = past.kv if isinstance(past.kv, Table) else None
    layers = block, self._following(number), rings, routes

    # Without a cache there may be a gradient, which the kernels that read in place do not have.
    bank = block.bank(stream) if how.windows and not (how.trace or how.routes) else None

    def layer(one, following, ring, routes, number, stream, shared):
      one, following = self._whole(one), self._whole(following)
      own = past if ring is None else past._replace(kv=ring)
      at = None if bank is None else bank._replace(layer=number)
      return one(stream, following, ctx, own, shared, how, at, routes)

    if one_row.takes(block, stream, past, shared, how):
      prepared = one_row.Prepared.of(block, ctx, past)
      chosen = None if block.spec.selects else one_row.Chosen.of(shared)

      def layer(one, following, ring, routes, number, stream, shared):
        return one_row.layer(
            block, one, number, stream, following, ctx, rings, shared, prepared, chosen, how
        )

    elif (remat := _remat(block, self.compute)) != "none":
      policy = {
          "layer": jax.checkpoint_policies.save_only_these_names(*KEPT),
          "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
      }[remat]
      layer = jax.checkpoint(layer, policy=policy)
    if len(run) > 1 and self.compute.scan_layers:

      def body(stream, x):
        stream, _, out = layer(*x, stream, shared)
        return stream, out

      stream, stacked = jax.lax.scan(body, stream, (*layers, jnp.arange(len(run))))
      return stream, shared, [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(len(run))]
    outs = []
    for i in range(len(run)):
      stream, shared, out = layer(*_layer(layers, i), jnp.int32(i), stream, shared)
      outs.append(out)
    return stream, shared, outs


def stored_entries(cache: Cache, source: int, m: int) -> Entries:
  """All slots of KV source number `source`. Only a row's position says which of them it may see."""
  keys = cache.index_keys[source]
  last = jnp.broadcast_to(jnp.arange(keys.layout.rows) * m + m - 1, keys.shape[:2])
  return Entries(cache.main_kv[source], keys, last, jnp.ones_like(last))


def _remat(block: Block, compute: ComputeConfig) -> str:
  """Weights that a pass makes are never kept for the backward one, where they are made again."""
  return "dots" if compute.remat == "none" and remade(block) else compute.remat


def _layer(tree: Any, i: int) -> Any:
  """Layer i of a stacked run."""
  return jax.tree.map(lambda a: a[i], tree)
