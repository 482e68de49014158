"""Compares the model with a golden file: everything stored that can be run, against its limit.

  python scripts/check_parity.py --golden=tests/golden/grads_f32.npz \
      --args=tests/golden/model_args.json --weights=tests/golden/model_f32.npz --json

Keys are those of tests/golden/README.md; batch, length, layers and sizes may differ. Whether the
cache was rounded is read off the stored latents unless `--quantize` says it. Limits are the
README's: logits 5e-5, streams and index scores 1e-4, latents, keys and loss 5e-5; all 1e-3 for a
quantised run; Top-K, pool and Engram rows equal; gradients within 1e-3 of the tensor's maximum plus
1e-6. `grads_max_rel` is max |a - b| / (max |b| + 1e-3) over tensors, which is at most 1e-3 exactly
when that holds. A difference that is not finite is reported as the largest float.

Exit status: 0 within all limits, 1 a limit exceeded, 2 bad input.
"""

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from flax import nnx

from deepseek_jax.checkpoint import released
from deepseek_jax.config import ComputeConfig, ModelConfig
from deepseek_jax.eval import golden as files
from deepseek_jax.eval import served
from deepseek_jax.nn import engram
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.schedule import Schedule
from deepseek_jax.train import loss
from deepseek_jax.train.data import Batch

# Constants that describe a file rather than results to compare.
_DESCRIPTION = frozenset({
    "ids", "engram_token_map", "prompt_len", "window", "first_decoder_layer", "cached_lengths",
    "sim_prompt_lengths",
})  # fmt: skip

LIMITS = {"logits": 5e-5, "streams": 1e-4, "kv": 5e-5, "index_scores": 1e-4, "loss": 5e-5}
QUANTISED_LIMIT = 1e-3
_GROUPS = {
    "x_out": "streams", "pre_out": "streams", "window_kv": "kv", "compress_kv": "kv",
    "index_k": "kv", "index_scores": "index_scores",
}  # fmt: skip
GRADIENT_LIMIT = 1e-3
MOST_LINES = 12
_KEYS = (
    "logits_max_abs", "decode_logits_max_abs", "streams_max_abs", "topk_sets_equal", "pool_equal",
    "engram_ids_equal", "kv_max_abs", "grads_max_rel", "index_scores_max_abs", "loss_abs",
    "global_norm_rel",
)  # fmt: skip
# Serving arms and the one-pass simulations of two of them: keys of "replay".
_ARMS = ("A", "B", "C", "D", "E", "simB", "simD")


class Finding(NamedTuple):
  """One compared array: the JSON key it counts for, its name, what was found and its limit."""

  key: str
  name: str
  value: float | bool
  limit: float | bool

  @property
  def within(self) -> bool:
    return self.value if self.limit is True else self.value <= self.limit


@functools.lru_cache(maxsize=4)
def _shapes(config: ModelConfig, quantize: tuple[str, ...]) -> Transformer:
  compute = ComputeConfig(quantize=quantize)
  return nnx.eval_shape(lambda: Transformer(config, compute, rngs=nnx.Rngs(0)))


# Compiled once for all files of one model and shape.
@jax.jit
def _forward(model, ids, ngrams):
  with jax.default_matmul_precision("highest"):
    out = model(ids, Rows.single(*ids.shape), ngrams, trace=True)
    return model.logits(out.hidden), out.trace


@jax.jit
def _gradient(model, ids, ngrams):
  graph, params = nnx.split(model)
  weights = np.ones(ids.shape, np.float32)
  weights[:, -1] = 0

  def mean_nll(params):
    model = nnx.merge(graph, params)
    batch = Batch(ids, Rows.single(*ids.shape), ngrams, jnp.roll(ids, -1, axis=1), weights)
    return loss.sums(model, batch, index_loss="frozen")[0].nll / weights.sum()

  with jax.default_matmul_precision("highest"):
    return jax.value_and_grad(mean_nll)(params)


def _require_shape(got: np.ndarray, want: np.ndarray, name: str) -> None:
  if got.shape != want.shape:
    raise ValueError(f"{name} has shape {want.shape}; the configuration and ids give {got.shape}")


def max_abs(got: np.ndarray, want: np.ndarray, name: str) -> float:
  """Largest difference; equal infinities agree, any other value that is not finite is the largest.

  Raises:
    ValueError: shapes differ: the file belongs to another configuration.
  """
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  _require_shape(got, want, name)
  if not want.size:
    return 0.0
  with np.errstate(invalid="ignore"):
    difference = np.where(got == want, 0.0, np.abs(got - want))
  return float(np.nan_to_num(difference, nan=np.inf).max().clip(max=sys.float_info.max))


def equal(got: np.ndarray, want: np.ndarray, name: str) -> bool:
  """Whether all elements are equal; a ValueError as `max_abs`."""
  _require_shape(got, want, name)
  return bool((got == want).all())


def same_sets(got: np.ndarray, want: np.ndarray, name: str) -> bool:
  """Whether all rows hold the same slots; a row may be wider by any number of -1."""
  got, want = (np.sort(np.asarray(a, np.int64), axis=-1)[..., ::-1] for a in (got, want))
  width = max(got.shape[-1], want.shape[-1])
  wide = lambda a: np.pad(
      a, [(0, 0)] * (a.ndim - 1) + [(0, width - a.shape[-1])], constant_values=-1
  )
  return equal(wide(got), wide(want), name)


def compare_engram(case: files.Case) -> Iterator[Finding]:
  """Hash constants and table rows, re-derived from the configuration."""
  layers = engram.hash_constants(case.config) if case.ngrams is not None else ()
  for name in ("multipliers", "primes", "offsets", "hash"):
    key = f"engram_{name}"
    if key not in case.golden:
      continue
    if not layers:
      raise ValueError(f"{key} is stored; the configuration has no Engram layers")
    if name == "hash":
      ngrams = jnp.asarray(case.ngrams)
      got = np.stack([np.asarray(engram.table_rows(ngrams, c)) for c in layers], axis=2)
      got = got[0] if case.single else got
    else:
      got = np.stack([getattr(c, name) for c in layers])
    yield Finding("engram_ids_equal", key, equal(got, case.golden[key], key), True)


def _captured(case: files.Case, trace: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
  """What the pass gave for a stored capture, cut to the rows and entries that it holds."""
  layer, kind = files.CAPTURE.match(key).groups()
  layer, length, got = int(layer), case.ids.shape[1], None
  if layer < len(trace):
    got = trace[layer].get("entries" if kind in ("compress_kv", "index_k") else kind)
  if got is None:
    raise ValueError(f"{key} is stored; layer {layer} of the configuration has no {kind}")
  if kind == "window_kv":
    rows = case.golden[key].shape[-2:-1]
    got = got[:, max(0, length - sum(rows)) :]
  # The last slot of an incomplete group is no entry.
  if kind in ("compress_kv", "index_k"):
    got = got.kv if kind == "compress_kv" else got.index_keys
    got = got[:, : length // case.config.compress_ratios[layer]]
  if kind in ("index_scores", "candidates"):
    got = got[..., : length // case.config.compress_ratios[layer]]
  return got[0] if case.single else got


def compare_forward(case: files.Case, quantize: tuple[str, ...]) -> Iterator[Finding]:
  """Logits and captures of one pass over all rows."""
  golden = case.golden
  captures = [k for k in golden if files.CAPTURE.match(k)]
  if not captures and not golden.keys() & {"logits", "exact_logits", "exact_window_kv"}:
    return
  limits = dict.fromkeys(LIMITS, QUANTISED_LIMIT) if quantize else LIMITS
  model = released.load(_shapes(case.config, quantize), case.tensors)
  logits, trace = jax.device_get(_forward(model, case.ids, case.ngrams))
  own = lambda a: a[0] if case.single else a

  def difference(group, key, got):
    return Finding(f"{group}_max_abs", key, max_abs(got, golden[key], key), limits[group])

  for key in ("logits", "exact_logits"):
    if key in golden:
      yield difference("logits", key, own(logits))
  if "exact_window_kv" in golden:
    window = np.stack([layer["window_kv"] for layer in trace], axis=1)
    yield difference("kv", "exact_window_kv", own(window))
  for key in captures:
    kind, got = files.CAPTURE.match(key)[2], _captured(case, trace, key)
    if kind == "topk":
      yield Finding("topk_sets_equal", key, same_sets(got, golden[key], key), True)
    elif kind == "candidates":
      yield Finding("pool_equal", key, equal(got, golden[key], key), True)
    else:
      yield difference(_GROUPS[kind], key, got)


def compare_served(case: files.Case, quantize: tuple[str, ...]) -> Iterator[Finding]:
  """Decode, serving arms and their simulations; arms C and E against what they must equal."""
  golden, total = case.golden, case.ids.shape[1]
  decodes = {k: int(m[1]) for k in golden if (m := served.DECODE.match(k))}
  replays = [k for k in golden if served.REPLAY.match(k)]
  if not decodes and not replays:
    return
  for key, start in decodes.items():
    if not 1 <= start < total:
      raise ValueError(f"{key} is stored; decode must start within 1..{total - 1}, after a prompt")
  n = golden.get("prompt_len")
  if replays and (n is None or not 1 <= int(n) < total):
    raise ValueError(f"prompt_len is {n}; {replays[0]} needs one within 1..{total - 1}")
  for key, own in (
      ("window", case.config.sliding_window),
      ("first_decoder_layer", Schedule.from_config(case.config).decoder_start),
  ):
    if replays and int(golden.get(key, own)) != own:
      raise ValueError(f"{key} is {int(golden[key])}; the configuration has {own}")
  cached = np.atleast_1d(golden.get("cached_lengths", ())) if replays else ()
  if any(not 1 <= c <= int(n) for c in cached):
    raise ValueError(f"cached_lengths is {cached}; each must be within 1..{int(n)}, the prompt")
  limits = dict.fromkeys(LIMITS, QUANTISED_LIMIT) if quantize else LIMITS
  runs = served.Runs(case, released.load(_shapes(case.config, quantize), case.tensors))
  own = lambda a: a[0] if case.single and np.ndim(a) else a
  with jax.default_matmul_precision("highest"):
    for key, start in decodes.items():
      value = max_abs(own(runs.decoded(start)), golden[key], key)
      yield Finding("decode_logits_max_abs", key, value, limits["logits"])
    if not replays:
      return
    for key, got in itertools.chain(runs.arms(), runs.simulated()):
      arm, _, what = served.REPLAY.match(key).groups()
      # A resumption that loses nothing is not stored: it gives what arms B and A give.
      stored = {"armC": "armB_logits", "armE": "armA_logits"}.get(arm, key)
      if stored not in golden:
        continue
      group = arm.removeprefix("arm") if what == "logits" else "kv_max_abs"
      limit = limits["logits" if what == "logits" else "kv"]
      yield Finding(group, key, max_abs(own(got), golden[stored], stored), limit)


def compare_gradients(case: files.Case, quantize: tuple[str, ...]) -> Iterator[Finding]:
  """Loss, gradients and their norm; golden gradients are those of a run without quantisation."""
  golden = case.golden
  stored = {k: k[2:] for k in golden if k.startswith("g/")}
  if not stored and "loss" not in golden:
    return
  if case.ids.shape[1] < 2:
    raise ValueError(f"ids has length {case.ids.shape[1]}; a loss needs at least 2 tokens")
  model = released.load(_shapes(case.config, quantize), case.tensors)
  value, grads = jax.device_get(_gradient(model, case.ids, case.ngrams))
  if "loss" in golden:
    yield Finding("loss_abs", "loss", max_abs(value, golden["loss"], "loss"), LIMITS["loss"])
  named = released.to_released(grads, model.config)
  for key, name in stored.items():
    if name not in named:
      raise ValueError(f"{key} is stored; the model has no tensor {name}")
    scale = np.nan_to_num(np.abs(golden[key]).max(initial=0.0)) + 1e-3
    relative = max_abs(named[name], golden[key], key) / float(scale)
    yield Finding("grads_max_rel", key, min(relative, sys.float_info.max), GRADIENT_LIMIT)
  if "global_norm" in golden:
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in named.values()))
    relative = max_abs(norm, golden["global_norm"], "global_norm") / max(1e-6, float(norm))
    yield Finding("global_norm_rel", "global_norm", relative, GRADIENT_LIMIT)


def compare(case: files.Case, quantize: str) -> tuple[list[Finding], tuple[str, ...]]:
  """All findings of a case and the components that were rounded in its forward pass."""
  every = ("main_kv", "index", "window_kv")
  plans = {"on": [every], "off": [()], "auto": [files.rounded_components(case.golden)]}[quantize]
  if plans == [None]:
    # Nothing but logits: a rounded run is about 1 away from one that is not.
    plans = [(), every]
  passes = lambda plan: [*compare_forward(case, plan), *compare_served(case, plan)]
  runs = [(passes(plan), plan) for plan in plans]
  worst = lambda run: max((f.value for f in run[0] if f.limit is not True), default=0.0)
  found, plan = min(runs, key=worst)
  found += compare_engram(case)
  found += compare_gradients(case, every if quantize == "on" else ())
  return found, plan


def summary(found: Sequence[Finding]) -> dict[str, float | bool | None]:
  """Worst value by JSON key; None for what the file does not hold."""
  values = {}
  for key in _KEYS:
    own = [f.value for f in found if f.key == key]
    values[key] = None if not own else all(own) if isinstance(own[0], bool) else max(own)
  arms = {key: max(f.value for f in found if f.key == key) for key in _ARMS if _of(found, key)}
  values["replay"] = arms or None
  return values


def _of(found: Sequence[Finding], key: str) -> list[Finding]:
  return [f for f in found if f.key == key]


def show(found: Sequence[Finding], plan: tuple[str, ...]) -> None:
  """The worst array of every key as a table."""
  title = f"forward pass rounds {', '.join(plan)}" if plan else "no quantisation"
  table = rich.table.Table("quantity", "arrays", "worst", "value", "limit", "", title=title)
  for key in (*_KEYS, *_ARMS):
    own = _of(found, key)
    if not own:
      continue
    worst = (
        min(own, key=lambda f: f.value) if own[0].limit is True else max(own, key=lambda f: f.value)
    )
    text = ["equal" if v is True else "differs" if v is False else f"{v:.2g}" for v in worst[2:]]
    name = f"replay {key}" if key in _ARMS else key
    table.add_row(name, str(len(own)), worst.name, *text, "ok" if worst.within else "EXCEEDED")
  rich.console.Console(width=120).print(table)


class _Parser(argparse.ArgumentParser):

  def error(self, message):
    raise ValueError(message)


def _run(argv: Sequence[str] | None) -> int:
  parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--golden", required=True, help="golden file (.npz)")
  parser.add_argument("--args", required=True, help="its configuration (.json)")
  parser.add_argument("--weights", help="file with the w/ tensors (and ids) that --golden lacks")
  parser.add_argument("--quantize", choices=("auto", "on", "off"), default="auto")
  parser.add_argument("--json", action="store_true", help="end with one JSON object")
  flags = parser.parse_args(argv)
  case = files.read_case(flags.golden, flags.args, flags.weights)
  found, plan = compare(case, flags.quantize)
  known = {f.name for f in found} | _DESCRIPTION
  unknown = sorted(k for k in case.golden if k not in known and not k.startswith("w/"))
  if not found:
    names = ", ".join(unknown[:3]) or "weights alone"
    raise ValueError(f"--golden is {flags.golden}; it holds nothing that is compared ({names})")
  show(found, plan)
  if unknown:
    print(
        f"{len(unknown)} arrays have no meaning here and were not compared: {unknown[0]}, …",
        file=sys.stderr,
    )
  exceeded = [f for f in found if not f.within]
  for f in exceeded[:MOST_LINES]:
    what = "differs" if f.limit is True else f"is off by {f.value:.3g}; the limit is {f.limit:.0e}"
    print(f"{f.name} {what}", file=sys.stderr)
  if len(exceeded) > MOST_LINES:
    print(f"and {len(exceeded) - MOST_LINES} more arrays exceed their limit", file=sys.stderr)
  if flags.json:
    print(json.dumps(summary(found) | {"quantize": plan, "exceeded": [f.name for f in exceeded]}))
  return 1 if exceeded else 0


def main(argv: Sequence[str] | None = None) -> int:
  """The exit status of the module's docstring."""
  try:
    return _run(argv)
  except (ValueError, OSError) as e:
    print(f"check_parity: {e}", file=sys.stderr)
    return 2


if __name__ == "__main__":
  sys.exit(main())
