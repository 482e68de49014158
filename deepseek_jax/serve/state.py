"""Between a device cache and the stores: what of a request is kept, and how it is put back.

Global entries of a prefix are kept as packed. Of the encoder's windows up to 2W positions are kept:
when a new turn is shorter than W, the decoder's last W rows begin before it, and the encoder reads
those rows again over their own older keys. Decoder windows, tails and Engram history are not kept:
the first are rebuilt at every prefill, the others follow from the tokens.
"""

import hashlib
from collections.abc import Mapping

import jax
import numpy as np

from deepseek_jax.cache import Cache
from deepseek_jax.config import CacheFormats, ComputeConfig, ModelConfig
from deepseek_jax.schedule import Schedule
from deepseek_jax.serve.record import Part
from deepseek_jax.serve.replay import Plan
from deepseek_jax.serve.session import WindowState

_PLAIN = ComputeConfig()


def _tables(cache: Cache, schedule: Schedule):
  for spec, kv, keys in zip(schedule.kv_sources, cache.main_kv, cache.index_keys):
    yield f"layer{spec.layer}.main_kv", spec.ratio, kv
    yield f"layer{spec.layer}.index_keys", spec.ratio, keys


def parts(config: ModelConfig, storage: CacheFormats) -> dict[str, Part]:
  """What a stored prefix consists of: tokens and bytes per row of every table."""
  cache = Cache.init(config, storage, batch=1, capacity=1)
  tables = _tables(cache, Schedule.from_config(config))
  return {name: Part(ratio, table.layout.row_bytes) for name, ratio, table in tables}


def identity(
    config: ModelConfig, storage: CacheFormats, weights: object, compute: ComputeConfig = _PLAIN,
    classes: np.ndarray | None = None,
) -> str:  # fmt: skip
  """Digest of what makes cached state of one model foreign to another.

  Args:
    config: of the model.
    storage: formats of the cache.
    weights: tree of arrays, or a string that stands for them.
    compute: what it rounds to counts: entries that were rounded are no unrounded model's.
    classes: Engram class of every token id: another tokenizer looks up other rows.
  """
  rounding = compute.dtype, sorted(compute.quantize)
  digest = hashlib.sha256(f"{config}{storage}{rounding}".encode())
  if isinstance(weights, str):
    digest.update(weights.encode())
    weights = ()
  for leaf in jax.tree.leaves((weights, classes)):
    digest.update(np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8).data)
  return digest.hexdigest()


def take_entries(cache: Cache, schedule: Schedule, line: int, tokens: int) -> dict[str, np.ndarray]:
  """Packed global entries of a line's first `tokens` tokens: uint8 [rows, row_bytes] by part."""
  return {
      name: table.export(line, np.arange(tokens // ratio))
      for name, ratio, table in _tables(cache, schedule)
  }


def put_entries(
    cache: Cache, schedule: Schedule, line: int, rows: Mapping[str, np.ndarray]
) -> None:
  """Puts entries back into a line of a cache of NumPy arrays.

  Raises:
    ValueError: a part is missing, of another size, or longer than the cache.
  """
  for name, _, table in _tables(cache, schedule):
    if name not in rows:
      raise ValueError(
          f"part {name} is missing; entries need {[n for n, _, _ in _tables(cache, schedule)]}"
      )
    if len(rows[name]) > table.layout.rows:
      raise ValueError(
          f"part {name} has {len(rows[name])} rows; the cache holds {table.layout.rows}"
      )
    table.restore(line, np.arange(len(rows[name])), rows[name])


def take_window(cache: Cache, line: int, floor: int) -> WindowState:
  """The encoder's ring of a line in position order; `floor` is that of its rows."""
  window = cache.encoder_window.layout.rows
  stop = int(np.asarray(cache.lengths)[line])
  first = min(stop, max(floor, stop - window))
  slots = np.arange(first, stop) % window
  return WindowState(first, stop, floor, cache.encoder_window.export(line, slots))


def put_window(cache: Cache, line: int, state: WindowState, start: int) -> None:
  """Fills the encoder's ring of a line for rows from `start` on, in a cache of NumPy arrays."""
  window = cache.encoder_window.layout.rows
  positions = np.arange(max(state.first, start - window), start)
  rows = state.rows[:, positions - state.first]
  cache.encoder_window.restore(line, positions % window, rows)


def joined(older: WindowState, newer: WindowState, most: int) -> WindowState:
  """The newest `most` positions that two states of one text cover without a gap."""
  if older.floor != newer.floor or not older.first < newer.first <= older.stop:
    return newer
  rows = np.concatenate([older.rows[:, : newer.first - older.first], newer.rows], axis=1)
  first = max(older.first, newer.stop - most)
  return WindowState(first, newer.stop, newer.floor, rows[:, first - older.first :])


def reaches(state: WindowState, plan: Plan, window: int) -> bool:
  """Whether a kept state holds every window key that the plan's rows look back to."""
  oldest = max(plan.encoder_floor, plan.encoder_start - window + 1)
  return (
      state.floor == plan.encoder_floor
      and state.first <= oldest
      and plan.encoder_start <= state.stop
  )


def until(state: WindowState | None, stop: int) -> WindowState | None:
  """The state of the text's first `stop` tokens, or None where nothing of it is kept."""
  if state is None or not state.first < stop <= state.stop:
    return None
  return WindowState(state.first, stop, state.floor, state.rows[:, : stop - state.first])
