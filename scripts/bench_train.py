"""Seconds per training step, compile time and peak memory, with spread, and what bounds them.

  python scripts/bench_train.py --config=configs/tiny.py
  python scripts/bench_train.py --config=tests/golden/yardstick_config.json --batch=2 \
      --length=512 --yardstick="python yardstick.py --batch 2 --length 512"

A released config.json is measured in f32, without quantisation, on the mean next-token
cross-entropy alone; a configs/*.py as it says. Tokens are random. `--config.field=value` overrides.
Every repeat is a process of its own. It times the gradient, the whole optimiser step, and then the
machine's own f32 matmuls. The share reached is the useful FLOPs of a step over its seconds and the
best matmul rate. Useful are the matmuls that the model's shapes need: linears with active experts
only, attention over window and selected entries, index scores over what a row may select from;
three times where gradients flow. Those of the optimiser are not counted.

`--yardstick` alternates with a command whose last line is JSON with {"seconds": {"median": …}}. The
ratio is its median over that of the gradient in the repeat before it: above 1, this is faster.
Exit status: 0, or 2 for bad input.
"""

import argparse
import collections
import dataclasses
import functools
import gzip
import json
import pathlib
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from flax import nnx

from deepseek_jax import cli
from deepseek_jax import config as configuration
from deepseek_jax import tokenizer as tok
from deepseek_jax.eval.programs import parameter_shapes
from deepseek_jax.ledger import Ledger
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.parameter_paths import path_names
from deepseek_jax.schedule import Schedule
from deepseek_jax.train import step
from deepseek_jax.train.data import Batch

# A released configuration brings no training section; balancing is off, as in the yardstick.
_YARDSTICK = dict(batch_size=2, seq_len=512, balance_loss=0.0, index_loss="frozen")
# Every repeat reports these; they get min, median and max over all repeats.
_SPREAD = (
    "seconds_per_step", "tokens_per_second", "gradient_seconds", "gradient_tokens_per_second",
    "compile_seconds", "gradient_compile_seconds", "peak_rss_bytes", "gradient_peak_rss_bytes",
    "matmul_flops_per_second", "share_of_matmul_rate", "gradient_share_of_matmul_rate",
    "share_in_xla",
)  # fmt: skip


def read_config(
    path: str, batch: int | None, length: int | None, overrides: Sequence[str]
) -> configuration.Config:
  """The experiment, with `batch` lines of `length` tokens where they are given.

  Raises:
    ValueError: an unknown field, no training section, or a value that the configuration refuses.
    OSError: no such file.
  """
  for flag in overrides:
    if not flag.startswith("--config."):
      raise ValueError(f"unknown argument {flag!r}; see --help for the flags")
  values = cli.load(path)
  if path.endswith(".json"):
    values.train.update(_YARDSTICK)
  config = configuration.Config.from_config_dict(cli.override(values, overrides))
  configuration.require(config.train is not None, "train", None, "a section of the configuration")
  sizes = {"batch_size": batch, "seq_len": length}
  sizes = {k: v for k, v in sizes.items() if v is not None}
  config = dataclasses.replace(config, train=dataclasses.replace(config.train, **sizes))
  Schedule.from_config(config.model)
  return config


def random_batch(config: configuration.Config, seed: int) -> Batch:
  """Tokens [1, B, T] drawn evenly; every target but the last of a line counts."""
  model, train = config.model, config.train
  shape = (train.batch_size, train.seq_len)
  tokens = np.random.default_rng(seed).integers(0, model.vocab_size, shape, dtype=np.int32)
  weights = np.ones(shape, np.float32)
  weights[:, -1] = 0
  ngrams = None
  if model.engram_layer_ids:
    classes = tokens % model.engram_compressed_vocab_size
    ngrams = np.stack([tok.ngrams(line, 0, model.engram_max_ngram_size) for line in classes])
  rows = Rows.of_segments(np.ones(shape, np.int32))
  batch = Batch(tokens, rows, ngrams, np.roll(tokens, -1, axis=1), weights)
  return jax.tree.map(lambda a: a[None], batch)


def useful_flops(config: configuration.Config) -> dict[str, float]:
  """FLOPs of one step that the model's shapes call for (see the module's docstring), by part.

  Two for a multiplication with its addition, of `batch_size` lines of `seq_len` tokens.
  """
  model, lines, length = config.model, config.train.batch_size, config.train.seq_len
  schedule = Schedule.from_config(model)
  trains_index = config.train.index_loss != "frozen"
  totals = collections.Counter(linear=0.0, attention=0.0, index=0.0)
  shapes = jax.tree_util.tree_flatten_with_path(step.abstract_model(config)[1])[0]
  for key, leaf in shapes:
    path = path_names(key)
    name = ".".join(path[2:]) if path[0] == "runs" else ".".join(path)
    if name.split(".")[-2:] == ["embed", "weight"] or "norm" in name:
      continue
    if not name.endswith(("_fn", ".weight")):
      continue
    rows = length
    if name == "attn.indexer.wk.weight":
      rows = length // schedule.runs[int(path[1])][0].ratio
    flops = 2.0 * leaf.size * rows * lines
    if name.startswith("ffn.experts."):
      flops *= model.num_experts_per_tok / model.n_routed_experts
    indexer = "indexer" in path
    totals["index" if indexer else "linear"] += flops * (1 if indexer and not trains_index else 3)
  seen = np.arange(1, length + 1)
  for spec in schedule.layers:
    entries = seen // spec.ratio if spec.ratio else np.zeros(length, int)
    keys = np.minimum(seen, model.sliding_window) + np.minimum(entries, model.index_topk)
    # Logits and values.
    per_key = 2 * 2.0 * model.num_attention_heads * model.head_dim
    totals["attention"] += 3 * lines * per_key * keys.sum()
    if spec.selects:
      if spec.in_pool:
        pool = model.candidate_topk_blocks * model.candidate_block_size
        entries = np.minimum(entries, pool)
      per_entry = 2.0 * model.index_n_heads * (model.index_head_dim + 1)
      totals["index"] += lines * per_entry * entries.sum() * (3 if trains_index else 1)
  return dict(totals) | {"total": sum(totals.values())}


def matmul_rate(sizes: Iterable[int], seconds: float = 1.0) -> float:
  """Best FLOPs a second of a square f32 product, of all tries within `seconds` a size."""
  best = 0.0
  product = jax.jit(jnp.matmul)
  for n in sizes:
    a = jnp.ones((n, n), jnp.float32)
    product(a, a).block_until_ready()
    stop, tries = time.perf_counter() + seconds, 0
    while tries < 3 or time.perf_counter() < stop:
      start = time.perf_counter()
      product(a, a).block_until_ready()
      best = max(best, 2.0 * n**3 / (time.perf_counter() - start))
      tries += 1
  return best


def top_ops(compiled: Any, call: Callable[[], Any], count: int) -> list[dict[str, Any]] | None:
  """The operations that one call spends most time in, by the source names XLA kept for them.

  Time inside nested operations counts for these alone. Threads add up.

  Returns:
    `op_name`, `seconds` and `share` of all, or None where the profiler wrote no trace.
  """
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      jax.block_until_ready(call())
    traces = sorted(pathlib.Path(folder).glob("plugins/profile/*/*.trace.json.gz"))
    if not traces:
      return None
    with gzip.open(traces[-1]) as file:
      events = json.load(file)["traceEvents"]
  names = dict(
      re.findall(r"%?([\w.\-]+) = .*?metadata=\{[^}]*?op_name=\"([^\"]*)\"", compiled.as_text())
  )
  totals = collections.Counter()
  for op, duration in self_times(events):
    totals[re.sub(r"\d+", "#", names.get(op, op))] += duration / 1e6
  everything = sum(totals.values())
  return [
      {"op_name": name, "seconds": seconds, "share": seconds / everything}
      for name, seconds in totals.most_common(count)
  ] or None


def self_times(events: Iterable[dict[str, Any]]) -> Iterable[tuple[str, float]]:
  """(HLO operation, microseconds without those of operations nested in it) of trace events."""
  threads = collections.defaultdict(list)
  for e in events:
    if e.get("ph") == "X" and "hlo_op" in e.get("args", {}):
      threads[e["pid"], e["tid"]].append((e["ts"], -e["dur"], e["args"]["hlo_op"]))
  for own in threads.values():
    open_ops: list[list[Any]] = []  # [end, operation, own time], outermost first
    for start, minus, op in sorted(own):
      while open_ops and open_ops[-1][0] <= start:
        yield tuple(open_ops.pop()[1:])
      if open_ops:
        open_ops[-1][2] += minus
      open_ops.append([start - minus, op, -minus])
    yield from (tuple(o[1:]) for o in open_ops)


def _peak_rss() -> int:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _compile(fn: Any, *args: Any) -> tuple[Any, float]:
  start = time.perf_counter()
  compiled = fn.lower(*args).compile()
  return compiled, time.perf_counter() - start


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
  start = time.perf_counter()
  out = jax.block_until_ready(call())
  return time.perf_counter() - start, out


def _measure_gradient(config: configuration.Config, steps: int, top: int) -> dict[str, Any]:
  graph, shapes = step.abstract_model(config)
  batch = random_batch(config, 0)
  gradient, compiling = _compile(jax.jit(step.make_gradient(graph, config)), shapes, batch)
  init = lambda: Transformer(config.model, config.compute, rngs=nnx.Rngs(config.train.seed))
  params = jax.jit(lambda: nnx.state(init()))()
  call = lambda: gradient(params, batch)
  _timed(call)
  seconds = [_timed(call)[0] for _ in range(steps)]
  return {
      "gradient_seconds": seconds,
      "gradient_compile_seconds": [compiling],
      "gradient_peak_rss_bytes": [_peak_rss()],
      "top_ops": top_ops(gradient, call, top) if top else None,
  }


def _measure_step(config: configuration.Config, steps: int) -> dict[str, Any]:
  graph, _ = step.abstract_model(config)
  state = step.init_state(config)
  train, compiling = _compile(step.make_step(graph, config), state, random_batch(config, 0))
  seconds = []
  for i in range(-1, steps):  # The first step is not timed.
    if i == 0:
      start = time.perf_counter()
    batch = random_batch(config, i + 1)
    took, (state, _) = _timed(functools.partial(train, state, batch))
    seconds.append(took)
  wall = time.perf_counter() - start
  return {
      "seconds_per_step": seconds[1:],
      "compile_seconds": [compiling],
      "peak_rss_bytes": [_peak_rss()],
      "share_in_xla": [sum(seconds[1:]) / wall],
  }


def measure(
    config: configuration.Config, steps: int, sizes: Sequence[int], top: int
) -> dict[str, Any]:
  """One repeat, in this process: seconds of `steps` gradients and `steps` steps, and the rest."""
  found = _measure_gradient(config, steps, top) | _measure_step(config, steps)
  # Last, so that its operands are not part of the peak.
  rate, flops = matmul_rate(sizes), useful_flops(config)
  batch, length = config.train.batch_size, config.train.seq_len
  for prefix, key in (("", "seconds_per_step"), ("gradient_", "gradient_seconds")):
    found[f"{prefix}tokens_per_second"] = [batch * length / s for s in found[key]]
    reached = flops["total"] / statistics.median(found[key])
    found[f"{prefix}share_of_matmul_rate"] = [reached / rate]
  return found | {
      "matmul_flops_per_second": [rate],
      "batch": batch,
      "length": length,
      "parameters": Ledger.of(config.model, parameter_shapes(config)).parameters["total"],
      "useful_flops": flops,
  }


def last_json(command: Sequence[str]) -> dict[str, Any]:
  """Runs a command and reads the JSON object in its last line of standard output.

  Raises:
    ValueError: it fails, or ends otherwise; the message is its last line of standard error.
  """
  try:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
  except OSError as e:
    raise ValueError(f"{command[0]} does not start: {e}") from None
  if done.returncode:
    reason = (done.stderr.strip() or "no message").splitlines()[-1]
    raise ValueError(f"{shlex.join(command)} ended with status {done.returncode}: {reason}")
  try:
    found = json.loads(done.stdout.strip().splitlines()[-1])
  except (ValueError, IndexError):
    found = None
  if not isinstance(found, dict):
    raise ValueError(f"{shlex.join(command)} must end with a line that is a JSON object")
  return found


def spread(values: Sequence[float]) -> dict[str, float]:
  """Smallest, middle and largest value."""
  return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def repeat(own: Sequence[str], repeats: int, yardstick: Sequence[str] | None) -> dict[str, Any]:
  """Runs `own` and the yardstick in turn, one process at a time, and gathers their figures."""
  runs, theirs = [], []
  for _ in range(repeats):
    runs.append(last_json(own))
    if yardstick:
      seconds = last_json(yardstick).get("seconds")
      if not isinstance(seconds, dict) or not isinstance(seconds.get("median"), int | float):
        raise ValueError(f"seconds.median is missing in the JSON of {shlex.join(yardstick)}")
      theirs.append(seconds["median"])
  gathered = {k: spread([v for run in runs for v in run[k]]) for k in _SPREAD}
  gathered |= {k: v for k, v in runs[-1].items() if k not in _SPREAD}
  gathered |= {"repeats": repeats, "yardstick_seconds": None, "yardstick_ratio": None}
  if theirs:
    ours = [statistics.median(run["gradient_seconds"]) for run in runs]
    ratios = [other / mine for other, mine in zip(theirs, ours)]
    gathered |= {"yardstick_seconds": spread(theirs), "yardstick_ratio": spread(ratios)}
  return gathered


def show(found: dict[str, Any]) -> None:
  """Spread of every figure, and the operations that take most of a gradient."""
  console = rich.console.Console(width=160)
  title = f"{found['repeats']} × {found['batch']} lines of {found['length']} tokens"
  table = rich.table.Table("figure", "min", "median", "max", title=title)
  for key in (*_SPREAD, "yardstick_seconds", "yardstick_ratio"):
    if found[key]:
      table.add_row(key, *(f"{v:.4g}" for v in found[key].values()))
  console.print(table)
  parts = ", ".join(f"{k} {v / 1e9:.2f}" for k, v in found["useful_flops"].items())
  console.print(f"useful GFLOP of a step: {parts}")
  for op in found["top_ops"] or ():
    console.print(
        f"{op['seconds'] * 1e3:9.1f} ms {op['share']:6.1%}  {op['op_name'][-120:]}", markup=False
    )


class _Parser(argparse.ArgumentParser):

  def error(self, message):
    raise ValueError(message)


def _run(argv: Sequence[str] | None) -> None:
  parser = _Parser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument("--config", required=True, help="configs/*.py or a released config.json")
  parser.add_argument("--batch", type=int, help="lines; default the config's own, or 2")
  parser.add_argument("--length", type=int, help="tokens of a line; default likewise, or 512")
  parser.add_argument("--repeats", type=int, default=3, help="processes")
  parser.add_argument("--steps", type=int, default=5, help="timed steps of a process")
  parser.add_argument("--matmul", default="2048,4096", help="sizes of the square products")
  parser.add_argument("--top", type=int, default=10, help="operations to list; 0 runs no profiler")
  parser.add_argument("--yardstick", help="command to alternate with")
  parser.add_argument("--json", action="store_true", help="end with one JSON object")
  parser.add_argument("--once", action="store_true", help="one repeat in this process, as raw JSON")
  argv = list(sys.argv[1:] if argv is None else argv)
  flags, overrides = parser.parse_known_args(argv)
  for name in ("repeats", "steps"):
    value = getattr(flags, name)
    configuration.require(value >= 1, f"--{name}", value, "at least 1")
  sizes = [int(n) if n.isdigit() else 0 for n in flags.matmul.split(",")]
  configuration.require(min(sizes) >= 1, "--matmul", flags.matmul, "sizes above 0, as 2048,4096")
  config = read_config(flags.config, flags.batch, flags.length, overrides)
  if flags.once:
    cli.keep_heap()
    print(json.dumps(measure(config, flags.steps, sizes, flags.top)))
    return
  own = [sys.executable, __file__, *argv, "--once"]
  found = repeat(own, flags.repeats, shlex.split(flags.yardstick) if flags.yardstick else None)
  show(found)
  if flags.json:
    print(json.dumps(found | {"config": flags.config}))


def main(argv: Sequence[str] | None = None) -> int:
  """The exit status of the module's docstring."""
  try:
    _run(argv)
  except (ValueError, OSError) as e:
    print(f"bench_train: {e}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
