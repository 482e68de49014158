"""Trains on exact rows, decoder replay and both replays; measures the five serving arms of each.

  python scripts/experiment_replay.py [--quick] [--workdir=DIR] [--seeds=N] [--prompts=N]

The model is that of configs/retrieval.py unless --config says otherwise.

What is done is kept in the workdir: a run that was ended goes on where it was, phase by phase.
Writes `results.json`, `accuracy.png` and `cost.png` there. --quick is small, asserts that the
simulation of training equals serving and that the model has learned, and takes minutes.
"""

import dataclasses
import functools
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
      text_steps=0,
      text_documents=0,
      text_seeds=0,
  )  # fmt: skip
  full = Plan(
      teach=(
          Phase(200, 8, 256, 16, 48, facts=6, questions=16, gaps=(2, 48)),
          Phase(300, 8, 256, 24, 128, facts=8, questions=16, gaps=(2, 64), learning_rate=5e-3),
          Phase(
              150, 4, 1280, 64, 1024, facts=24, questions=24, gaps=(2, 64), learning_rate=5e-3
          ),
      ),
      tune=Phase(
          60, 2, 1152, 1024, 1024, questions=12, distances=(2, 8), gaps=(2, 64),
          learning_rate=2e-3,
      ),
      measures=(
          Measure("buried", Task(1024, 32), (2, 8, 16, 48)),
          Measure("recent", Task(1024, 8, farthest=48), (2, 8)),
          Measure("register", Task(256, gaps=(2, 64)), (1, 8), questions=1),
      ),
      prompts=512,
      seeds=3,
      text_steps=600,
      text_documents=192,
      text_seeds=3,
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


def _kept(path, like, make):
  """Parameters of a file, made and kept there if it does not exist."""
  from deepseek_jax.eval import replay_experiment as experiment

  if path.exists():
    return experiment.load(path, like)
  params = make()
  experiment.save(path, params)
  return params


def _learn(plan, config, seed, workdir, say):
  """The parameters of every training of one seed."""
  from deepseek_jax.eval import replay_experiment as experiment
  from deepseek_jax.train import step

  like, params = step.abstract_model(config)[1], None

  def go(name, phase, data_seed, params, replay=None):
    one = experiment.config_of(config, phase, replay)
    batch = lambda n: experiment.batch_of((seed, data_seed, n), phase, one)
    return experiment.train(one, batch, params, say.phase(f"seed {seed}, {name}", phase.steps))

  for number, phase in enumerate(plan.teach):
    make = functools.partial(go, f"phase {number}", phase, number, params)
    params = _kept(workdir / f"seed{seed}_taught{number}.npz", like, make)
  found = {}
  for training in experiment.TRAININGS:

    def tune(training=training):
      steps = experiment.equal_steps(config, plan.tune, training)
      phase = dataclasses.replace(plan.tune, steps=steps)
      replay = experiment.replay_of(training, config, plan.tune)
      return go(training, phase, 100, params, replay)

    found[training] = _kept(workdir / f"seed{seed}_{training}.npz", like, tune)
  return found


def _text(plan, config, seed, workdir, say) -> dict:
  """Costs in nats a byte of every training on text, of one seed."""
  from flax import nnx

  from deepseek_jax.eval import replay_experiment as experiment
  from deepseek_jax.eval import replay_text as text
  from deepseek_jax.train import step

  model = dataclasses.replace(config.model, vocab_size=264)
  config = dataclasses.replace(config, model=model)
  graphdef, like = step.abstract_model(config)
  whole, pieces = text.Pieces(512, 0, 0), text.Pieces(512, 6, 32)

  def go(name, pieces, steps, rate, data_seed, params, replay=None):
    one = text.config_of(config, pieces, steps=steps, lines=4, learning_rate=rate, replay=replay)
    batch = lambda n: text.batch_of((seed, data_seed, n), pieces, one)
    return experiment.train(one, batch, params, say.phase(f"text, seed {seed}, {name}", steps))

  make = functools.partial(go, "taught", whole, plan.text_steps, 1e-2, 0, None)
  base, found = _kept(workdir / f"text{seed}_taught.npz", like, make), {}
  for training in experiment.TRAININGS:
    replay = text.replay_of(training, pieces, config.model.sliding_window)
    path = workdir / f"text{seed}_{training}"
    make = functools.partial(go, training, pieces, plan.text_steps // 5, 3e-3, 1, base, replay)
    params = _kept(path.with_suffix(".npz"), like, make)
    if not path.with_suffix(".json").exists():
      say(f"text, seed {seed}, {training}: serving")
      held_out = text.documents(
          experiment.generator(20_000 + seed), pieces, config.model.sliding_window, held_out=True
      )
      served = text.costs(nnx.merge(graphdef, params), pieces, held_out, plan.text_documents)
      means = {arm: float(values.mean()) for arm, values in served.items()}
      experiment.write_json(path.with_suffix(".json"), means | text.by_distance(served))
    found[training] = json.loads(path.with_suffix(".json").read_text())
  return found


def main() -> dict:
  """Accuracies by training and arm, pooled over seeds and distances; details in results.json."""
  from flax import nnx

  from deepseek_jax.eval import replay_experiment as experiment
  from deepseek_jax.eval import resume
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
  cost = _cost(config)
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
  }
  texts = [_text(plan, config, seed, workdir, say) for seed in range(plan.text_seeds)]
  result["text_nats_after_boundary"] = {
      training: {
          name: sum(one[training][name]["1"][0] for one in texts) / len(texts)
          for name in ("B_over_A", "D_over_B")
      }
      for training in experiment.TRAININGS
      if texts
  }
  result["seconds"] = round(time.monotonic() - say.began)
  whole = {**result, "settings": measured, "text": texts}
  experiment.write_json(workdir / "results.json", whole)
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


def _cost(config) -> dict:
  """Ratios of a step on decoder replay, with 64 windows of prompt and response 15:1."""
  from deepseek_jax.eval import replay_cost

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
