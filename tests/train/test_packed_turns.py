"""Laws of packed turns: a line holds examples as if alone, a stop changes neither row nor hit."""

import collections
import dataclasses
import itertools
import json
import pathlib

import chex
import jax
import numpy as np
import pytest

from deepseek_jax import cli
from deepseek_jax import tokenizer as tok
from deepseek_jax.config import Config, ReplayConfig
from deepseek_jax.train import data, turns
from deepseek_jax.train.turns import Turn, Views
from tests.train.talks import conversation

BYTES = tok.ByteTokenizer()
CLASSES = tok.token_classes(BYTES)
SEQ_LEN, DECODER_LEN, W, M = 90, 40, 4, 2
TURN, UNIFORM = (ReplayConfig(DECODER_LEN, 0.5, hits) for hits in ("turn", "uniform"))

TALK = [
    conversation([(7, 3), (6, 2), (9, 4)], seed=1), conversation([(14, 4), (3, 2)], seed=2),
    conversation([(3, 5)], seed=3), conversation([(16, 2)], tail=3, seed=4),
]  # fmt: skip
VIEWS = Views(TALK, replay=ReplayConfig(DECODER_LEN, 1.0, "uniform"), window=W, multiple=M, seed=2)


class TestCollate:
  PACKED, EPOCHS = [[0, 2], [], [1, 3, 2]], [1, 0, 2]

  @pytest.fixture(scope="class")
  @classmethod
  def batch(cls):
    how = dict(ngram_order=3, epochs=cls.EPOCHS)
    return data.collate(VIEWS, cls.PACKED, SEQ_LEN, BYTES.pad_id, CLASSES, **how)

  def placed(self):
    """Every example: line, rows alone, and where they begin in both stacks."""
    for line, (ids, epoch) in enumerate(zip(self.PACKED, self.EPOCHS)):
      starts = np.zeros(4, int)  # rows and segments of the encoder, of the decoder
      for i in ids:
        alone = VIEWS.lines(i, epoch)
        yield line, i, alone, starts.copy()
        last = [int(rows.segments.max()) for rows in (alone.rows, alone.decoder.rows)]
        starts += [len(alone.source), last[0], len(alone.targets), last[1]]

  def test_packed_rows_are_those_of_each_example_alone(self, batch):
    hits = 0
    for line, i, alone, (start, segment, below, turn) in self.placed():
      example = TALK[i]
      for mine, theirs, first, before in (
          (batch.rows, alone.rows, start, segment),
          (batch.decoder.rows, alone.decoder.rows, below, turn),
      ):
        at = line, slice(first, first + len(theirs.positions))
        found = jax.tree.map(lambda a, at=at: a[at], mine)
        reads = found.reads
        based = reads.base > 0
        unshifted = found._replace(
            segments=found.segments - before,
            reads=reads._replace(
                own=reads.own - segment, base=reads.base - segment * based,
                first=reads.first - start,
            ),
        )  # fmt: skip
        chex.assert_trees_all_equal(unshifted, theirs)
        hits += based.sum()
      at = line, slice(below, below + len(alone.targets))
      np.testing.assert_array_equal(batch.decoder.source[at] - start, alone.decoder.source)
      np.testing.assert_array_equal(batch.weights[at], alone.weights)
      carries = alone.weights > 0
      np.testing.assert_array_equal(batch.targets[at][carries], alone.targets[carries])
      assert (batch.targets[at][~carries] == BYTES.pad_id).all()
      at = line, slice(start, start + len(alone.source))
      np.testing.assert_array_equal(batch.tokens[at], example.tokens[alone.source])
      # A replayed row has the look-back of the conversation, beyond the replay's first row too.
      windows = tok.ngrams(CLASSES[example.tokens], CLASSES[BYTES.pad_id], 3)
      np.testing.assert_array_equal(batch.ngrams[at], windows[alone.rows.positions])
    assert hits

  def test_the_first_row_of_a_base_is_its_position_0(self, batch):
    for rows in batch.rows, batch.decoder.rows:
      for line, row in np.argwhere(rows.reads.base):
        first = rows.reads.first[line, row]
        assert batch.rows.positions[line, first] == 0
        assert batch.rows.segments[line, first] == rows.reads.base[line, row]

  def test_padding_is_zero_and_carries_nothing(self, batch):
    used = {stack: np.zeros(3, int) for stack in "ed"}
    for line, _, alone, _ in self.placed():
      used["e"][line] += len(alone.source)
      used["d"][line] += len(alone.targets)
    for rows, length, count in (
        (batch.rows, SEQ_LEN, used["e"]), (batch.decoder.rows, DECODER_LEN, used["d"]),
    ):  # fmt: skip
      pads = np.arange(length) >= count[:, None]
      assert pads.any(axis=1).all()
      assert not any(leaf[pads].any() for leaf in jax.tree.leaves(rows))
      assert (rows.segments[~pads] > 0).all()
    assert not batch.weights[pads].any()
    assert not batch.decoder.source[pads].any()
    assert (batch.targets[pads] == BYTES.pad_id).all()

  def test_without_hits_the_encoder_runs_as_without_simulation(self):
    views = Views(TALK, replay=ReplayConfig(DECODER_LEN), window=W, multiple=M)
    batch = data.collate(views, [[1], [0, 2]], SEQ_LEN, BYTES.pad_id)
    plain = data.collate(Views(TALK), [[1], [0, 2]], SEQ_LEN, BYTES.pad_id)
    chex.assert_trees_all_equal((batch.tokens, batch.rows), (plain.tokens, plain.rows))
    assert batch.rows.reads is None


def many(seed=0, n=40):
  rng = np.random.default_rng(seed)
  spans = lambda: rng.integers((1, 1), (12, 5), (rng.integers(1, 4), 2)).tolist()
  found = [conversation(spans(), seed=i) for i in range(n)]
  return [turns.cut(each, UNIFORM, window=W, multiple=M, seq_len=SEQ_LEN) for each in found]


EXAMPLES = many()


def make_pipeline(replay=UNIFORM, batch_size=2):
  views = Views(EXAMPLES, replay=replay, window=W, multiple=M, seed=3)
  sizes = dict(seq_len=SEQ_LEN, batch_size=batch_size, accumulation=2, ngram_order=2)
  return data.Pipeline(views, BYTES, **sizes)


class TestPipeline:

  def test_no_line_of_either_stack_overflows_and_every_example_is_in_one(self):
    pipeline = make_pipeline()
    views, tight = Views(EXAMPLES, replay=UNIFORM, window=W, multiple=M, seed=3), [0, 0]
    for epoch in range(4):
      lines = pipeline.epoch(epoch)
      assert sorted(i for ids in lines for i in ids) == list(range(len(EXAMPLES)))
      for ids in lines:
        rows, below = np.sum([views.counts(i, epoch) for i in ids], axis=0)
        assert rows <= SEQ_LEN
        assert below <= DECODER_LEN
        tight[0] += rows > SEQ_LEN - 8
        tight[1] += below > DECODER_LEN - 8
    assert all(tight)  # Each length was what closed some lines.

  def test_batches_hold_the_rows_and_hits_of_their_epoch(self):
    pipeline, seen, row = make_pipeline(batch_size=1), collections.defaultdict(set), 0
    views = Views(EXAMPLES, replay=UNIFORM, window=W, multiple=M, seed=3)
    lines = [(e, ids) for e in range(3) for ids in pipeline.epoch(e)]
    for batch, _ in itertools.islice(pipeline, len(lines) // 2):
      for rows in jax.tree.map(lambda a: a[:, 0], batch.rows).reads.until:
        epoch, ids = lines[row]
        told = {turn.hit for i in ids for turn in views.turns(i, epoch)}
        assert set(np.unique(rows)) == told | {0}
        for i in ids:
          seen[i].add(tuple(views.turns(i, epoch)))
        row += 1
    assert max(map(len, seen.values())) == 3

  @pytest.mark.parametrize("stop", range(1, 13))
  def test_a_stop_after_any_step_changes_no_row_and_no_hit(self, stop):
    going = iter(make_pipeline())
    for _ in range(stop):
      next(going)
    resumed = iter(make_pipeline())
    resumed.set_state(json.loads(json.dumps(going.get_state())))
    for _ in range(3):
      chex.assert_trees_all_equal(next(resumed), next(going))

  @pytest.mark.parametrize("change", [{"encoder": 0.4}, {"hits": "turn"}, {"decoder_len": 41}])
  def test_the_state_of_another_simulation_is_refused(self, change):
    state = iter(make_pipeline()).get_state()
    for replay in dataclasses.replace(UNIFORM, **change), None:
      with pytest.raises(ValueError, match="iterator state: data"):
        iter(make_pipeline(replay)).set_state(state)


def pipeline_of(spans, replay, seq_len=SEQ_LEN):
  examples = [conversation([(3, 2)]), conversation(spans)]
  views = Views(examples, replay=replay, window=W, multiple=M)
  return data.Pipeline(views, BYTES, seq_len=seq_len, batch_size=1)


def stage(*overrides):
  path = pathlib.Path(__file__).parents[2] / "configs" / "sft_replay_full.py"
  config = cli.override(cli.load(str(path)), [f"--config.train.replay.{o}" for o in overrides])
  return Config.from_config_dict(config)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: stage("encoder=-0.1"), r"replay.encoder is -0.1; it must be within \[0, 1\]"),
        (lambda: stage("encoder=1.1"), r"replay.encoder is 1.1; it must be within \[0, 1\]"),
        (lambda: stage("encoder=nan"), "train.replay.encoder is nan"),
        (lambda: stage("hits=end"), "train.replay.hits is 'end'; it must be one of"),
        (lambda: stage("decoder_len=0"), "train.replay.decoder_len is 0; it must be at least 1"),
        (lambda: stage("decoder_len=16"), r"is 16; it must be more than sliding_window \(16\)"),
        (
            lambda: pipeline_of([(9, 40)], TURN),
            r"example 1: 44 rows of the decoder, allowed are 1 to 40 \(replay.decoder_len\)",
        ),
        # With a hit at 6 rows 2 to 41 run again, seldom as that may be.
        (
            lambda: pipeline_of([(39, 2)], ReplayConfig(20, 0.001, "uniform"), seq_len=79),
            r"example 1: 80 .*, allowed are 1 to 79 \(seq_len\)",
        ),
        (lambda: pipeline_of([(39, 0)], TURN), "example 1: no token carries loss; a turn needs"),
        (
            lambda: Views(TALK, replay=ReplayConfig(9), window=W, turns=[[Turn(14, 18, 6)]] * 4),
            "example 0: a turn has a hit; replay.encoder is 0",
        ),
    ],
)  # fmt: skip
def test_unfit_input_is_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_what_only_just_fits_is_taken():
  pipeline_of([(9, 36)], TURN)
  pipeline_of([(39, 2)], ReplayConfig(20, 0.001, "uniform"), seq_len=80)
  assert stage("decoder_len=17", "encoder=1").train.replay == ReplayConfig(17, 1.0, "uniform")
