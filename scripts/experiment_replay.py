"""Trains on exact rows, decoder replay and both replays; measures the five serving arms of each.

  python scripts/experiment_replay.py [--quick] [--workdir=DIR] [--seeds=N] [--prompts=N]

The model is that of configs/retrieval.py unless --config says otherwise.

What is done is kept in the workdir: a run that was ended goes on where it was, phase by phase.
Writes `results.json`, `accuracy.png` and `cost.png` there. --quick is small, asserts that the
simulation of training equals serving and that the model has learned, and takes minutes.
"""

import dataclasses
import json
import pathlib
import sys
import time

from absl import flags

from deepseek_jax import cli

_CONFIG = cli.config_flag("retrieval.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "Default: runs/replay, or runs/replay_quick.")
_QUICK = flags.DEFINE_bool("quick", False, "Small sizes, one seed, with assertions.")
_SEEDS = flags.DEFINE_integer("seeds", None, "Models of each training.")
_PROMPTS = flags.DEFINE_integer("prompts", None, "Held-out prompts of each distance.")


def _plans():
  from deepseek_jax.eval.replay_experiment import Measure, Phase, Plan
  from deepseek_jax.eval.retrieval import Task

  quick = Plan(
      teach=(
          Phase(120, 8, 256, 16, 48, facts=6, questions=16),
          Phase(60, 8, 256, 24, 128, facts=8, questions=16),
      ),
      tune=Phase(30, 4, 192, 96, 128, questions=8, learning_rate=3e-3),
      measures=(Measure("buried", Task(128, 8), (4, 16)),),
      prompts=128,
      seeds=1,
  )  # fmt: skip
  full = Plan(
      teach=(
          Phase(150, 8, 256, 16, 48, facts=6, questions=16),
          Phase(150, 4, 1280, 64, 1024, facts=24, questions=24),
      ),
      tune=Phase(60, 2, 1152, 1024, 1024, questions=12, distances=(2, 24), learning_rate=3e-3),
      measures=(
          Measure("buried", Task(1024, 32), (2, 8, 16, 48)),
          Measure("recent", Task(1024, 8, farthest=112), (2, 8)),
      ),
      prompts=512,
      seeds=3,
  )  # fmt: skip
  return quick if _QUICK.value else full


class _Progress:
  """Lines on standard error; a bar would not survive a log file."""

  def __init__(self):
    self.began = time.monotonic()

  def __call__(self, text: str) -> None:
    sys.stderr.write(f"[{time.monotonic() - self.began:6.0f} s] {text}\n")
    sys.stderr.flush()

  def phase(self, name: str, steps: int):
    losses = []

    def tell(done: int, loss: float) -> None:
      losses.append(loss)
      if done % 50 == 0 or done == steps:
        recent = losses[-50:]
        self(f"{name}: step {done}/{steps}  loss {sum(recent) / len(recent):.3f}")

    return tell


def _learn(plan, config, seed, workdir, say):
  """The parameters of every training of one seed, from files where they are there."""
  from deepseek_jax.eval import replay_experiment as experiment
  from deepseek_jax.train import step

  like, params = step.abstract_model(config)[1], None
  for number, phase in enumerate(plan.teach):
    path = workdir / f"seed{seed}_taught{number}.npz"
    if path.exists():
      params = experiment.load(path, like)
      continue
    tell = say.phase(f"seed {seed}, phase {number}", phase.steps)
    one = experiment.config_of(config, phase)
    params = experiment.train(one, phase, params, (seed, number), tell)
    experiment.save(path, params)
  found = {}
  for training in experiment.TRAININGS:
    path = workdir / f"seed{seed}_{training}.npz"
    if path.exists():
      found[training] = experiment.load(path, like)
      continue
    replay = experiment.replay_of(training, config, plan.tune)
    steps = experiment.equal_steps(config, plan.tune, training)
    phase = dataclasses.replace(plan.tune, steps=steps)
    tell = say.phase(f"seed {seed}, {training}", steps)
    one = experiment.config_of(config, phase, replay)
    found[training] = experiment.train(one, phase, params, (seed, 100), tell)
    experiment.save(path, found[training])
  return found


def main() -> dict:
  """Accuracies by training and arm, pooled over seeds and distances; details in results.json."""
  from flax import nnx

  from deepseek_jax.eval import replay_cost, resume
  from deepseek_jax.eval import replay_experiment as experiment
  from deepseek_jax.train import step

  config, plan, say = _CONFIG.value, _plans(), _Progress()
  for name, value in (("seeds", _SEEDS.value), ("prompts", _PROMPTS.value)):
    if value is not None:
      if value < 1:
        raise ValueError(f"--{name} is {value}; it must be at least 1")
      plan = dataclasses.replace(plan, **{name: value})
  default = "runs/replay_quick" if _QUICK.value else "runs/replay"
  workdir = pathlib.Path(_WORKDIR.value or default)
  workdir.mkdir(parents=True, exist_ok=True)
  written = workdir / "plan.json"
  described = json.loads(json.dumps([dataclasses.asdict(plan), dataclasses.asdict(config)]))
  if written.exists() and json.loads(written.read_text()) != described:
    raise ValueError(f"--workdir {workdir} holds another plan; choose another folder")
  experiment.write_json(written, described)
  graphdef, _ = step.abstract_model(config)
  measured, errors = {}, []
  for seed in range(plan.seeds):
    for training, params in _learn(plan, config, seed, workdir, say).items():
      model = nnx.merge(graphdef, params)
      for measure in plan.measures:
        path = workdir / f"seed{seed}_{training}_{measure.name}.json"
        if not path.exists():
          say(f"seed {seed}, {training}: serving {measure.name}")
          served = experiment.served(model, measure, plan.prompts, 10_000 + seed)
          found = {str(d): experiment.summary(own) for d, own in served.items()}
          experiment.write_json(path, found)
        measured[f"{seed}/{training}/{measure.name}"] = json.loads(path.read_text())
      errors.append(experiment.simulation_error(model, config, plan.measures[0].task))
  pooled = _pooled(measured, plan)
  cost = _cost(config, plan, replay_cost, experiment)
  noise = [max(one["noise"].values()) for found in measured.values() for one in found.values()]
  result = {
      "serving_equality_max_abs": max(errors),
      "arms_equality_max_abs": max(noise),
      **cost,
      "accuracy": {
          training: {arm: pooled[training][plan.measures[0].name][arm] for arm in resume.ARMS}
          for training in experiment.TRAININGS
      },
      "seeds": plan.seeds,
      "prompts": plan.prompts,
      "seconds": round(time.monotonic() - say.began),
  }
  experiment.write_json(workdir / "results.json", {**result, "settings": measured})
  _plot(pooled, measured, plan, workdir)
  if _QUICK.value:
    learned = pooled["exact"][plan.measures[0].name]["A"]
    if not (learned > 0.8 and max(errors) < 1e-4 and max(noise) < 1e-3):
      raise RuntimeError(f"the quick experiment failed: accuracy {learned:.2f}, {result}")
  return result


def _pooled(measured: dict, plan) -> dict:
  """Mean accuracy by training, setting and arm."""
  from deepseek_jax.eval import resume
  from deepseek_jax.eval.replay_experiment import TRAININGS

  pooled = {}
  for training in TRAININGS:
    for measure in plan.measures:
      found = [
          one["accuracy"]
          for seed in range(plan.seeds)
          for one in measured[f"{seed}/{training}/{measure.name}"].values()
      ]
      means = {arm: sum(one[arm][0] for one in found) / len(found) for arm in resume.ARMS}
      pooled.setdefault(training, {})[measure.name] = means
  return pooled


def _cost(config, plan, replay_cost, experiment) -> dict:
  """Ratios of a step on decoder replay, with 64 windows of prompt and response 15:1."""
  rows = 64 * config.model.sliding_window
  train = dataclasses.replace(config.train, seq_len=rows, batch_size=1)
  config = dataclasses.replace(config, train=train)
  return {
      "flops_ratio": replay_cost.flops_ratio(config),
      "step_time_ratio": replay_cost.step_time_ratio(config, 3 if _QUICK.value else 9),
  }


def _plot(pooled: dict, measured: dict, plan, workdir: pathlib.Path) -> None:
  """`accuracy.png`: by arm, one bar a training. `cost.png`: KL of replays by distance."""
  import matplotlib.backends.backend_agg
  import matplotlib.figure

  from deepseek_jax.eval import resume
  from deepseek_jax.eval.replay_experiment import TRAININGS

  def figure(columns):
    one = matplotlib.figure.Figure(figsize=(5 * columns, 4), layout="constrained")
    matplotlib.backends.backend_agg.FigureCanvasAgg(one)
    return one, one.subplots(1, columns, squeeze=False)[0]

  drawing, panels = figure(len(plan.measures))
  for axes, measure in zip(panels, plan.measures):
    for i, training in enumerate(TRAININGS):
      values = [pooled[training][measure.name][arm] for arm in resume.ARMS]
      axes.bar([x + 0.27 * (i - 1) for x in range(len(values))], values, 0.25, label=training)
    axes.set_xticks(range(len(resume.ARMS)), list(resume.ARMS))
    axes.set(title=measure.name, xlabel="serving arm", ylabel="exact match", ylim=(0, 1))
    axes.legend(title="fine-tuned on")
  drawing.savefig(workdir / "accuracy.png", dpi=120)
  drawing, panels = figure(2)
  measure = plan.measures[0]
  for axes, pair in zip(panels, ("B_against_A", "D_against_C")):
    for training in TRAININGS:
      found = [measured[f"{seed}/{training}/{measure.name}"] for seed in range(plan.seeds)]
      kl = [
          sum(one[str(d)][pair]["kl"][0] for one in found) / plan.seeds for d in measure.distances
      ]
      axes.plot(measure.distances, kl, "o-", label=training)
    axes.set(title=pair.replace("_", " "), xlabel="tokens after the boundary", ylabel="KL (nats)")
    axes.set_yscale("log")
    axes.legend(title="fine-tuned on")
  drawing.savefig(workdir / "cost.png", dpi=120)


if __name__ == "__main__":
  cli.run(main)
