"""Trains on exact rows, decoder replay and both replays; measures the five serving arms of each.

  python scripts/experiment_replay.py [--quick] [--workdir=DIR] [--seeds=N] [--jobs=N] [--only=NAME]

The model is that of configs/retrieval.py unless --config says otherwise.

What is done is kept in the workdir: a run that was ended goes on where it was, phase by phase, and
more seeds may be asked for later. Writes `results.json`, `tables.md` and plots there. --quick is
small, asserts that the simulation of training equals serving and that the model has learned, and
takes minutes.
"""

import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import sys
import threading
import time

from absl import flags

from deepseek_jax import cli

_CONFIG = cli.config_flag("retrieval.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "Default: runs/replay, or runs/replay_quick.")
_QUICK = flags.DEFINE_bool("quick", False, "Small sizes, one seed, with assertions.")
_SEEDS = flags.DEFINE_integer("seeds", None, "Models of each training; 3, or 1 with --quick.")
_JOBS = flags.DEFINE_integer("jobs", None, "Processes that train; one a core, or 1 with --quick.")
_ONLY = flags.DEFINE_list("only", None, "Names of settings; default all.")


def _settings():
  """What is taught and measured, whole and quick."""
  from deepseek_jax.eval import brackets, replay_text, retrieval
  from deepseek_jax.eval.replay_experiment import Measure, Phase, Setting

  if _QUICK.value:
    teach = (
        Phase(120, 8, 256, 16, 48, questions=16, facts=6),
        Phase(60, 8, 256, 24, 128, questions=16),
    )
    tune = Phase(30, 4, 192, 96, 128, learning_rate=3e-3)
    buried = Measure("buried", retrieval.Task(128, 8), (4, 16), (0, 64, 129), 128)
    return (Setting("facts", 16, teach, tune, (buried,)),)
  facts = Setting(
      "facts",
      window=16,
      teach=(
          Phase(200, 8, 256, 16, 48, questions=16, facts=6),
          Phase(120, 8, 256, 24, 128, questions=16, learning_rate=5e-3),
          Phase(80, 4, 1280, 64, 1024, questions=24, facts=24, learning_rate=5e-3),
      ),
      tune=Phase(40, 2, 1408, 1024, 1024, distances=(2, 40), learning_rate=2e-3),
      measures=(
          Measure("buried", retrieval.Task(1024, 32), (2, 32), (0, 342, 683, 1025), 512),
          # The last W rows of seven layers.
          Measure("recent", retrieval.Task(256, 8, farthest=112), (2,), (0, 38, 75, 113), 512),
      ),
  )

  def nested(window: int) -> Setting:
    spans = (1, window, 2 * window, 4 * window, 129)
    return Setting(
        f"brackets_w{window}",
        window=window,
        teach=(Phase(400, 8, 256, 24, 240, questions=0, facts=0, schedule="cosine"),),
        tune=Phase(
            150, 4, 512, 100, 360, distances=(1, 16), facts=0, learning_rate=3e-3,
            schedule="cosine",
        ),
        measures=(
            Measure("open", brackets.Task(128, filler=(0.7, 0.7)), (1, 4, 16), spans, 176),
        ),
    )  # fmt: skip

  pieces = replay_text.Pieces(512, 0, 0), replay_text.Pieces(512, 6, 32)
  text = replay_text.Setting("text_w4", 4, *pieces, steps=400, tune_steps=100, documents=192)
  return (nested(4), nested(16), text, facts)


class _Say:
  """Lines on standard error; a bar would not survive a log file, nor several processes."""

  def __init__(self, began: float):
    self.began = began

  def __call__(self, text: str) -> None:
    sys.stderr.write(f"[{time.time() - self.began:6.0f} s] {text}\n")
    sys.stderr.flush()


def _run(job) -> None:
  import jax

  from deepseek_jax.eval import replay_experiment, replay_text

  setting, config, seed, workdir, say = job
  # Processes and seeds share what they compile.
  jax.config.update("jax_compilation_cache_dir", str(workdir / "compiled"))
  room = replay_text if isinstance(setting, replay_text.Setting) else replay_experiment
  if seed is None:
    case = functools.partial(room.tuning, setting, config)
    replay_experiment.steps_of(setting.name, case, workdir)
  else:
    room.run(setting, config, seed, workdir, say)


def _ends_with_parent() -> None:
  """A worker whose parent was killed would train on, beside the run that resumes it."""
  parent = multiprocessing.parent_process()
  watch = lambda: (parent.join(), os._exit(1))
  threading.Thread(target=watch, daemon=True).start()


def _all(jobs: list, processes: int) -> None:
  if processes == 1:
    for job in jobs:
      _run(job)
    return
  spawn = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(
      processes, mp_context=spawn, initializer=_ends_with_parent
  ) as pool:
    for done in [pool.submit(_run, job) for job in jobs]:
      done.result()


def main() -> dict:
  """Accuracies and costs, pooled over seeds; details in results.json."""
  from deepseek_jax.eval import replay_cost, replay_report
  from deepseek_jax.eval.replay_experiment import kept_json, write_json

  config, say = _CONFIG.value, _Say(time.time())
  settings = {one.name: one for one in _settings()}
  if _ONLY.value is not None:
    for name in _ONLY.value:
      if name not in settings:
        raise ValueError(f"--only is {name}; it must be of {', '.join(settings)}")
    settings = {name: settings[name] for name in _ONLY.value}
  seeds = _SEEDS.value if _SEEDS.value is not None else 1 if _QUICK.value else 3
  processes = _JOBS.value if _JOBS.value is not None else 1 if _QUICK.value else os.cpu_count()
  for name, value in (("seeds", seeds), ("jobs", processes)):
    if value < 1:
      raise ValueError(f"--{name} is {value}; it must be at least 1")
  workdir = _WORKDIR.value or ("runs/replay_quick" if _QUICK.value else "runs/replay")
  workdir = pathlib.Path(workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  for name, setting in settings.items():
    described = [dataclasses.asdict(setting), dataclasses.asdict(config)]
    described = json.loads(json.dumps(described))
    if kept_json(workdir / f"{name}_plan.json", lambda one=described: one) != described:
      raise ValueError(f"--workdir {workdir} holds another plan of {name}; choose another folder")
  # What is shared by seeds first, then the seeds.
  for some in ([None], range(seeds)):
    jobs = [(one, config, seed, workdir, say) for one in settings.values() for seed in some]
    _all(jobs, processes)

  def cost():
    rows = 64 * config.model.sliding_window
    train = dataclasses.replace(config.train, seq_len=rows, batch_size=1)
    one = dataclasses.replace(config, train=train)
    return {
        "flops_ratio": replay_cost.flops_ratio(one),
        "step_time_ratio": replay_cost.step_time_ratio(one, 3 if _QUICK.value else 9),
    }

  result = replay_report.results(settings.values(), seeds, workdir)
  result["cost"] = kept_json(workdir / "cost.json", cost)
  result["seconds"] = round(time.time() - say.began)
  write_json(workdir / "results.json", result)
  (workdir / "tables.md").write_text(replay_report.tables(result), encoding="utf-8")
  replay_report.plots(result, workdir)
  short = replay_report.short(result)
  if _QUICK.value:
    learned = short["accuracy"]["exact"]["A"]
    equal = result["simulation_equality"] < 1e-4 and result["arms_equality"] < 1e-3
    if not (learned > 0.8 and equal):
      raise RuntimeError(f"the quick experiment failed: {short}")
  return short


if __name__ == "__main__":
  cli.run(main)
