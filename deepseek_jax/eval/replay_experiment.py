"""Does training on bounded replay pay? One model, three ways to fine-tune, five ways to serve.

A model learns its task with exact rows. From there it is fine-tuned on exact rows, on decoder
replay and on both replays, for as many FLOPs each, and every arm of serving answers the same
held-out prompts. See `docs/replay_experiment.md`.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deepseek_jax.config import Config, ReplayConfig
from deepseek_jax.eval import brackets, resume, retrieval
from deepseek_jax.eval.resume import Answers, Prompts
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.train import step
from deepseek_jax.train.conversations import Example
from deepseek_jax.train.data import Batch, collate, pack
from deepseek_jax.train.turns import Turn, Views

TRAININGS = "exact", "decoder", "both"
# A configuration, and the batch of every step from 0.
Case = tuple[Config, Callable[[int], Batch]]


@dataclasses.dataclass(frozen=True)
class Phase:
  """Steps on lines of `length` tokens.

  Attributes:
    steps: of the phase.
    lines: of a step.
    length: tokens of a line.
    shortest, longest: tokens of a beginning; lengths are log-uniform, even, and several documents
      share a line.
    questions: turns of a document; 0: every answer in a beginning counts (brackets only).
    distances: tokens of a question, what stands before it included.
    facts: one fact in so many tokens of a beginning, at most 32 facts; 0: brackets instead.
    learning_rate: after `warmup` steps.
    warmup: steps.
    schedule: of `TrainConfig`.
  """

  steps: int
  lines: int
  length: int
  shortest: int
  longest: int
  questions: int = 8
  distances: tuple[int, int] = (2, 6)
  facts: int = 8
  learning_rate: float = 1e-2
  warmup: int = 20
  schedule: str = "constant"


@dataclasses.dataclass(frozen=True)
class Measure:
  """Prompts that are served.

  Attributes:
    name: of the measure.
    task: of the beginnings.
    distances: tokens from the boundary to the question's last.
    edges: spans are counted apart between these, in tokens.
    prompts: of every distance, and for brackets of every span.
  """

  name: str
  task: retrieval.Task | brackets.Task
  distances: tuple[int, ...]
  edges: tuple[int, ...]
  prompts: int


@dataclasses.dataclass(frozen=True)
class Setting:
  """A model, how it is taught and fine-tuned (in exact steps), and what is measured."""

  name: str
  window: int
  teach: tuple[Phase, ...]
  tune: Phase
  measures: tuple[Measure, ...]

  def config(self, config: Config) -> Config:
    """`config` with this setting's window."""
    model = dataclasses.replace(config.model, sliding_window=self.window)
    return dataclasses.replace(config, model=model)


def generator(*seed: int) -> np.random.Generator:
  """Of one stream of documents."""
  return np.random.Generator(np.random.PCG64(list(seed)))


def documents(rng: np.random.Generator, phase: Phase) -> Iterator[Example]:
  """Conversations of a phase, without end."""
  while True:
    n = np.exp(rng.uniform(np.log(phase.shortest), np.log(phase.longest + 1)))
    n = int(n) // 2 * 2
    if phase.facts:
      task = retrieval.Task(n, int(np.clip(n // phase.facts, 1, 32)))
      yield retrieval.conversation(rng, task, phase.questions, phase.distances)
    else:
      yield brackets.conversation(rng, brackets.Task(n), phase.questions, phase.distances)


def batch_of(seed: Sequence[int], phase: Phase, config: Config) -> Batch:
  """The batch of a step [1, lines, ...], of new documents; as many as fit."""
  t, model = config.train, config.model
  rng = generator(*seed)
  stream, examples, used = documents(rng, phase), [], 0
  while used < t.batch_size * t.seq_len:
    examples.append(next(stream))
    used += len(examples[-1].tokens)
  views = Views(
      examples, replay=t.replay, window=model.sliding_window, multiple=2, seed=int(seed[-1])
  )
  capacity = (t.seq_len,) if t.replay is None else (t.seq_len, t.replay.decoder_len)
  counts = [views.counts(i) for i in range(len(examples))]
  lines = pack(counts, capacity, range(len(examples)))[: t.batch_size]
  lines += [[]] * (t.batch_size - len(lines))
  batch = collate(views, lines, t.seq_len, retrieval.PAD)
  return jax.tree.map(lambda a: a[None], batch)


def config_of(config: Config, phase: Phase, replay: ReplayConfig | None = None) -> Config:
  """The configuration of a phase; with `replay` its lines have room for what is replayed."""
  w, length = config.model.sliding_window, phase.length
  if replay is not None and replay.encoder:
    # The largest replay of a turn comes with the farthest hit, at its own beginning.
    length += phase.questions * (w + phase.distances[1] + 3)
  train = dataclasses.replace(
      config.train, steps=phase.steps, batch_size=phase.lines, seq_len=length, replay=replay,
      learning_rate=phase.learning_rate, schedule=phase.schedule,
      warmup_steps=min(phase.warmup, phase.steps),
  )  # fmt: skip
  return dataclasses.replace(config, train=train)


def replay_of(training: str, config: Config, phase: Phase) -> ReplayConfig | None:
  """What a training simulates, with room for the turns of as many documents as share a line."""
  if training == "exact":
    return None
  turn = sum(phase.distances) // 2 + 1
  documents_a_line = max(1, phase.length // (phase.shortest + phase.questions * turn))
  rows = documents_a_line * phase.questions * (config.model.sliding_window + 1)
  return ReplayConfig(decoder_len=rows, encoder=0.5 if training == "both" else 0.0)


@functools.lru_cache(maxsize=4)
def _step(config: Config):
  return step.make_step(step.abstract_model(config)[0], config)


def train(
    config: Config, batch: Callable[[int], Batch], params: nnx.State | None,
    tell: Callable[[int, float], None],
) -> nnx.State:  # fmt: skip
  """Parameters after `config.train.steps` steps; a fresh optimiser each time.

  Args:
    config: of a phase; its model is drawn with seed `config.train.seed` if there are no `params`.
    batch: of a step, from 0.
    params: to go on from.
    tell: called with steps done and the loss.
  """
  state = step.init_state(config)
  if params is not None:
    state = state._replace(params=jax.tree.map(jnp.array, params))
  train_step = _step(dataclasses.replace(config, train=dataclasses.replace(config.train, seed=0)))
  for number in range(config.train.steps):
    state, metrics = train_step(state, batch(number))
    tell(number + 1, float(metrics.loss))
  return state.params


def flops(config: Config, batch: Batch) -> float:
  """Of a step by the compiler's count. Loops would be counted once, so there are none."""
  compute = dataclasses.replace(
      config.compute, scan_layers=False, row_chunk=config.train.seq_len, remat="none"
  )
  config = dataclasses.replace(config, compute=compute)
  lowered = _step(config).lower(step.abstract_state(config), batch)
  return lowered.compile().cost_analysis()["flops"]


def equal_steps(case: Callable[[str], Case]) -> dict[str, int]:
  """Steps of every training that take the FLOPs of the exact one."""
  cases = {training: case(training) for training in TRAININGS}
  found = {training: flops(one, batch(0)) for training, (one, batch) in cases.items()}
  steps = cases["exact"][0].train.steps
  return {training: round(steps * found["exact"] / value) for training, value in found.items()}


def of_steps(config: Config, steps: int) -> Config:
  """For another number of steps, with at most as many to warm up."""
  warmup = min(config.train.warmup_steps, steps)
  train = dataclasses.replace(config.train, steps=steps, warmup_steps=warmup)
  return dataclasses.replace(config, train=train)


def tuning(setting: Setting, config: Config, training: str, seed: int = 0) -> Case:
  """The fine-tuning of a training, for `setting.tune.steps` steps."""
  phase, config = setting.tune, setting.config(config)
  one = config_of(config, phase, replay_of(training, config, phase))
  return one, lambda number: batch_of((seed, 100, number), phase, one)


def steps_of(name: str, case: Callable[[str], Case], workdir: pathlib.Path) -> dict[str, int]:
  """`equal_steps` of a setting, counted once for all of its seeds."""
  return kept_json(workdir / f"{name}_steps.json", lambda: equal_steps(case))


def learn(
    name: str, teach: Sequence[Case], tune: Callable[[str], Case], steps: dict[str, int],
    workdir: pathlib.Path, say: Callable[[str], Any],
) -> Iterator[tuple[str, nnx.State]]:  # fmt: skip
  """Trainings and their parameters; what is in the workdir is not trained again.

  Args:
    name: of the setting and the seed.
    teach: phases, one going on from the other.
    tune: of a training, from where the last phase ended.
    steps: of every training.
    workdir: receives `NAME_taughtN.npz` and `NAME_TRAINING.npz`.
    say: is told how far it is.
  """
  like, params = step.abstract_model(teach[0][0])[1], None

  def go(what, case, params):
    tell = telling(say, f"{name}, {what}", case[0].train.steps)
    return lambda: train(*case, params, tell)

  for number, case in enumerate(teach):
    path = workdir / f"{name}_taught{number}.npz"
    params = kept(path, like, go(f"phase {number}", case, params))
  for training in TRAININGS:
    one, batch = tune(training)
    case = of_steps(one, steps[training]), batch
    yield training, kept(workdir / f"{name}_{training}.npz", like, go(training, case, params))


@functools.lru_cache(maxsize=64)
def prompts_of(measure: Measure, distance: int, seed: int) -> tuple[Prompts, ...]:
  """Held-out prompts in batches of one shape, the same for every model."""
  rng = generator(10_000 + seed, distance)
  if isinstance(measure.task, retrieval.Task):
    whole = retrieval.prompts(rng, measure.task, measure.prompts, distance)
    lines = 4
  else:
    spans = zip(measure.edges, measure.edges[1:])
    parts = [brackets.prompts(rng, measure.task, measure.prompts, distance, span) for span in spans]
    whole, lines = jax.tree.map(lambda *a: np.concatenate(a), *parts), 32
  count = -(-len(whole.beginnings) // lines)
  return tuple(
      jax.tree.map(lambda a, i=i: a[i * lines : (i + 1) * lines], whole) for i in range(count)
  )


def served(model: Transformer, measure: Measure, distance: int, seed: int) -> Answers:
  """What every arm answers."""
  arms = resume.Arms(model)
  parts = [
      resume.answered(arms.logits(one.beginnings, one.rests), one)
      for one in prompts_of(measure, distance, seed)
  ]
  return jax.tree.map(lambda *a: np.concatenate(a, axis=-1), *parts)


_simulated = jax.jit(
    lambda model, batch: model.logits(
        model(batch.tokens, batch.rows, None, batch.decoder).hidden
    )
)  # fmt: skip


def simulation_error(model: Transformer, measure: Measure, seed: int) -> float:
  """Largest difference of a turn's logits between training's simulation and arms B and D."""
  one = jax.tree.map(lambda a: a[:1], prompts_of(measure, max(measure.distances), seed)[0])
  w, worst = model.config.sliding_window, 0.0
  start, ask = one.beginnings[0], one.rests[0, 0]
  tokens = np.concatenate([start, ask, one.answers[0, :1]]).astype(np.int32)
  example = Example(tokens, np.arange(len(tokens)) == len(tokens) - 1)
  expected = resume.Arms(model).logits(one.beginnings, one.rests[:, :1], "BD")
  for arm, q in (("B", 0.0), ("D", 1.0)):
    turn = Turn(len(tokens) - 1, len(tokens), len(start) if q else 0)
    views = Views([example], replay=ReplayConfig(w + 1, q), window=w, turns=[[turn]])
    rows, _ = views.counts(0)
    batch = collate(views, [[0]], rows, retrieval.PAD)
    own = np.asarray(_simulated(model, batch))[0, batch.weights[0] > 0]
    worst = max(worst, float(np.abs(own - expected[arm][0, 0]).max()))
  return worst


def run(
    setting: Setting, config: Config, seed: int, workdir: pathlib.Path, say: Callable[[str], Any]
) -> None:
  """Trains and measures one seed; leaves `NAME_SEED_TRAINING_MEASURE_DISTANCE.npz` files."""
  own = setting.config(config)
  drawn = dataclasses.replace(own, train=dataclasses.replace(own.train, seed=seed))

  def teaching(number, phase):
    one = config_of(drawn, phase)
    return one, lambda n: batch_of((seed, number, n), phase, one)

  teach = [teaching(number, phase) for number, phase in enumerate(setting.teach)]
  tune = functools.partial(tuning, setting, config, seed=seed)
  steps = steps_of(setting.name, tune, workdir)
  graphdef, _ = step.abstract_model(own)
  for training, params in learn(f"{setting.name}_{seed}", teach, tune, steps, workdir, say):
    model = nnx.merge(graphdef, params)
    name = f"{setting.name}_{seed}_{training}"
    for measure in setting.measures:
      for distance in measure.distances:
        path = workdir / f"{name}_{measure.name}_{distance}.npz"
        if not path.exists():
          say(f"{name}: serving {measure.name}, {distance} tokens after the boundary")
          write_arrays(path, served(model, measure, distance, seed)._asdict())
    error = functools.partial(simulation_error, model, setting.measures[0], seed)
    kept_json(workdir / f"{name}_simulation.json", error)


def telling(say: Callable[[str], Any], name: str, steps: int) -> Callable[[int, float], None]:
  """Of `train`: a line every fifty steps, with the mean loss since the last."""
  losses = []

  def tell(done: int, loss: float) -> None:
    losses.append(loss)
    if done % 50 == 0 or done == steps:
      say(f"{name}: step {done}/{steps}  loss {sum(losses) / len(losses):.3f}")
      losses.clear()

  return tell


def kept(path: pathlib.Path, like: nnx.State, make: Callable[[], nnx.State]) -> nnx.State:
  """Parameters of a file, made and kept there if it does not exist."""
  if not path.exists():
    leaves = jax.tree.leaves(make())
    write_arrays(path, {f"{i:04d}": np.asarray(leaf) for i, leaf in enumerate(leaves)})
  found = read_arrays(path)
  return jax.tree.unflatten(
      jax.tree.structure(like), [jnp.asarray(found[k]) for k in sorted(found)]
  )


def kept_json(path: pathlib.Path, make: Callable[[], Any]) -> Any:
  """What a file says, made and kept there if it does not exist."""
  if not path.exists():
    write_json(path, make())
  return json.loads(path.read_text())


def write_arrays(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
  """A file that is whole or not there."""
  partial = path.with_suffix(".partial")
  with open(partial, "wb") as file:
    np.savez(file, **arrays)
  partial.rename(path)


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
  """What `write_arrays` wrote."""
  with np.load(path) as file:
    return {name: file[name] for name in file.files}


def write_json(path: pathlib.Path, value: Any) -> None:
  """A file that is whole or not there."""
  partial = path.with_suffix(".partial")
  partial.write_text(json.dumps(value, indent=1))
  partial.rename(path)
