"""The training run: data, steps, checkpoints, journal, and what the terminal shows."""

import functools
import hashlib
import math
import pathlib
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.console
import rich.progress
from flax import nnx
from jax.sharding import Mesh

from deepseek_jax import distributed, sharding
from deepseek_jax import tokenizer as tok
from deepseek_jax.checkpoint.training import Checkpoints, check_config
from deepseek_jax.config import Config
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.schedule import Schedule
from deepseek_jax.serve import generate
from deepseek_jax.serve.sampling import Sampling
from deepseek_jax.train import conversations, data, step, turns
from deepseek_jax.train.journal import Journal
from deepseek_jax.train.on_policy import OnPolicy, load_teacher
from deepseek_jax.train.turns import Views


class Data(NamedTuple):
  """Tokenizer, rows and batches of the training side, and packed evaluation batches [B, T].

  A task has neither rows nor evaluation; distillation has a teacher.
  """

  tokenizer: tok.Tokenizer
  views: Views | None
  pipeline: data.Pipeline | OnPolicy
  held_out: list[data.Batch]
  teacher: tuple[Transformer, ...] = ()


def load_data(config: Config, mesh: Mesh | None = None) -> Data:
  """Conversations of `config.data`, split and packed; responses are written on the run's mesh.

  Raises:
    ValueError: no train section, an unfit conversation, a model that does not fit the tokenizer, an
      empty side of the split.
    OSError: `data.source` cannot be read.
  """
  if config.train is None:
    raise ValueError("train is None; a training run needs a train section")
  d, t, m = config.data, config.train, config.model
  tokenizer = tok.from_name(d.tokenizer)
  if m.vocab_size < tokenizer.vocab_size:
    raise ValueError(
        f"model.vocab_size is {m.vocab_size}; it must be at least {tokenizer.vocab_size} for"
        f" data.tokenizer {d.tokenizer!r}"
    )
  order = m.engram_max_ngram_size if m.engram_layer_ids else 0
  classes = tok.token_classes(tokenizer) if order else None
  if order and m.engram_compressed_vocab_size != classes.max() + 1:
    raise ValueError(
        f"model.engram_compressed_vocab_size is {m.engram_compressed_vocab_size}; it must be"
        f" {classes.max() + 1}, the classes of data.tokenizer {d.tokenizer!r}"
    )
  graphdef, _ = step.abstract_model(config)
  written = functools.partial(OnPolicy, config, tokenizer, graphdef, mesh=mesh)
  if t.rollout is not None and t.rollout.prompts != "data":
    return Data(tokenizer, None, written(), [], load_teacher(config, mesh))
  found = (
      conversations.chatterbot_conversations()
      if d.source == "chatterbot"
      else conversations.read_jsonl(d.source)
  )
  encoded = conversations.encode_conversations(found, tokenizer, t.seq_len, d.truncate)
  examples = encoded.examples
  how = dict(window=m.sliding_window, multiple=math.lcm(*Schedule.from_config(m).ratios))
  if t.replay is not None and d.truncate:
    examples = [turns.cut(each, t.replay, seq_len=t.seq_len, **how) for each in examples]
  kept = [example for example in examples if example.loss.any()]
  training, held_out = (
      Views(side, replay=t.replay, seed=t.seed, **how)
      for side in data.split(kept, d.eval_fraction, t.seed)
  )
  pipeline = data.Pipeline(
      training, tokenizer, seq_len=t.seq_len, batch_size=t.batch_size,
      accumulation=t.accumulation, ngram_order=order,
  )  # fmt: skip
  collate = lambda rows: data.collate(held_out, rows, t.seq_len, tokenizer.pad_id, classes, order)
  batches = [collate(rows) for rows in _batches(held_out, config)]
  if t.rollout is not None:
    pipeline = written(training.examples)
  return Data(tokenizer, training, pipeline, batches, load_teacher(config, mesh))


def _batches(views: Views, config: Config) -> list[list[list[int]]]:
  t = config.train
  capacity = (t.seq_len,) if t.replay is None else (t.seq_len, t.replay.decoder_len)
  count = len(views.examples)
  rows = data.pack([views.counts(i) for i in range(count)], capacity, range(count))
  rows += [[]] * (-len(rows) % t.batch_size)
  return [rows[i : i + t.batch_size] for i in range(0, len(rows), t.batch_size)]


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _mesh(config: Config) -> Mesh | None:
  """The mesh of the run; None for one device, which is the first of those that are there."""
  alone = config.mesh.devices == 1 and jax.process_count() == 1
  return None if alone else sharding.make_mesh(config.mesh)


def _kept(config: Config, state: step.TrainState) -> step.TrainState:
  """What a checkpoint holds: all, or all but the base that `train.init` has."""
  return state._replace(params=step.changing(config, state.params))


def _placed(batch: data.Batch, mesh: Mesh | None) -> data.Batch:
  """A batch that every process has packed, on the devices of all."""
  if mesh is None:
    return batch
  specs = data.batch_specs(batch, leading=batch.tokens.ndim - 2)
  return sharding.put(batch, sharding.placed(specs, mesh))


class _Display:
  """A progress bar on a terminal, a line at most every few seconds elsewhere, on standard error."""

  SECONDS = 5.0

  def __init__(self, start: int, steps: int):
    self.console = rich.console.Console(
        stderr=True, highlight=False, markup=False, soft_wrap=True, quiet=not distributed.is_main()
    )
    self._last = -math.inf
    self._steps = steps
    self._bar = rich.progress.Progress(
        rich.progress.TextColumn("step {task.completed}/{task.total}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s"),
        rich.progress.TimeRemainingColumn(),
        console=self.console,
        disable=not self.console.is_terminal,
    )
    self._task = self._bar.add_task("", total=steps, completed=start, loss="–", speed="–")

  def __enter__(self) -> "_Display":
    self._bar.start()
    return self

  def __exit__(self, *_: Any) -> None:
    self._bar.stop()

  def say(self, text: str) -> None:
    self.console.print(text)

  def step(self, record: dict[str, Any]) -> None:
    done, speed = record["step"], record["tokens_per_second"]
    shown = "–" if speed is None else f"{speed:,.0f}"
    self._bar.update(self._task, completed=done, loss=f"{record['loss']:.3f}", speed=shown)
    now = time.monotonic()
    due = now - self._last > self.SECONDS or done == self._steps or "eval_loss" in record
    if not self.console.is_terminal and due:
      self._last = now
      left = "" if speed is None else f"  ETA {(self._steps - done) * record['seconds']:.0f} s"
      held_out = f"  held out {record['eval_loss']:.4f}" if "eval_loss" in record else ""
      loss = f"loss {record['loss']:.4f}{held_out}"
      self.say(f"step {done}/{self._steps}  {loss}  {shown} tokens/s{left}")


class _Trace:
  """A profiler trace of `count` steps from step `first` on."""

  def __init__(self, folder: pathlib.Path, first: int, count: int):
    self._folder, self._first, self._last = folder, first, first + count - 1

  def before(self, now: int) -> None:
    if now == self._first <= self._last:
      jax.profiler.start_trace(self._folder)

  def after(self, now: int, metrics: step.Metrics) -> None:
    if now == self._last >= self._first:
      jax.block_until_ready(metrics)
      jax.profiler.stop_trace()


def _open(config: Config, workdir: pathlib.Path, resume: bool) -> Checkpoints:
  """Checkpoints of the workdir, after every reason to refuse it."""
  checkpoints = Checkpoints(workdir / "checkpoints", keep=config.train.keep_checkpoints)
  steps = checkpoints.steps()
  if resume:
    if not steps:
      raise ValueError(f"workdir {workdir} holds no checkpoint to resume; start without --resume")
    check_config(checkpoints.config(), config)
  elif steps:
    check_config(checkpoints.config(), config)
    raise ValueError(
        f"workdir {workdir} holds checkpoints up to step {steps[-1]}; pass --resume to continue"
        " them, or another workdir"
    )
  elif (workdir / "metrics.jsonl").exists():
    raise ValueError(f"workdir {workdir} holds the metrics of a run; choose another workdir")
  return checkpoints


def run(
    config: Config, workdir: str | pathlib.Path, resume: bool = False, *, profile: int = 0
) -> dict[str, Any]:
  """Trains `config` in `workdir`.

  Writes `checkpoints/` (from step 0 on, so that any kill can be resumed), `metrics.jsonl`,
  `tensorboard/`, and at the end `loss.png` and `sample.txt`. On SIGTERM the step in work is
  finished and checkpointed and the function returns. A resumed run continues bit for bit.

  Args:
    config: with a train section.
    workdir: of this experiment alone.
    resume: continue from the newest whole checkpoint.
    profile: number of steps to trace for xprof, after the first two of this call, in `profile/`.

  Returns:
    `steps` (finished), `first_loss` and `last_loss` (nats per target token), `eval_loss` (last one,
    or None), `tokens_per_second` (median over the steps of this call, without the first; None if
    there are none), `compile_seconds` (of the step; None if none ran).

  Raises:
    ValueError: a workdir that holds another configuration's checkpoint, or any without `resume`;
      `resume` without a checkpoint, or with none that is whole; unfit data.
    FloatingPointError: a loss that is not finite; checkpoints before it are kept.
  """
  if config.train is None:
    raise ValueError("train is None; a training run needs a train section")
  workdir = pathlib.Path(workdir)
  # Before anything that waits for all: hosts that differ would hang, or train apart.
  distributed.agree("configuration", _digest(f"{resume} {config.to_json()}"))
  checkpoints = _open(config, workdir, resume)
  mesh = _mesh(config)
  source = load_data(config, mesh)
  batches = iter(source.pipeline)
  distributed.agree("data", _digest(batches.get_state()["data"]))
  if resume:
    # The base, if there is one, is not saved again.
    base = step.base_parameters(config, mesh) if config.train.init else None
    wanted = step.abstract_state(config, mesh)
    restored = checkpoints.restore(wanted._replace(params=step.changing(config, wanted.params)))
    batches.set_state(restored.iterator)
    checkpoints.set_aside(restored.damaged)
    checkpoints.sweep()
    state, done = restored.state, restored.step
    if base is not None:
      state = state._replace(params=nnx.merge_state(base, state.params))
    del restored, base
  else:
    # Committed to its device like a restored state, so that both run the same compiled program.
    state, done = step.init_state(config, mesh), 0
    if mesh is None:
      state = jax.device_put(state, jax.local_devices()[0])
    workdir.mkdir(parents=True, exist_ok=True)
    checkpoints.save(0, _kept(config, state), batches.get_state(), config)
  journal = Journal(workdir, done, writes=distributed.is_main())
  try:
    with distributed.Terminations() as stop, _Display(done, config.train.steps) as display:
      training = _Training(config, mesh, source, batches, checkpoints, journal, display)
      state = training.go(state, done, stop, _Trace(workdir / "profile", done + 3, profile))
      if not stop.asked:
        training.finish(state, workdir)
      elif training.done < config.train.steps:
        display.say(f"stopped at step {training.done}; continue with --resume")
    return training.summary()
  finally:
    journal.close()
    checkpoints.close()


class _Training:
  """The loop and what it needs."""

  def __init__(
      self, config: Config, mesh: Mesh | None, source: Data, batches: data.BatchIterator | OnPolicy,
      checkpoints: Checkpoints, journal: Journal, display: _Display,
  ):  # fmt: skip
    self._config, self._mesh, self._source, self._batches = config, mesh, source, batches
    self._checkpoints, self._journal, self._display = checkpoints, journal, display
    self._graphdef, _ = step.abstract_model(config)
    self._evaluate = step.make_eval(self._graphdef, config, mesh)
    self._held_out = [_placed(batch, mesh) for batch in source.held_out]
    self._teacher = source.teacher
    self._compile_seconds: float | None = None
    self._speeds: list[float] = []
    self.done = 0

  def go(
      self, state: step.TrainState, done: int, stop: distributed.Terminations, trace: _Trace
  ) -> step.TrainState:
    """Steps up to the last one or until `stop` is asked for; the last state is checkpointed."""
    t = self._config.train
    self.done = done
    train_step = step.make_step(self._graphdef, self._config, self._mesh)
    pending: tuple[int, step.Metrics, dict[str, float]] | None = None
    started = time.monotonic()
    for now in range(done + 1, t.steps + 1):
      # Dispatch returns at once: this batch is packed, and the last step's metrics are written,
      # while a step runs.
      if t.rollout is not None:
        self._batches.see(state.params)
      batch = _placed(next(self._batches).batch, self._mesh)
      written = {} if t.rollout is None else self._batches.metrics
      if self._compile_seconds is None:
        self._display.say("compiling the step")
        began = time.monotonic()
        train_step = train_step.lower(state, batch, *self._teacher).compile()
        self._compile_seconds = time.monotonic() - began
        started = time.monotonic()
      trace.before(now)
      state, metrics = train_step(state, batch, *self._teacher)
      trace.after(now, metrics)
      if pending is not None:
        started = self._report(*pending, started)
      pending = now, metrics, written
      self.done = now
      evaluates = now % t.eval_every == 0 or now == t.steps
      stops = stop.agreed()
      saves = now % t.checkpoint_every == 0 or now == t.steps or stops
      if evaluates or saves:
        started = self._report(*pending, started, state.params if evaluates else None)
        pending = None
      if saves:
        kept = _kept(self._config, state)
        self._checkpoints.save(now, kept, self._batches.get_state(), self._config)
        started = time.monotonic()
        if stops:
          break
    return state

  def _report(
      self, now: int, metrics: step.Metrics, written: dict[str, float], started: float,
      params: nnx.State | None = None,
  ) -> float:  # fmt: skip
    """Writes a step's metrics; returns when the next step began, in seconds."""
    values = {name: float(value) for name, value in jax.device_get(metrics)._asdict().items()}
    ended = time.monotonic()
    if not math.isfinite(values["loss"]) or not math.isfinite(values["grad_norm"]):
      raise FloatingPointError(
          f"step {now}: loss {values['loss']}, gradient norm {values['grad_norm']}; the last"
          f" checkpoint is of step {max(self._checkpoints.steps())}"
      )
    seconds = ended - started
    speed = values["tokens"] / seconds
    record = {"step": now, **values, **written, "seconds": seconds, "tokens_per_second": speed}
    self._speeds.append(speed)
    if params is not None and self._held_out:
      record["eval_loss"] = self.eval_loss(params)
      ended = time.monotonic()
    self._journal.write(record)
    self._display.step(record)
    return ended

  def eval_loss(self, params: nnx.State) -> float:
    """Mean nll over the response tokens of the held-out side, in nats."""
    sums = [self._evaluate(params, batch) for batch in self._held_out]
    nll, targets = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
    return float(nll / max(targets, 1.0))

  def finish(self, state: step.TrainState, workdir: pathlib.Path) -> None:
    """Loss curve, and a sample where one process has all parameters."""
    t = self._config.train
    self._journal.plot()
    if jax.process_count() > 1:
      return
    params = state.params
    if self._mesh is not None:
      params = jax.device_put(params, jax.local_devices()[0])
    model = nnx.merge(self._graphdef, params)
    tokenizer = self._source.tokenizer
    reply = generate.Engine(model, tokenizer, self._config.serve).generate(
        [generate.user_turn(tokenizer, t.sample_prompt, first=True)],
        max_new_tokens=t.sample_tokens, sampling=Sampling(temperature=0.7, seed=t.seed),
    ).replies[0]  # fmt: skip
    answer = tokenizer.decode(reply.tokens)
    (workdir / "sample.txt").write_text(f"user: {t.sample_prompt}\nassistant: {answer}\n")
    self._display.say(f"user: {t.sample_prompt}\nassistant: {answer}")

  def summary(self) -> dict[str, Any]:
    records = self._journal.records
    losses = [record["loss"] for record in records]
    held_out = [record["eval_loss"] for record in records if "eval_loss" in record]
    speeds = self._speeds[1:]
    return {
        "steps": self.done,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "eval_loss": held_out[-1] if held_out else None,
        "tokens_per_second": float(np.median(speeds)) if speeds else None,
        "compile_seconds": self._compile_seconds,
    }
