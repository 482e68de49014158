"""What a training step on decoder replay costs beside the plain one."""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.config import Config, ReplayConfig
from deepseek_jax.eval import programs
from deepseek_jax.ledger import Ledger
from deepseek_jax.train import step
from deepseek_jax.train.conversations import Example
from deepseek_jax.train.data import Batch, collate
from deepseek_jax.train.turns import Views


def _case(config: Config, replay: ReplayConfig | None) -> tuple[Config, Batch]:
  """Lines of one turn each, the prompt fifteen times as long as the response."""
  train = dataclasses.replace(config.train, replay=replay, accumulation=1)
  config = dataclasses.replace(config, train=train)
  n, lines = train.seq_len, train.batch_size
  tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (lines, n))
  loss = np.arange(n) >= n - n // 16
  examples = [Example(line.astype(np.int32), loss) for line in tokens]
  views = Views(examples, replay=replay, window=config.model.sliding_window)
  batch = collate(views, [[i] for i in range(lines)], n, 0)
  return config, jax.tree.map(lambda a: jnp.asarray(a)[None], batch)


def decoder_replay(config: Config) -> ReplayConfig:
  """Whose decoder lines hold just the rows of such a turn."""
  return ReplayConfig(decoder_len=config.model.sliding_window + config.train.seq_len // 16)


def _compiled(config: Config, replay: ReplayConfig | None):
  config, batch = _case(config, replay)
  train_step = step.make_step(step.abstract_model(config)[0], config)
  return config, batch, train_step.lower(step.abstract_state(config), batch).compile()


def flops_ratio(config: Config) -> float:
  """FLOPs of a step on decoder replay over those of the plain one, by the compiler's count.

  It counts a loop's body once, so layers are not scanned and scores are not cut into chunks.

  Args:
    config: without Engram; its lines are taken as they are long.
  """
  compute = dataclasses.replace(config.compute, scan_layers=False, row_chunk=config.train.seq_len)
  config = dataclasses.replace(config, compute=compute)
  counts = [
      _compiled(config, replay)[2].cost_analysis()["flops"]
      for replay in (decoder_replay(config), None)
  ]
  return counts[0] / counts[1]


def step_time_ratio(config: Config, repeats: int = 7) -> dict[str, float]:
  """Seconds of a step on decoder replay over those of the plain one, taken in turn."""
  runs = [_compiled(config, replay) for replay in (decoder_replay(config), None)]
  states = [step.init_state(run[0]) for run in runs]
  ratios = []
  for _ in range(repeats + 1):
    seconds = []
    for i, (_, batch, train_step) in enumerate(runs):
      began = time.perf_counter()
      states[i], metrics = train_step(states[i], batch)
      jax.block_until_ready((states[i], metrics))
      seconds.append(time.perf_counter() - began)
    ratios.append(seconds[0] / seconds[1])
  ratios = ratios[1:]
  return {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)}


def modelled_ratio(config: Config, tokens: int) -> float:
  """By the ledger's FLOPs of the forward pass, the head on the response's rows alone."""
  ledger = Ledger.of(config.model, programs.parameter_shapes(config))
  response = tokens // 16
  flops = [sum(ledger.prefill_flops(tokens, arm, response).values()) for arm in ("B", "A")]
  return flops[0] / flops[1]
