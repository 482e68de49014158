"""Pieces of text for the replay experiment, and what is counted on them."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from deepseek_jax import cli
from deepseek_jax.config import Config
from deepseek_jax.eval import replay_text as text
from deepseek_jax.eval.replay_experiment import TRAININGS, generator
from deepseek_jax.nn.rows import Rows
from deepseek_jax.train import step
from deepseek_jax.train.turns import turns_of

ROOT = pathlib.Path(__file__).parents[1]
PIECES, W = text.Pieces(96, 2, 8), 16


@pytest.fixture(scope="module")
def config():
  config = Config.from_config_dict(cli.load(str(ROOT / "configs" / "retrieval.py")))
  model = dataclasses.replace(config.model, vocab_size=264)
  return dataclasses.replace(config, model=model)


def test_held_out_files_are_others():
  sides = [{one.tobytes() for one in text.sources(held_out)} for held_out in (False, True)]
  assert all(sides)
  assert not sides[0] & sides[1]


def test_responses_begin_at_groups_behind_a_window_and_have_their_length():
  stream = text.documents(generator(0), PIECES, W)
  for _ in range(50):
    example = next(stream)
    assert len(example.tokens) == PIECES.length
    turns = turns_of(example)
    assert len(turns) == PIECES.turns
    for turn in turns:
      assert turn.prompt > W
      assert turn.prompt % 2 == 0
      assert turn.end - turn.prompt == PIECES.response
  assert next(text.documents(generator(1), text.Pieces(64, 0, 0), W)).loss.sum() == 63


@pytest.mark.parametrize("training", TRAININGS)
def test_lines_have_room_for_every_draw(config, training):
  replay = text.replay_of(training, PIECES, W)
  one = text.config_of(config, PIECES, steps=9, lines=4, learning_rate=1.0, replay=replay)
  hits = 0
  for number in range(20):
    batch = text.batch_of((3, number), PIECES, one)
    assert batch.weights.sum() == 4 * PIECES.turns * PIECES.response
    hits += 0 if batch.rows.reads is None else int((batch.rows.reads.base > 0).any())
  assert (hits > 10) == (training == "both")


@pytest.mark.slow
def test_costs_by_arm(config):
  """A is the plain loss; what a replay costs is gone where nothing is left of it."""
  graphdef, _ = step.abstract_model(config)
  model = nnx.merge(graphdef, step.init_state(config).params)
  stream = lambda: text.documents(generator(5), PIECES, W, held_out=True)
  found = text.costs(model, PIECES, stream(), 4, lines=4)
  documents = stream()
  examples = [next(documents) for _ in range(4)]
  tokens = np.stack([one.tokens for one in examples])
  rows = Rows.single(*tokens.shape)
  run = jax.jit(lambda m, t: jax.nn.log_softmax(m.logits(m(t, rows).hidden)))
  logp = np.asarray(run(model, tokens))
  plain = [
      -logp[i, at - 1, one.tokens[at]]
      for i, one in enumerate(examples) for at in np.flatnonzero(one.loss)
  ]  # fmt: skip
  np.testing.assert_allclose(found["A"].reshape(-1), plain, atol=1e-5)
  assert {values.shape for values in found.values()} == {(8, PIECES.response)}
  assert np.abs(found["D"] - found["B"]).max() > 1e-6
  assert np.abs(found["B"] - found["A"]).max() > 1e-6
