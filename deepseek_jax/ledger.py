"""The bill of a model: parameters, cache bytes and FLOPs, by part (spec 1.2, 8.2, 15).

Parameters and linear FLOPs come from the shapes that the model allocates (of an Engram table only
the rows that are read count), cache bytes from the storage formats, attention and index FLOPs from
one `Layer` record a layer. Baselines are tuples of the same records.

A multiply-add is two FLOPs, here and in the "G-equivalents" of spec 15. Counted are the products
that a row needs: linears with active experts only, logits and values of the keys that it may see,
index scores of the entries that it may select from. Rows that pad a bucket and keys that a mask
throws away are not. Left out are norms, softmax, rotations, Top-K, Engram's gates and the mixing of
streams, which are no matrix products: some 0.1 % of a decoded token of the released model.
"""

import collections
import dataclasses
import functools
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from deepseek_jax.config import ModelConfig
from deepseek_jax.fields import require
from deepseek_jax.schedule import LayerSpec, Mode, Schedule
from pallas_kernels.quantize import formats

# Weight of each part's FLOPs. The head sum Σ_h w_h ReLU(…) of the index scores is vector work that
# the report's figures leave out.
WEIGHTINGS: Mapping[str, Mapping[str, float]] = types.MappingProxyType({
    "none": dict(
        experts=1, fp8_linear=1, bf16_linear=1, attention=1, index=1, index_head_sum=1
    ),
    # Experts as W4A8 products: FP8 activations. Gives 21.5 G → 27.0 G from 4K to 1M tokens.
    "report": dict(
        experts=0.5, fp8_linear=0.5, bf16_linear=1, attention=1, index=0.25, index_head_sum=0
    ),
    # Experts at what their weights are stored in.
    "storage": dict(
        experts=0.25, fp8_linear=0.5, bf16_linear=1, attention=1, index=0.25, index_head_sum=0
    ),
})  # fmt: skip

# Beginning of a parameter's name in its layer → part of the model, FLOP part of its product.
# Released precisions (spec 13): Woa is multiplied in bf16 after it was decoded.
_PARTS = (
    ("attn.compressor.", "compressor", "bf16_linear"),
    ("attn.indexer.wq_b.", "indexer", "fp8_linear"),
    ("attn.indexer.", "indexer", "bf16_linear"),
    ("attn.wo_a.", "attention", "bf16_linear"),
    ("attn.", "attention", "fp8_linear"),
    ("attn_norm.", "norms", None),
    ("ffn_norm.", "norms", None),
    ("ffn.gate.", "router", "bf16_linear"),
    ("ffn.experts.", "routed_experts", "experts"),
    ("ffn.shared_experts.", "shared_experts", "fp8_linear"),
    ("hc_", "hyper_connections", "bf16_linear"),
    ("engram.embed.", "engram_tables", None),
    ("engram.", "engram_projections", "fp8_linear"),
    ("embed.", "embed", None),
    ("head.", "head", "bf16_linear"),
    ("norm.", "norms", None),
)


@dataclasses.dataclass(frozen=True)
class Layer:
  """One layer as the bill sees it; `scores`, `attends` and bytes are what schedules differ in.

  Attributes:
    kind: name for a census.
    reads: layer whose global entries it attends to, itself where it stores them, or None.
    ratio: tokens per global entry that it reads; 0 without any.
    attends: most global entries that a row attends to; infinite without a selection.
    scores: most entries that its indexer scores for a row; 0 without an indexer.
    entry_bytes: of one global entry that it stores; 0 where it reads another layer's.
    key_bytes: of the index key stored with each entry.
    window: slots of its sliding window.
    slot_bytes: of one of them.
    entry_products: [head_dim, hidden] products per token behind its entries.
    key_macs: multiply-adds per token behind its index keys.
  """

  kind: str
  reads: int | None = None
  ratio: int = 0
  attends: float = math.inf
  scores: float = 0
  entry_bytes: int = 0
  key_bytes: int = 0
  window: int = 0
  slot_bytes: int = 0
  entry_products: int = 0
  key_macs: float = 0


def layers_of(schedule: Schedule, config: ModelConfig) -> tuple[Layer, ...]:
  """The records of a schedule that this model runs, in the released storage formats (spec 8.1)."""
  c = config
  records = []
  for spec in schedule.layers:
    full = spec.mode is Mode.FULL
    pool = schedule.pool_blocks * schedule.pool_block_size
    records.append(
        Layer(
            kind=spec.mode.value,
            reads=spec.kv_source,
            ratio=spec.ratio,
            attends=schedule.topk,
            scores=(pool if spec.in_pool else math.inf) if spec.selects else 0,
            entry_bytes=formats.FP4_MAIN.num_bytes(c.head_dim) if full else 0,
            key_bytes=formats.MXFP4.num_bytes(c.index_head_dim) if full else 0,
            window=schedule.window,
            slot_bytes=formats.FP8_WINDOW.num_bytes(c.head_dim),
            entry_products=(1 if spec.ratio == 1 else 2) if full else 0,
            key_macs=c.index_head_dim * c.head_dim / spec.ratio if full else 0,
        )
    )
  return tuple(records)


def kv_bytes_per_token(layers: Iterable[Layer]) -> float:
  """Bytes of global KV that every token of the context adds, index keys included."""
  return float(sum(Fraction(s.entry_bytes + s.key_bytes, s.ratio) for s in layers if s.entry_bytes))


def window_bytes_per_sequence(layers: Iterable[Layer]) -> int:
  """Bytes of all layers' full windows; independent of the context's length."""
  return sum(s.window * s.slot_bytes for s in layers)


def lookup_flops(
    layers: Iterable[Layer], config: ModelConfig, start: int, stop: int, floor: int = 0
) -> dict[str, float]:
  """FLOPs of attention and index scores of the rows at positions [start, stop).

  Args:
    layers: those that run over these rows.
    config: heads and widths.
    start: first position.
    stop: position after the last.
    floor: window keys lie at `floor` or later (spec 17); at most `start`. Global entries have none.

  Returns:
    `attention`, `index` and `index_head_sum`.
  """
  keys = scored = 0
  for layer in layers:
    rows = lambda m, cap, origin=0: _capped(stop - origin, m, cap) - _capped(start - origin, m, cap)
    keys += rows(1, layer.window, floor)
    if layer.ratio:
      keys += rows(layer.ratio, layer.attends)
      scored += rows(layer.ratio, layer.scores)
  heads = config.index_n_heads
  return {
      "attention": 4 * config.num_attention_heads * config.head_dim * keys,
      "index": 2 * heads * config.index_head_dim * scored,
      "index_head_sum": 2 * heads * scored,
  }


def _capped(n: int, m: int, cap: float) -> int:
  """Σ over p = 1 … n of min(⌊p / m⌋, cap)."""
  whole = min(n // m, cap)
  return m * whole * (whole - 1) // 2 + whole * (n - m * whole + 1)


def weigh(flops: Mapping[str, float], weighting: str = "report") -> dict[str, float]:
  """FLOPs by part under one of `WEIGHTINGS`.

  Raises:
    ValueError: no such weighting.
  """
  require(weighting in WEIGHTINGS, "weighting", weighting, f"one of {tuple(WEIGHTINGS)}")
  return {part: float(n * WEIGHTINGS[weighting][part]) for part, n in flops.items()}


@dataclasses.dataclass(frozen=True)
class Weight:
  """One parameter of one layer.

  Attributes:
    name: within its layer, as `attn.wq_a.weight`.
    spec: its layer; None for embedding, head and final norm.
    size: number of values.
    part: of the model.
    product: FLOP part of the product with it; None where there is none.
    active: values that one token uses; less than `size` in the routed experts alone.
  """

  name: str
  spec: LayerSpec | None
  size: int
  part: str
  product: str | None
  active: int


@dataclasses.dataclass(frozen=True)
class Ledger:
  """The bill of one configuration; make it with `of`.

  Attributes:
    config: sizes.
    schedule: its schedule.
    layers: one record a layer.
    weights: every parameter of every layer.
  """

  config: ModelConfig
  schedule: Schedule
  layers: tuple[Layer, ...]
  weights: tuple[Weight, ...]

  @classmethod
  def of(cls, config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> "Ledger":
    """The ledger of a model.

    Args:
      config: of the model.
      shapes: of all its parameters by dotted path (`runs.0.attn.wq_a.weight`), as `nnx.eval_shape`
        of the `Transformer` gives them; a run's first axis is its layers.

    Raises:
      ValueError: a path that belongs to no part, a run with another number of layers, or a table
        of a layer without Engram.
    """
    schedule = Schedule.from_config(config)
    weights = []
    for path, shape in shapes.items():
      weights.extend(_weights(path, tuple(shape), schedule, config))
    return cls(config, schedule, layers_of(schedule, config), tuple(weights))

  @functools.cached_property
  def parameters(self) -> dict[str, int]:
    """Parameter counts (spec 1.2).

    Returns:
      `backbone`, `engram_tables` and `total`; `active_decode`: of one generated token, all layers
      and the head, routed experts at their share, without tables and embedding; `active_prefill`:
      likewise of the encoder's layers alone; `active_prefill_with_source`: with the main-KV and
      index-key projections of the decoder's first layer, which every prompt row takes as well.
    """
    outside = ("embed", "engram_tables")
    used = [w for w in self.weights if w.part not in outside]
    tables = sum(w.size for w in self.weights if w.part == "engram_tables")
    total = sum(w.size for w in self.weights)
    encoder = sum(w.active for w in used if w.spec and w.spec.stack == "encoder")
    source = sum(
        w.active for w in used if w.spec and w.spec.stack == "decoder" and _publishes(w.name)
    )
    return {
        "backbone": total - tables,
        "engram_tables": tables,
        "total": total,
        "active_prefill": encoder,
        "active_decode": sum(w.active for w in used),
        "active_prefill_with_source": encoder + source,
    }

  @functools.cached_property
  def parameters_by_part(self) -> dict[str, int]:
    """Parameter counts of the model's parts; they sum to `total`."""
    parts = dict.fromkeys((part for _, part, _ in _PARTS), 0)
    for weight in self.weights:
      parts[weight.part] += weight.size
    return parts

  @property
  def cache_bytes_by_part(self) -> dict[str, float]:
    """Steps to the bytes per token (spec 8.2), and of one window slot of one layer.

    The half-filled group of an m = 2 source and Engram's history belong to the request, not to the
    context, and are not here.
    """
    c, sources = self.config, self.schedule.kv_sources
    per_entry = {
        "main_kv": formats.FP4_MAIN.num_bytes(c.head_dim),
        "index_key": formats.MXFP4.num_bytes(c.index_head_dim),
    }
    entries = sum(Fraction(1, s.ratio) for s in sources)
    return {
        "main_kv_per_entry": per_entry["main_kv"],
        "index_key_per_entry": per_entry["index_key"],
        "entries_per_token": float(entries),
        "main_kv_per_token": float(entries * per_entry["main_kv"]),
        "index_keys_per_token": float(entries * per_entry["index_key"]),
        "window_per_slot": formats.FP8_WINDOW.num_bytes(c.head_dim),
    }

  @property
  def kv_bytes_per_token(self) -> float:
    return kv_bytes_per_token(self.layers)

  @property
  def window_bytes_per_sequence(self) -> int:
    return window_bytes_per_sequence(self.layers)

  @property
  def persistent_bytes_per_token(self) -> float:
    """What a stored prefix keeps per token: global KV alone, bounded replay rebuilds windows."""
    return self.kv_bytes_per_token

  def decode_flops(self, context: int) -> dict[str, float]:
    """FLOPs of one generated token, by part; see `weigh`.

    A token at an average place in its groups: an m = 2 source makes half an index key for it.

    Args:
      context: tokens it may see, itself included.

    Raises:
      ValueError: `context` is below 1.
    """
    require(context >= 1, "context", context, "at least 1")
    lookups = lookup_flops(self.layers, self.config, context - 1, context)
    return self._linear(1, 1) | lookups

  def prefill_flops(self, tokens: int, arm: str = "B", response: int = 0) -> dict[str, float]:
    """FLOPs of a prompt, by part; see `weigh`. The head runs on the last row.

    Args:
      tokens: length of the prompt, and of the response if it is read along with it, as in training.
      arm: "A": all layers over all rows. "B": the encoder and the decoder's source projections
        over all rows, decoder layers over the last W with their window floor (spec 6, 17).
      response: tokens of it; the decoder's W rows come before them.

    Raises:
      ValueError: `tokens` is below 1, an arm of another name, a response that is no part of it.
    """
    require(tokens >= 1, "tokens", tokens, "at least 1")
    require(arm in ("A", "B"), "arm", arm, "'A' or 'B'")
    require(0 <= response < tokens, "response", response, f"within 0..{tokens - 1}")
    first = max(0, tokens - response - self.schedule.window) if arm == "B" else 0
    start = self.schedule.decoder_start
    encoder = lookup_flops(self.layers[:start], self.config, 0, tokens)
    decoder = lookup_flops(self.layers[start:], self.config, first, tokens, floor=first)
    return self._linear(tokens, tokens - first) | {k: encoder[k] + decoder[k] for k in encoder}

  def prefill_flops_ratio(self, tokens: int, weighting: str = "report") -> float:
    """FLOPs of arm B over those of arm A.

    Falls towards the encoder's share of the linears, ½ and a little for Engram's projections, until
    index scores weigh in: they grow with the square of the length, and the released encoder holds
    1.5 of the 2.5 entries per token that are scored.
    """
    b, a = (sum(weigh(self.prefill_flops(tokens, arm), weighting).values()) for arm in "BA")
    return b / a

  def _linear(self, rows: int, decoder_rows: int) -> dict[str, float]:
    """FLOPs of all products with parameters; the head takes one row."""
    start = self.schedule.decoder_start
    totals = collections.Counter(experts=0, fp8_linear=0, bf16_linear=0)
    for w in self.weights:
      if w.product is None:
        continue
      n = 1
      if w.spec is not None:
        # What stands before the decoder's entries runs over every row.
        before = _publishes(w.name) or (w.spec.layer == start and w.name.startswith("engram."))
        n = rows if w.spec.stack == "encoder" or before else decoder_rows
        n = n / w.spec.ratio if w.name == "attn.indexer.wk.weight" else n
      totals[w.product] += 2 * n * w.active
    return dict(totals)


def _publishes(name: str) -> bool:
  """Whether a parameter makes global entries or their index keys."""
  return name.startswith(("attn.compressor.", "attn.indexer.wk.", "attn.indexer.k_norm."))


def _weights(
    path: str, shape: tuple[int, ...], schedule: Schedule, config: ModelConfig
) -> Iterable[Weight]:
  """The parameter at `path`, once a layer of its run."""
  name, specs = path, (None,)
  size = math.prod(shape)
  if path.startswith("runs."):
    _, run, name = path.split(".", 2)
    specs = schedule.runs[int(run)] if int(run) < len(schedule.runs) else ()
    if not shape or shape[0] != len(specs):
      raise ValueError(
          f"shape of {path} is {shape}; its first axis must be the {len(specs)} layers of its run"
      )
    size //= len(specs)
    if name == "engram.embed.weight":
      if specs[0].engram is None:
        raise ValueError(f"parameter {path} is of layer {specs[0].layer}, which has no Engram")
      size = size // shape[1] * config.engram_num_embeddings[specs[0].engram]
  found = next((p for p in _PARTS if name.startswith(p[0])), None)
  if found is None:
    raise ValueError(f"parameter {path} belongs to no part of the model that the ledger knows")
  _, part, product = found
  if "norm" in name or not name.endswith((".weight", "_fn")):
    product = None
  active = size
  if part == "routed_experts":
    active = size // config.n_routed_experts * config.num_experts_per_tok
  for spec in specs:
    yield Weight(name, spec, size, part, product, active)
