"""Laws of a kill inside a save: the step before or the step itself comes back, nothing between."""

import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.checkpoint.training import Checkpoints, names_of
from deepseek_jax.config import Config, ModelConfig
from deepseek_jax.tokenizer import ByteTokenizer
from deepseek_jax.train.conversations import Example
from deepseek_jax.train.data import Pipeline
from deepseek_jax.train.turns import Views

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
KILLS = 20
# Before a kill, so that the time of a save in this process is known.
WHOLE_SAVES = 2

CONFIG = Config(
    model=ModelConfig(
        vocab_size=264, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_lora_rank=16,
        o_groups=1, n_routed_experts=4, num_experts_per_tok=2, sliding_window=8,
        compress_ratios=(1,), kv_source_layer_ids=(0,), index_source_layer_ids=(0,),
        index_n_heads=2, index_head_dim=32, index_topk=4,
    )
)  # fmt: skip


class State(NamedTuple):
  """10 MB that depend on every example seen so far.

  Attributes:
    seen: how often each example was consumed.
  """

  weight: jax.Array
  half: jax.Array
  seen: jax.Array


def pipeline():
  rng = np.random.default_rng(0)
  tokens = [rng.integers(256, size=n, dtype=np.int32) for n in rng.integers(3, 30, size=60)]
  examples = [Example(x, np.ones(len(x), bool)) for x in tokens]
  return Pipeline(Views(examples), ByteTokenizer(), seq_len=32, batch_size=2, accumulation=2)


def initial():
  return State(
      np.zeros((1 << 20, 2), np.float32), np.zeros((1 << 20,), jnp.bfloat16), np.zeros(60, np.int32)
  )


def advance(state, example_ids):
  noise = np.random.default_rng(example_ids).random(state.weight.shape, np.float32)
  weight = np.float32(0.5) * state.weight + noise
  seen = state.seen + np.bincount(example_ids, minlength=60).astype(np.int32)
  return State(weight, weight[:, 0].astype(jnp.bfloat16), seen)


def say(word, number):
  sys.stdout.write(f"{word} {number}\n")
  sys.stdout.flush()


def train(directory):
  """Saves step after step, from the newest checkpoint on, with a line around each save."""
  checkpoints = Checkpoints(directory)
  batches = iter(pipeline())
  state, step = initial(), 0
  if checkpoints.steps():
    restored = checkpoints.restore(state)
    batches.set_state(restored.iterator)
    checkpoints.sweep()
    state, step = jax.device_get(restored.state), restored.step
  while True:
    step += 1
    state = advance(state, next(batches).example_ids)
    arrays = jax.device_put(state)
    say("begin", step)
    checkpoints.save(step, arrays, batches.get_state(), CONFIG)
    say("end", step)


def fork_runs(directory):
  """One run of `train` for each line of standard input, so that all share one import."""
  for _ in sys.stdin:
    child = os.fork()
    if not child:
      say("pid", os.getpid())
      train(directory)
    os.waitpid(child, 0)
    say("dead", 0)


class Runs:
  """The other side of `fork_runs`."""

  def __init__(self, process):
    self._process = process

  def _hear(self, *expected):
    word, number = self._process.stdout.readline().split()
    assert word in expected
    return word, int(number)

  def kill_one(self, fraction):
    """Kills a run when that fraction of a save is over.

    Returns:
      Steps whose save returned, and the step whose save did not, or None if it was too late.
    """
    self._process.stdin.write("\n")
    self._process.stdin.flush()
    pid = self._hear("pid")[1]
    saved = []
    for _ in range(WHOLE_SAVES):
      self._hear("begin")
      began = time.monotonic()
      saved.append(self._hear("end")[1])
      seconds = time.monotonic() - began
    begun = self._hear("begin")[1]
    time.sleep(fraction * seconds)
    os.kill(pid, signal.SIGKILL)
    while (heard := self._hear("begin", "end", "dead"))[0] != "dead":
      word, step = heard
      begun = step if word == "begin" else None
      saved += [step] if word == "end" else []
    return saved, begun


@pytest.fixture
def runs(tmp_path):
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  with subprocess.Popen(
      [sys.executable, __file__, str(tmp_path / "checkpoints")],
      env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
  ) as process:  # fmt: skip
    yield Runs(process)


def uninterrupted():
  """Step, state and iterator state of a run that is never killed."""
  batches = iter(pipeline())
  state = initial()
  for step, batch in enumerate(batches, 1):
    state = advance(state, batch.example_ids)
    yield step, state, batches.get_state()


def test_kill_9_inside_a_save_loses_at_most_that_save(runs, tmp_path):
  """Each run resumes what the last kill left, so that a repeated or skipped example would show."""
  rng = np.random.default_rng(0)
  whole = uninterrupted()
  saved = []
  for fraction in (rng.permutation(KILLS) + rng.random(KILLS)) / KILLS:
    begun = None
    while begun is None:
      returned, begun = runs.kill_one(fraction)
      saved += returned
      checkpoints = Checkpoints(tmp_path / "checkpoints")
      listed = checkpoints.steps()
      found = checkpoints.restore(initial())
      checkpoints.close()
      assert set(listed) <= {*saved, begun}
      assert (found.step, found.damaged) == (listed[-1], ())
      assert found.step in (saved[-1], begun)
      step, state, iterator = next(at for at in whole if at[0] == found.step)
      assert found.iterator == iterator
      for name, array in names_of(state).items():
        label = f"{name}, step {step}"
        np.testing.assert_array_equal(names_of(found.state)[name], array, label, strict=True)
      saved.append(found.step)


if __name__ == "__main__":
  fork_runs(sys.argv[1])
