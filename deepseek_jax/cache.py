"""Device state of served requests: packed global entries, window rings, tails, histories (spec 7).

The cache as a type: what it holds, append and read. What lives how long is decided in `serve/`.
Every operation returns a new cache; under `jit` with the cache donated it happens in place.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from deepseek_jax import word_rows
from deepseek_jax.config import CacheFormats, ModelConfig
from deepseek_jax.schedule import Schedule
from pallas_kernels import dispatch
from pallas_kernels.quantize import formats, op
from pallas_kernels.quantize.stored import LAYOUTS, Stored
from pallas_kernels.sparse_attention.layout import from_stored, to_stored

# A TPU lays int32 arrays out in tiles of 8 × 128 words. With 128 words as the minor axis a tile row
# is memory order, so that the array occupies its logical bytes and no kernel relays it out.
LANES = 128


@dataclasses.dataclass(frozen=True)
class Layout:
  """How the rows of a table are stored.

  Attributes:
    storage: a block format of `formats.FORMATS`, 'bfloat16' or 'float32'.
    rows: capacity.
    width: channels of a row.
    interleaved: codes and scales of a row are neighbours in one buffer, so that one DMA fetches a
      single row (word order: `pallas_kernels.sparse_attention.layout`); else they have a buffer
      each, and whole blocks are read at once.
  """

  storage: str
  rows: int
  width: int
  interleaved: bool = False

  @property
  def format(self) -> formats.Format | None:
    return formats.FORMATS.get(self.storage)

  @property
  def words(self) -> tuple[int, int]:
    """32-bit words of a row's codes and of its scales; scales are padded to whole words."""
    f = self.format
    return self.width * f.element.bits // 32, -(-self.width // f.block // 4)

  @property
  def row_bytes(self) -> int:
    """Bytes of one row as stored, scales included."""
    if self.format is None:
      return self.width * jnp.dtype(self.storage).itemsize
    return 4 * sum(self.words)


def _pack(codes: Array, bits: int) -> Array:
  """Codes [..., H] as words [..., H·bits/32], the first channel in the lowest bits."""
  fields = codes.reshape(*codes.shape[:-1], -1, 32 // bits).astype(jnp.uint32)
  shifts = np.arange(0, 32, bits, dtype=np.uint32)
  return jnp.sum(fields << shifts, axis=-1, dtype=jnp.uint32)


def _unpack(words: Array, bits: int) -> Array:
  """Undoes `_pack`; codes are uint8."""
  shifts = np.arange(0, 32, bits, dtype=np.uint32)
  fields = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
  return fields.reshape(*words.shape[:-1], -1).astype(jnp.uint8)


def _packed(stored: Stored, slots: Array, x: Array) -> tuple[Array, ...]:
  """`Table._encode` by the kernel, which packs rows as they stand in a table of their own."""
  flat = x.reshape(-1, stored.width)
  count = flat.shape[0]
  buffers = op.pack(jnp.pad(flat, ((0, -count % stored.unit), (0, 0))), stored)
  if not stored.interleaved:
    pairs = zip(buffers, stored.words)
    return tuple(b.reshape(-1, w)[:count].reshape(*x.shape[:-1], w) for b, w in pairs)
  words = buffers[0].reshape(-1, sum(stored.words))[:count].reshape(*x.shape[:-1], -1)
  places = jnp.arange(count, dtype=slots.dtype).reshape(slots.shape)
  return (to_stored(*from_stored(words, places, stored.words[0]), slots),)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Table:
  """Rows of H channels in a storage format, with leading axes for lines (and layers).

  Attributes:
    data: int32 [*n, R, 128], all words of all rows one after another; without a block format
      [*n, rows, H] in the storage dtype.
    scales: int32 [*n, R, 128], or None where they are interleaved or do not exist.
    layout: static.
  """

  data: Array
  scales: Array | None
  layout: Layout = dataclasses.field(metadata=dict(static=True))

  @classmethod
  def zeros(cls, lead: tuple[int, ...], layout: Layout) -> "Table":
    """An empty table of NumPy arrays."""
    if layout.format is None:
      shape = (*lead, layout.rows, layout.width)
      return cls(np.zeros(shape, jnp.dtype(layout.storage)), None, layout)
    codes, scales = layout.words
    buffer = lambda words: np.zeros((*lead, -(-layout.rows * words // LANES), LANES), np.int32)
    if layout.interleaved:
      return cls(buffer(codes + scales), None, layout)
    return cls(buffer(codes), buffer(scales), layout)

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the rows it holds: [*n, rows, H]."""
    return (*self.data.shape[:-2], self.layout.rows, self.layout.width)

  @property
  def nbytes(self) -> int:
    return sum(
        math.prod(a.shape) * a.dtype.itemsize for a in (self.data, self.scales) if a is not None
    )

  def _encode(self, slots: Array, x: Array) -> tuple[Array, ...]:
    """Rows as the buffers hold them at `slots`, one array [..., words] a buffer."""
    f = self.layout.format
    if f is None:
      return (x.astype(self.layout.storage),)
    stored = self._stored
    if stored is not None and dispatch.platform() == "tpu":
      return dispatch.over_lines(functools.partial(_packed, stored), slots, x)
    codes, scales = op.quantize(x, f)
    missing = 4 * self.layout.words[1] - scales.shape[-1]
    scales = jnp.pad(scales, [(0, 0)] * (scales.ndim - 1) + [(0, missing)])
    words = _pack(codes, f.element.bits), _pack(scales, 8)
    words = (to_stored(*words, slots),) if self.layout.interleaved else words
    return tuple(jax.lax.bitcast_convert_type(w, jnp.int32) for w in words)

  def _decode(self, slots: Array, rows: tuple[Array, ...], dtype) -> Array:
    f = self.layout.format
    if f is None:
      return rows[0].astype(dtype)
    rows = tuple(jax.lax.bitcast_convert_type(r, jnp.uint32) for r in rows)
    if self.layout.interleaved:
      rows = from_stored(rows[0], slots, self.layout.words[0])
    codes, scales = rows
    count = self.layout.width // f.block
    return op.dequantize(_unpack(codes, f.element.bits), _unpack(scales, 8)[..., :count], f, dtype)

  @property
  def _buffers(self) -> tuple[Array, ...]:
    return (self.data,) if self.scales is None else (self.data, self.scales)

  @property
  def _words(self) -> tuple[int, ...]:
    """Words, or channels without a block format, of a row in every buffer."""
    if self.layout.format is None:
      return (self.layout.width,)
    return (sum(self.layout.words),) if self.layout.interleaved else self.layout.words

  @property
  def _stored(self) -> Stored | None:
    """The layout with kernels that this one is."""
    key = self.layout.format, self.layout.width, self.layout.interleaved
    found = (s for s in LAYOUTS.values() if key == (s.format, s.width, s.interleaved))
    return next(found, None)

  def _rows(self) -> tuple[Array, ...]:
    """Every buffer as [*n, rows, words of a row]; on a TPU a copy in another layout."""
    if self.layout.format is None:
      return self._buffers

    def one(a, w):
      lead = a.shape[:-2]
      return a.reshape(*lead, -1)[..., : self.layout.rows * w].reshape(*lead, -1, w)

    return tuple(one(a, w) for a, w in zip(self._buffers, self._words))

  def append(self, slots: Int[Array, "*#n T"], x: Float[Array, "*n T H"]) -> "Table":
    """The table with rows `x` rounded and written at `slots`; slots ≥ rows are dropped.

    Rows that go to consecutive slots are written together, a chunk of prefill in one turn.
    """
    slots = slots.reshape((1,) * (x.ndim - 1 - slots.ndim) + slots.shape)
    new = self._encode(jnp.broadcast_to(slots, x.shape[:-1]), x)
    data, *scales = word_rows.append(self._buffers, new, slots, self.layout.rows)
    return Table(data, scales[0] if scales else None, self.layout)

  def read(self, dtype) -> Float[Array, "*n C H"]:
    """All rows."""
    stored = self._stored
    whole = stored is not None and self.layout.rows % stored.unit == 0
    if whole and dispatch.platform() == "tpu":

      def unpack(buffers):
        rows = op.unpack(tuple(b.reshape(-1, LANES) for b in buffers), stored)
        return rows.reshape(*buffers[0].shape[:-2], *self.shape[-2:])

      return dispatch.over_lines(unpack, self._buffers).astype(dtype)
    slots = jnp.broadcast_to(jnp.arange(self.layout.rows), self.shape[:-1])
    return self._decode(slots, self._rows(), dtype)

  def take(self, slots: Int[Array, "B T K"], dtype) -> Float[Array, "B T K H"]:
    """Chosen rows of every line; other slots than 0 ≤ slot < rows read some row, to be masked."""
    at = jnp.clip(slots, 0, self.layout.rows - 1)
    if dispatch.platform() == "tpu":
      rows = tuple(word_rows.take(b, at, w) for b, w in zip(self._buffers, self._words))
    else:
      pick = jax.vmap(lambda rows, at: rows.at[at].get(mode="clip"))
      rows = tuple(pick(r, at) for r in self._rows())
    return self._decode(at, rows, dtype)

  def export(self, line: int, slots: Int[np.ndarray, " n"]) -> np.ndarray:
    """Rows of one line as stored, on the host: uint8 [*layers, n, row_bytes], little-endian."""
    host = jax.tree.map(np.asarray, self)
    rows = [np.ascontiguousarray(r[..., line, slots, :]) for r in host._rows()]
    return np.concatenate([r.view(np.uint8) for r in rows], axis=-1)

  def restore(self, line: int, slots: Int[np.ndarray, " n"], rows: np.ndarray) -> None:
    """Puts exported rows back into one line of a table of NumPy arrays, in place.

    Raises:
      ValueError: rows of another shape than [*layers, n, row_bytes].
    """
    lead = self.data.shape[:-3]
    wanted = (*lead, len(slots), self.layout.row_bytes)
    if rows.shape != wanted:
      raise ValueError(f"rows have shape {rows.shape}; this table stores {wanted}")
    at = 0
    for buffer in self._rows():
      size = buffer.shape[-1] * buffer.dtype.itemsize
      part = np.ascontiguousarray(rows[..., at : at + size]).view(buffer.dtype)
      buffer[..., line, slots, :] = part
      at += size


class Tail(NamedTuple):
  """What a half-filled group keeps of its m − 1 newest rows: pooled values and gates, f32."""

  values: Float[Array, "B m1 H"]
  gates: Float[Array, "B m1 H"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
  """State of a batch of requests, one a line.

  Global entries are never cut; a window ring holds the W newest latents of its layer, position p at
  slot p mod W. A tail belongs to its request, never to a stored prefix.

  Attributes:
    main_kv, index_keys: one table per KV source, in the order of `schedule.kv_sources`.
    encoder_window, decoder_window: rings of the layers of each stack, [layers, B, ...].
    tails: one per KV source; None where m = 1.
    history: token classes of the newest n − 1 tokens, newest first; [B, 0] without Engram.
    lengths: tokens read so far: the position of the next row.
    floors: window floors of the encoder's and the decoder's rows, [B, 2] (spec 17).
    capacity: tokens a line can hold.
  """

  main_kv: tuple[Table, ...]
  index_keys: tuple[Table, ...]
  encoder_window: Table
  decoder_window: Table
  tails: tuple[Tail | None, ...]
  history: Int[Array, "B n1"]
  lengths: Int[Array, " B"]
  floors: Int[Array, "B 2"]
  capacity: int = dataclasses.field(metadata=dict(static=True))

  @classmethod
  def init(
      cls,
      config: ModelConfig,
      storage: CacheFormats,
      *,
      batch: int,
      capacity: int,
      pad_class: int = 0,
  ) -> "Cache":
    """An empty cache of NumPy arrays; the first program that reads it puts it on the device.

    Args:
      config: sizes and schedule.
      storage: format of each component.
      batch: lines.
      capacity: tokens a line can hold; rounded up so that every table has whole rows of 128 words.
      pad_class: token class of the pad token, which stands before every text.

    Raises:
      ValueError: batch or capacity below 1.
    """
    for name, value in (("batch", batch), ("capacity", capacity)):
      if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")
    schedule, b = Schedule.from_config(config), batch
    sources = schedule.kv_sources
    unit = LANES * math.lcm(*(s.ratio for s in sources))
    tokens = -(-capacity // unit) * unit

    def entries(kind, width, interleaved):
      layouts = [Layout(kind, tokens // s.ratio, width, interleaved) for s in sources]
      return tuple(Table.zeros((b,), one) for one in layouts)

    ring = Layout(storage.window_kv, config.sliding_window, config.head_dim)
    no_tail = lambda m: np.zeros((b, m - 1, config.head_dim), np.float32)
    order = config.engram_max_ngram_size - 1 if config.engram_layer_ids else 0
    return cls(
        entries(storage.main_kv, config.head_dim, True),
        entries(storage.index, config.index_head_dim, False),
        Table.zeros((len(schedule.encoder), b), ring),
        Table.zeros((len(schedule.decoder), b), ring),
        tuple(Tail(no_tail(s.ratio), no_tail(s.ratio)) if s.ratio > 1 else None for s in sources),
        np.full((b, order), pad_class, np.int32),
        np.zeros((b,), np.int32),
        np.zeros((b, 2), np.int32),
        tokens,
    )

  @property
  def bytes(self) -> dict[str, int]:
    """Bytes of all lines by part, from the shapes of the arrays."""
    small = lambda tree: sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))
    return {
        "main_kv": sum(t.nbytes for t in self.main_kv),
        "index_keys": sum(t.nbytes for t in self.index_keys),
        "window": self.encoder_window.nbytes + self.decoder_window.nbytes,
        "tails": small(self.tails),
        "history": small(self.history),
        "counters": small((self.lengths, self.floors)),
    }

  @property
  def bytes_per_token(self) -> float:
    """Bytes of global KV per token that a line can hold: 890 at the released sizes (spec 8.2)."""
    lines = self.lengths.shape[0]
    parts = self.bytes
    return (parts["main_kv"] + parts["index_keys"]) / (lines * self.capacity)

  def write_entries(
      self, source: int, kv: Float[Array, "B C H"], keys: Float[Array, "B C J"],
      slots: Int[Array, "B C"], tail: Tail | None,
  ) -> "Cache":  # fmt: skip
    """With entries of KV source number `source` at `slots` (≥ capacity: none) and its new tail."""
    put = lambda old, new: (*old[:source], new, *old[source + 1 :])
    return dataclasses.replace(
        self,
        main_kv=put(self.main_kv, self.main_kv[source].append(slots, kv)),
        index_keys=put(self.index_keys, self.index_keys[source].append(slots, keys)),
        tails=put(self.tails, tail),
    )

  def write_window(
      self, stack: str, latents: Float[Array, "layers B T H"], positions: Int[Array, "B T"],
      live: Bool[Array, "B T"],
  ) -> "Cache":  # fmt: skip
    """With the newest W live rows of every layer in the rings of `stack`; live rows come first."""
    ring: Table = getattr(self, f"{stack}_window")
    w = ring.layout.rows
    if live.shape[1] > w:
      first = jnp.maximum(jnp.sum(live, axis=1) - w, 0)
      cut = lambda a, start: jax.lax.dynamic_slice_in_dim(a, start, w, axis=-1)
      positions, live = (jax.vmap(cut)(a, first) for a in (positions, live))
      cut = lambda a, start: jax.lax.dynamic_slice_in_dim(a, start, w, axis=1)
      latents = jax.vmap(cut, in_axes=(1, 0), out_axes=1)(latents, first)
    end = jnp.max(jnp.where(live, positions, -1), axis=1, keepdims=True)
    slots = jnp.where(live & (positions > end - w), positions % w, w)
    return dataclasses.replace(self, **{f"{stack}_window": ring.append(slots[None], latents)})


def ring_positions(following: Int[Array, " B"], window: int) -> Int[Array, "B W"]:
  """Position of each slot of a ring whose next row is at `following`; negative if there is none."""
  newest = following[:, None] - 1
  return newest - (newest - jnp.arange(window)) % window
