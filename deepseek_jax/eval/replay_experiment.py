"""Does training on bounded replay pay? One task, three ways to fine-tune, five ways to serve.

A model learns to find buried facts with exact rows, documents growing as it does. From there it is
fine-tuned on exact rows, on decoder replay and on both replays, for as many FLOPs each, and every
arm of serving answers the same held-out prompts. See `docs/replay_experiment.md`.
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
from deepseek_jax.eval import resume, retrieval
from deepseek_jax.eval.retrieval import Task
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.train import step
from deepseek_jax.train.conversations import Example
from deepseek_jax.train.data import Batch, collate, pack
from deepseek_jax.train.turns import Turn, Views

TRAININGS = "exact", "decoder", "both"


@dataclasses.dataclass(frozen=True)
class Phase:
  """Steps on lines of `length` tokens.

  Attributes:
    steps: of the phase.
    lines: of a step.
    length: tokens of a line.
    shortest, longest: tokens of a beginning; lengths are log-uniform, even, and several documents
      share a line.
    facts: one fact in so many tokens of a beginning, at most 32 facts.
    questions: turns of a document.
    distances: tokens of a question, filler before it included.
    learning_rate: constant after `warmup` steps.
    aligned: see `Task`; None for half of the documents each.
    gaps: of registers, see `Task`; half of the documents hold them instead of facts.
    register_distances: as `distances`, of documents with registers.
  """

  steps: int
  lines: int
  length: int
  shortest: int
  longest: int
  facts: int = 8
  questions: int = 8
  distances: tuple[int, int] = (2, 6)
  learning_rate: float = 1e-2
  warmup: int = 20
  aligned: bool | None = True
  gaps: tuple[int, int] | None = None
  register_distances: tuple[int, int] = (1, 40)


@dataclasses.dataclass(frozen=True)
class Measure:
  """Prompts that are served: beginnings of a task, each asked for some of its facts.

  Attributes:
    name: of the setting.
    task: what is buried.
    distances: of the answer after the boundary, in tokens.
    questions: facts asked of a beginning, at evenly spaced depths; 1 for the register.
  """

  name: str
  task: Task
  distances: tuple[int, ...]
  questions: int = 8


@dataclasses.dataclass(frozen=True)
class Plan:
  """Of the experiment: how it teaches, fine-tunes (in exact steps) and measures.

  On text a model is taught `text_steps` and fine-tuned a fifth of these; see `replay_text`.
  """

  teach: tuple[Phase, ...]
  tune: Phase
  measures: tuple[Measure, ...]
  prompts: int
  seeds: int
  text_steps: int
  text_documents: int
  text_seeds: int


def generator(*seed: int) -> np.random.Generator:
  """Of one stream of documents."""
  return np.random.Generator(np.random.PCG64(list(seed)))


def documents(rng: np.random.Generator, phase: Phase) -> Iterator[Example]:
  """Conversations of a phase, without end."""
  while True:
    n = np.exp(rng.uniform(np.log(phase.shortest), np.log(phase.longest + 1)))
    n = int(n) // 2 * 2
    if phase.gaps is not None and rng.integers(2):
      task = Task(n, gaps=(phase.gaps[0], min(phase.gaps[1], n - 1)))
      most = (phase.length - n) // (phase.register_distances[1] + 1)
      questions = max(1, min(phase.questions, most))
      yield retrieval.conversation(rng, task, questions, phase.register_distances)
      continue
    facts = int(np.clip(n // phase.facts, 1, 32))
    aligned = bool(rng.integers(2)) if phase.aligned is None else phase.aligned
    task = Task(n, facts, aligned)
    yield retrieval.conversation(rng, task, phase.questions, phase.distances)


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
    length += phase.questions * (w + _farthest(phase) + 3)
  train = dataclasses.replace(
      config.train, steps=phase.steps, batch_size=phase.lines, seq_len=length, replay=replay,
      learning_rate=phase.learning_rate, schedule="constant",
      warmup_steps=min(phase.warmup, phase.steps),
  )  # fmt: skip
  return dataclasses.replace(config, train=train)


def _farthest(phase: Phase) -> int:
  return max(phase.distances[1], phase.register_distances[1] if phase.gaps else 0)


def replay_of(training: str, config: Config, phase: Phase) -> ReplayConfig | None:
  """What a training simulates of documents that fill a line each."""
  if training == "exact":
    return None
  documents_a_line = max(1, phase.length // (phase.shortest + phase.questions * 3))
  rows = documents_a_line * phase.questions * (config.model.sliding_window + 1)
  return ReplayConfig(decoder_len=rows, encoder=0.5 if training == "both" else 0.0)


def train(
    config: Config, batch: Callable[[int], Batch], params: nnx.State | None,
    tell: Callable[[int, float], None],
) -> nnx.State:  # fmt: skip
  """Parameters after `config.train.steps` steps; a fresh optimiser each time.

  Args:
    config: of a phase.
    batch: of a step, from 0.
    params: to go on from; None draws them.
    tell: called with steps done and the loss.
  """
  graphdef, _ = step.abstract_model(config)
  state = step.init_state(config)
  if params is not None:
    state = state._replace(params=jax.tree.map(jnp.array, params))
  train_step = step.make_step(graphdef, config)
  for number in range(config.train.steps):
    state, metrics = train_step(state, batch(number))
    tell(number + 1, float(metrics.loss))
  return state.params


@functools.lru_cache(maxsize=8)
def _flops(config: Config, phase: Phase, training: str) -> float:
  """Of a step by the compiler's count. Loops would be counted once, so there are none."""
  one = config_of(config, phase, replay_of(training, config, phase))
  compute = dataclasses.replace(
      one.compute, scan_layers=False, row_chunk=one.train.seq_len, remat="none"
  )
  one = dataclasses.replace(one, compute=compute)
  train_step = step.make_step(step.abstract_model(one)[0], one)
  lowered = train_step.lower(step.abstract_state(one), batch_of((0,), phase, one))
  return lowered.compile().cost_analysis()["flops"]


def equal_steps(config: Config, phase: Phase, training: str) -> int:
  """Steps that take the FLOPs of `phase.steps` exact ones."""
  if training == "exact":
    return phase.steps
  ratio = _flops(config, phase, "exact") / _flops(config, phase, training)
  return round(phase.steps * ratio)


def served(
    model: Transformer, measure: Measure, prompts: int, seed: int, lines: int = 32
) -> dict[int, dict[str, np.ndarray]]:
  """Logits of every arm, answers and depths by distance.

  Args:
    model: as trained.
    measure: the setting.
    prompts: of each distance, rounded up to whole beginnings.
    seed: of the prompts, the same for every model.
    lines: prompts that are served together.
  """
  arms, q = resume.Arms(model), measure.questions
  found: dict[int, dict[str, list]] = {}
  for distance in measure.distances:
    rng = generator(seed, distance)
    own = found.setdefault(distance, {"answers": [], "depths": []})
    for _ in range(-(-prompts // lines)):
      starts = [retrieval.beginning(rng, measure.task) for _ in range(lines // q)]
      asked = np.linspace(0, measure.task.facts - 1, q).round().astype(int)
      keys = lambda start, asked=asked: start.keys[asked] if measure.task.facts else [None]
      rests = np.stack([
          np.stack([retrieval.question(rng, key, distance) for key in keys(start)])
          for start in starts
      ])  # fmt: skip
      logits = arms.logits(np.stack([start.tokens for start in starts]), rests)
      for arm, value in logits.items():
        own.setdefault(arm, []).append(value.reshape(-1, value.shape[-1]))
      if measure.task.facts:
        answers = [start.values[asked] for start in starts]
        places = [start.places[asked] for start in starts]
      else:
        answers = [[start.register] for start in starts]
        places = [[start.set_at] for start in starts]
      own["answers"].append(np.concatenate(answers))
      own["depths"].append(np.concatenate(places))
  return {
      distance: {name: np.concatenate(parts) for name, parts in own.items()}
      for distance, own in found.items()
  }


def summary(found: dict[str, np.ndarray], depths: int = 4) -> dict[str, Any]:
  """Accuracies by arm, all together and by quarter of the depth, and what replays change."""
  answers = found["answers"]
  right = {arm: found[arm].argmax(-1) == answers for arm in resume.ARMS}
  edges = np.quantile(found["depths"], np.linspace(0, 1, depths + 1)[1:-1])
  at = np.searchsorted(edges, found["depths"], side="right")
  return {
      "n": len(answers),
      "edges": [float(edge) for edge in edges],
      "accuracy": {arm: resume.accuracy(right[arm]) for arm in resume.ARMS},
      "by_depth": {
          arm: [resume.accuracy(right[arm][at == d]) for d in range(depths)] for arm in resume.ARMS
      },
      "B_against_A": resume.difference(found["A"], found["B"], answers)._asdict(),
      "D_against_C": resume.difference(found["C"], found["D"], answers)._asdict(),
      "noise": {
          "A_E": float(np.abs(found["A"] - found["E"]).max()),
          "B_C": float(np.abs(found["B"] - found["C"]).max()),
      },
  }


def simulation_error(model: Transformer, config: Config, task: Task, seed: int = 0) -> float:
  """Largest difference of a turn's logits between training's simulation and arms B and D."""
  rng = generator(seed)
  w, worst = config.model.sliding_window, 0.0
  start = retrieval.beginning(rng, task)
  ask = retrieval.question(rng, start.keys[0], w // 2)
  tokens = np.concatenate([start.tokens, ask, start.values[:1]])
  example = Example(tokens, np.arange(len(tokens)) == len(tokens) - 1)
  expected = resume.Arms(model).logits(start.tokens[None], ask[None, None], "BD")
  run = jax.jit(lambda model, b: model.logits(model(b.tokens, b.rows, None, b.decoder).hidden))
  for arm, q in (("B", 0.0), ("D", 1.0)):
    turn = Turn(len(tokens) - 1, len(tokens), task.length if q else 0)
    views = Views([example], replay=ReplayConfig(w + 1, q), window=w, turns=[[turn]])
    rows, _ = views.counts(0)
    batch = collate(views, [[0]], rows, retrieval.PAD)
    own = np.asarray(run(model, batch))[0, batch.weights[0] > 0]
    worst = max(worst, float(np.abs(own - expected[arm][0, 0]).max()))
  return worst


def save(path: pathlib.Path, params: nnx.State) -> None:
  """Parameters as one file, whole or not there."""
  partial = path.with_suffix(".partial")
  with open(partial, "wb") as file:
    np.savez(file, *(np.asarray(leaf) for leaf in jax.tree.leaves(params)))
  partial.rename(path)


def load(path: pathlib.Path, like: nnx.State) -> nnx.State:
  """What `save` wrote."""
  with np.load(path) as file:
    leaves = [jnp.asarray(file[name]) for name in file.files]
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def write_json(path: pathlib.Path, value: Any) -> None:
  """A file that is whole or not there."""
  partial = path.with_suffix(".partial")
  partial.write_text(json.dumps(value, indent=1))
  partial.rename(path)
