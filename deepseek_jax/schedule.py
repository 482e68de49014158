"""The static layer-mode schedule: which layer computes, borrows or reuses which part of global KV.

Built once, in Python, from four lists of the released configuration (spec 2). Everything a layer
needs to know about its neighbours is in its `LayerSpec`; nothing is discovered while running.
"""

import collections
import dataclasses
import enum

import jax

from deepseek_jax.config import ModelConfig


class Mode(enum.Enum):
  """What a layer does about global KV (report, compressed sparse attention)."""

  WINDOW = "window"  # sliding window alone
  FULL = "full"  # computes main KV, index keys and a fresh Top-K
  REINDEX = "reindex"  # borrows the KV, picks its own Top-K inside the candidate pool
  REUSE = "reuse"  # borrows both


@dataclasses.dataclass(frozen=True)
class LayerSpec:
  """All that is static about one layer.

  Attributes:
    layer: index in the backbone.
    mode: see `Mode`.
    stack: "encoder", or "decoder" from the last KV source on.
    ratio: tokens per global entry (m); 0 in window layers.
    kv_source: layer whose main KV and index keys this layer reads; None in window layers.
    index_source: layer whose Top-K this layer reads; itself in Full and Reindex layers.
    makes_pool: this layer publishes the candidate pool.
    in_pool: this layer's own Top-K is restricted to the pool.
    engram: ordinal of this layer's Engram table, or None.
  """

  layer: int
  mode: Mode
  stack: str
  ratio: int
  kv_source: int | None = None
  index_source: int | None = None
  makes_pool: bool = False
  in_pool: bool = False
  engram: int | None = None

  @property
  def selects(self) -> bool:
    """Whether the layer has an indexer of its own."""
    return self.mode in (Mode.FULL, Mode.REINDEX)

  @property
  def kind(self) -> "LayerSpec":
    """The spec without its place: layers of one kind can be stacked and scanned."""
    own = self.selects
    return dataclasses.replace(
        self,
        layer=-1,
        kv_source=-1 if self.mode is Mode.FULL else self.kv_source,
        index_source=-1 if own else self.index_source,
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Schedule:
  """The layers in order, with their runs, sources and pool. A static pytree without leaves."""

  layers: tuple[LayerSpec, ...]
  topk: int
  window: int
  pool_blocks: int
  pool_block_size: int

  @classmethod
  def from_config(cls, config: ModelConfig) -> "Schedule":
    """The schedule of a configuration.

    Raises:
      ValueError: the schedule is illegal; the message names the layer and the reason.
    """
    return _build(config)

  @property
  def decoder_start(self) -> int:
    """First decoder layer: the last KV source, which every later layer reads."""
    return max(s.layer for s in self.layers if s.mode is Mode.FULL)

  @property
  def encoder(self) -> tuple[LayerSpec, ...]:
    return self.layers[: self.decoder_start]

  @property
  def decoder(self) -> tuple[LayerSpec, ...]:
    return self.layers[self.decoder_start :]

  @property
  def runs(self) -> tuple[tuple[LayerSpec, ...], ...]:
    """Maximal runs of neighbours that can be stacked: equal kinds that publish nothing."""
    runs: list[list[LayerSpec]] = []
    for spec in self.layers:
      last = runs[-1][-1] if runs else None
      if last and last.kind == spec.kind and not spec.selects and spec.engram is None:
        runs[-1].append(spec)
      else:
        runs.append([spec])
    return tuple(tuple(r) for r in runs)

  @property
  def census(self) -> dict[Mode, int]:
    counts = collections.Counter(s.mode for s in self.layers)
    return {mode: counts[mode] for mode in Mode}

  @property
  def kv_sources(self) -> tuple[LayerSpec, ...]:
    return tuple(s for s in self.layers if s.mode is Mode.FULL)

  @property
  def index_sources(self) -> tuple[LayerSpec, ...]:
    return tuple(s for s in self.layers if s.selects)

  @property
  def ratios(self) -> tuple[int, ...]:
    """The different compression ratios in use, ascending."""
    return tuple(sorted({s.ratio for s in self.layers if s.ratio}))

  @property
  def entries_per_token(self) -> float:
    """Global entries stored per token, over all KV sources."""
    return sum(1 / s.ratio for s in self.kv_sources)

  @property
  def pool_source(self) -> LayerSpec | None:
    return next((s for s in self.layers if s.makes_pool), None)

  def kv_consumers(self, layer: int) -> tuple[int, ...]:
    """Layers that read the main KV of source `layer`, itself included."""
    return tuple(s.layer for s in self.layers if s.kv_source == layer)

  def index_consumers(self, layer: int) -> tuple[int, ...]:
    """Layers that read the Top-K of index source `layer`, itself included."""
    return tuple(s.layer for s in self.layers if s.index_source == layer)

  def __str__(self) -> str:
    return draw(self)


def _build(c: ModelConfig) -> Schedule:
  n = c.num_hidden_layers
  allowed = {n, n + c.num_nextn_predict_layers}
  if len(c.compress_ratios) not in allowed:
    raise ValueError(
        f"compress_ratios has {len(c.compress_ratios)} entries; num_hidden_layers = {n} and"
        f" num_nextn_predict_layers = {c.num_nextn_predict_layers} allow {sorted(allowed)}"
    )
  if any(m < 0 for m in c.compress_ratios):
    raise ValueError(f"compress_ratios is {c.compress_ratios}; a ratio must be at least 0")
  kv, index, pool = (
      set(c.kv_source_layer_ids),
      set(c.index_source_layer_ids),
      c.candidate_source_layer_id,
  )
  for name, ids in (
      ("kv_source_layer_ids", c.kv_source_layer_ids),
      ("index_source_layer_ids", c.index_source_layer_ids),
      ("engram_layer_ids", c.engram_layer_ids),
  ):
    if list(ids) != sorted(set(ids)) or any(not 0 <= i < n for i in ids):
      raise ValueError(f"{name} is {ids}; it must be ascending layer ids within 0..{n - 1}")
  if not kv:
    raise ValueError("kv_source_layer_ids is empty; the decoder would read nothing")
  if kv - index:
    raise ValueError(
        f"KV source layer {min(kv - index)} is not in index_source_layer_ids; a Full layer selects"
        " its own Top-K"
    )
  if pool is not None and pool not in kv:
    raise ValueError(
        f"candidate_source_layer_id is {pool}; it must be a KV source, one of {sorted(kv)}"
    )
  if pool is not None:
    reach = (c.candidate_topk_blocks - 1) * c.candidate_block_size + 1
    if c.candidate_topk_blocks < 1 or c.candidate_block_size < 1 or reach < c.index_topk:
      raise ValueError(
          f"candidate_topk_blocks = {c.candidate_topk_blocks} × candidate_block_size ="
          f" {c.candidate_block_size} guarantee {reach} reachable entries (the newest block may"
          " hold one);"
          f" (blocks - 1)·size + 1 must be at least index_topk = {c.index_topk}"
      )

  start = max(kv)
  layers: list[LayerSpec] = []
  source = selection = None
  for i in range(n):
    m = c.compress_ratios[i]
    stack = "decoder" if i >= start else "encoder"
    engram = c.engram_layer_ids.index(i) if i in c.engram_layer_ids else None
    if m == 0:
      if i in index:
        raise ValueError(
            f"layer {i} is an index source with compress_ratios[{i}] = 0; a source needs a ratio of"
            " at least 1"
        )
      if stack == "decoder":
        raise ValueError(
            f"decoder layer {i} has compress_ratios[{i}] = 0; the decoder would read nothing there"
        )
      layers.append(LayerSpec(i, Mode.WINDOW, stack, 0, engram=engram))
      continue
    if i in kv:
      source, mode = i, Mode.FULL
    elif source is None:
      raise ValueError(
          f"layer {i} has ratio {m} before any KV source (kv_source_layer_ids starts at {min(kv)});"
          " it has nothing to reuse"
      )
    else:
      mode = Mode.REINDEX if i in index else Mode.REUSE
      if c.compress_ratios[source] != m:
        raise ValueError(
            f"{mode.name.capitalize()} layer {i} has ratio {m}, its KV source {source} has ratio"
            f" {c.compress_ratios[source]}; they must be equal"
        )
    if i in index:
      selection = i
    layers.append(LayerSpec(
        i, mode, stack, m, source, selection, makes_pool=i == pool,
        in_pool=mode is Mode.REINDEX and pool is not None and source == pool, engram=engram,
    ))  # fmt: skip
  return Schedule(
      tuple(layers), c.index_topk, c.sliding_window,
      c.candidate_topk_blocks if pool is not None else 0, c.candidate_block_size,
  )  # fmt: skip


def draw(schedule: Schedule) -> str:
  """The schedule as text: one line a run, the borrowed parts as arrows to their source."""
  census = " + ".join(f"{n} {m.name.capitalize()}" for m, n in schedule.census.items() if n)
  lines = [
      f"{len(schedule.layers)} layers: {census}; window {schedule.window}, Top-K {schedule.topk}"
  ]
  stack = None
  for run in schedule.runs:
    spec = run[0]
    if spec.stack != stack:
      stack = spec.stack
      lines.append(f"── {stack} " + "─" * 56)
    where = f"{spec.layer}" if len(run) == 1 else f"{spec.layer}–{run[-1].layer}"
    text = {
        Mode.WINDOW: "window only",
        Mode.FULL: f"■ main KV  ■ index keys  ■ Top-K   m = {spec.ratio}",
        Mode.REINDEX: f"← KV of {spec.kv_source}  ■ Top-K"
        + ("  inside the pool" if spec.in_pool else ""),
        Mode.REUSE: f"← KV of {spec.kv_source}  ← Top-K of {spec.index_source}",
    }[spec.mode]
    if spec.makes_pool:
      text += f"   ■ pool {schedule.pool_blocks} × {schedule.pool_block_size}"
    if spec.engram is not None:
      text += "   + Engram"
    lines.append(f"{where:>7}  {spec.mode.name:<8}{text}")
  return "\n".join(lines)
