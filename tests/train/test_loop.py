"""Laws of the run: a resumed run is the uninterrupted one, and refusals leave all as it was."""

import dataclasses
import functools
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from deepseek_jax.checkpoint.training import Checkpoints, load_model, names_of
from deepseek_jax.config import Config, DataConfig, ModelConfig, TrainConfig
from deepseek_jax.train import loop, step

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 50

MODEL = ModelConfig(
    vocab_size=264, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=3,
    num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_lora_rank=16,
    o_groups=1, n_routed_experts=4, num_experts_per_tok=2, sliding_window=8,
    compress_ratios=(0, 0, 1), kv_source_layer_ids=(2,), index_source_layer_ids=(2,),
    index_n_heads=2, index_head_dim=32, index_topk=4, hc_mult=2, hc_sinkhorn_iters=2,
    max_position_embeddings=64, engram_layer_ids=(2,), engram_num_embeddings=(173,),
    engram_vocab_size=50, engram_n_heads=1, engram_head_dim=32, engram_compressed_vocab_size=235,
    engram_max_ngram_size=4,
)  # fmt: skip
TRAIN = TrainConfig(
    steps=STEPS, batch_size=2, seq_len=32, learning_rate=1e-2, schedule="constant", warmup_steps=0,
    checkpoint_every=4, eval_every=6, sample_tokens=4, sample_prompt="Hi",
)  # fmt: skip


class CompiledOnce:
  """A step whose program is kept from one run to the next, as every run here is the same one."""

  def __init__(self, jitted):
    self._jitted = jitted
    self._program = None

  def lower(self, *args):
    if self._program is None:
      self._program = self._jitted.lower(*args).compile()
    return self

  def compile(self):
    return self._program


@pytest.fixture(autouse=True, scope="module")
def compiled_once(tmp_path_factory):
  """Compiles once for all runs of this process, and leaves the binary to its child processes."""
  made = step.make_step
  cache = tmp_path_factory.mktemp("cache")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(step, "make_step", functools.cache(lambda *args: CompiledOnce(made(*args))))
    patch.setattr(step, "make_eval", functools.cache(step.make_eval))
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
  jax.config.update("jax_compilation_cache_dir", None)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


@pytest.fixture(scope="module")
def config(talk):
  return Config(model=MODEL, train=TRAIN, data=DataConfig(source=str(talk)))


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
  """Workdir and summary of an uninterrupted run."""
  workdir = tmp_path_factory.mktemp("whole") / "run"
  return workdir, loop.run(config, workdir)


def changed(config, **train):
  return dataclasses.replace(config, train=dataclasses.replace(config.train, **train))


def losses(workdir):
  records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  assert [r["step"] for r in records] == list(range(1, len(records) + 1))
  return [r["loss"] for r in records]


def saved_digests(workdir):
  checkpoints = Checkpoints(workdir / "checkpoints")
  record = checkpoints._record(checkpoints.steps()[-1])
  checkpoints.close()
  return {name: array["checksum"] for name, array in record["arrays"].items()}


class Killed(BaseException):
  """Stands for a kill: nothing in the run handles it."""


def run_until(number, config, workdir, monkeypatch):
  """A run that ends, as by a kill, when the metrics of step `number` are to be written."""
  report = loop._Training._report

  def dying(self, now, *rest):
    if now == number:
      raise Killed
    return report(self, now, *rest)

  with monkeypatch.context() as patch:
    patch.setattr(loop._Training, "_report", dying)
    with pytest.raises(Killed):
      loop.run(config, workdir)


def test_a_run_leaves_what_it_promises(whole, config):
  workdir, summary = whole
  assert summary["steps"] == STEPS
  assert set(summary) == {
      "steps", "first_loss", "last_loss", "eval_loss", "tokens_per_second", "compile_seconds",
  }  # fmt: skip
  told = losses(workdir)
  assert (summary["first_loss"], summary["last_loss"]) == (told[0], told[-1])
  assert told[-1] < told[0]
  assert summary["eval_loss"] > 0
  assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
  assert (workdir / "sample.txt").read_text().startswith("user: Hi\nassistant: ")
  assert list((workdir / "tensorboard").glob("events*"))
  assert Checkpoints(workdir / "checkpoints").steps() == [48, STEPS]
  found, model, at = load_model(workdir)
  assert (found, at) == (config, STEPS)
  assert names_of(model)


def test_the_same_seed_gives_the_same_run_bit_for_bit(whole, config, tmp_path):
  loop.run(config, tmp_path)
  assert losses(tmp_path) == losses(whole[0])
  assert saved_digests(tmp_path) == saved_digests(whole[0])


@pytest.mark.parametrize("at", range(1, 21))
def test_a_resumed_run_continues_bit_for_bit(at, whole, config, tmp_path, monkeypatch):
  run_until(at, config, tmp_path, monkeypatch)
  summary = loop.run(config, tmp_path, resume=True)
  assert losses(tmp_path) == losses(whole[0])
  assert saved_digests(tmp_path) == saved_digests(whole[0])
  assert summary["eval_loss"] == whole[1]["eval_loss"]


def test_a_damaged_newest_checkpoint_costs_one_interval_and_is_kept_aside(
    whole, config, tmp_path, monkeypatch, caplog
):
  run_until(10, config, tmp_path, monkeypatch)
  record = tmp_path / "checkpoints" / "8" / "record" / "metadata"
  record.write_text(record.read_text().replace('"row"', '"raw"'))
  caplog.set_level(logging.WARNING)
  loop.run(config, tmp_path, resume=True)
  assert "checkpoint 8 in" in caplog.text
  assert losses(tmp_path) == losses(whole[0])
  assert saved_digests(tmp_path) == saved_digests(whole[0])
  assert (tmp_path / "damaged" / "8").is_dir()


def test_a_run_that_is_finished_resumes_to_its_summary(whole, config):
  workdir, summary = whole
  again = loop.run(config, workdir, resume=True)
  for key in ("steps", "first_loss", "last_loss", "eval_loss"):
    assert again[key] == summary[key]


def snapshot(workdir):
  return {
      path.relative_to(workdir): path.read_bytes() for path in workdir.rglob("*") if path.is_file()
  }


@pytest.mark.parametrize(
    ("changes", "resume", "message"),
    [
        ({}, False, "holds checkpoints up to step 50; pass --resume"),
        ({"seed": 3}, True, "another configuration: train.seed was 0 and is 3"),
        ({"seed": 3}, False, "another configuration: train.seed was 0 and is 3"),
    ],
)
def test_a_workdir_that_is_taken_is_refused_and_untouched(whole, config, changes, resume, message):
  before = snapshot(whole[0])
  with pytest.raises(ValueError, match=message):
    loop.run(changed(config, **changes), whole[0], resume)
  assert snapshot(whole[0]) == before


def test_resume_without_a_checkpoint_is_refused_and_creates_nothing(config, tmp_path):
  with pytest.raises(ValueError, match="holds no checkpoint to resume"):
    loop.run(config, tmp_path / "new", resume=True)
  assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_fit_the_tokenizer_is_refused(config, tmp_path):
  for field, value in (("vocab_size", 263), ("engram_compressed_vocab_size", 234)):
    model = dataclasses.replace(MODEL, **{field: value})
    with pytest.raises(ValueError, match=f"model.{field} is {value}; it must be"):
      loop.run(dataclasses.replace(config, model=model), tmp_path / "new")
  assert not list(tmp_path.iterdir())


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(config, tmp_path, monkeypatch):
  made = step.make_step

  class Poisoned:

    def __init__(self, jitted):
      self._jitted = jitted

    def lower(self, *args):
      self._program = self._jitted.lower(*args).compile()
      return self

    def compile(self):
      return self

    def __call__(self, state, batch):
      state, metrics = self._program(state, batch)
      bad = np.float32("nan") if int(state.step) == 4 else metrics.loss
      return state, metrics._replace(loss=bad)

  monkeypatch.setattr(step, "make_step", lambda *args: Poisoned(made(*args)))
  with pytest.raises(FloatingPointError, match="step 4: loss nan.*last checkpoint is of step 0"):
    loop.run(config, tmp_path)
  assert len(losses(tmp_path)) == 3


PROGRAM = """
import json, pathlib, sys
from deepseek_jax import cli
from deepseek_jax.config import Config
from deepseek_jax.fields import build
from deepseek_jax.train import loop
config = build(Config, json.loads(pathlib.Path(sys.argv[1]).read_text()))
workdir, resume = sys.argv[2], "--resume" in sys.argv
sys.argv = ["finetune", "--json"]
cli.run(lambda: loop.run(config, workdir, resume))
"""


def start(config, workdir, *flags):
  file = workdir.parent / "config.json"
  file.write_text(config.to_json())
  environment = os.environ | {
      "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  return subprocess.Popen(
      [sys.executable, "-c", PROGRAM, str(file), str(workdir), *flags],
      cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip


def wait_for_step(process, workdir, number):
  path = workdir / "metrics.jsonl"
  while process.poll() is None and (
      not path.exists() or len(path.read_text().splitlines()) < number
  ):
    time.sleep(0.01)


def test_kill_9_at_random_moments_loses_nothing(config, tmp_path):
  config = changed(config, steps=60, eval_every=60, checkpoint_every=2)
  whole, workdir = tmp_path / "whole", tmp_path / "run"
  loop.run(config, whole)
  rng = np.random.default_rng()
  flags = []
  for at in sorted(rng.integers(1, 50, size=3)):
    process = start(config, workdir, *flags)
    wait_for_step(process, workdir, at)
    time.sleep(rng.uniform(0, 0.05))
    process.kill()
    process.communicate()
    flags = ["--resume"]
  process = start(config, workdir, "--resume")
  out, err = process.communicate()
  assert process.returncode == 0, err
  assert json.loads(out.splitlines()[-1])["steps"] == 60
  assert losses(workdir) == losses(whole)
  assert saved_digests(workdir) == saved_digests(whole)


def test_sigterm_checkpoints_and_exits_0_within_five_seconds(config, tmp_path):
  config = changed(config, steps=2000, checkpoint_every=2000, eval_every=2000)
  workdir = tmp_path / "run"
  process = start(config, workdir)
  wait_for_step(process, workdir, 3)
  process.send_signal(signal.SIGTERM)
  asked = time.monotonic()
  out, err = process.communicate(timeout=30)
  assert time.monotonic() - asked < 5
  assert process.returncode == 0, err
  done = json.loads(out.splitlines()[-1])["steps"]
  assert 3 <= done < 2000
  assert len(losses(workdir)) == done
  assert Checkpoints(workdir / "checkpoints").steps()[-1] == done
  shorter = changed(config, steps=done + 2)
  assert loop.run(shorter, workdir, resume=True)["steps"] == done + 2
  assert len(losses(workdir)) == done + 2
