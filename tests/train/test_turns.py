"""Laws of turns: their rows are those of spec 17, with every response once and none to spare."""

import collections
import itertools

import chex
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_jax.config import ReplayConfig
from deepseek_jax.train import turns
from deepseek_jax.train.conversations import Example
from deepseek_jax.train.turns import Turn, Views
from tests.train.talks import conversation

W, M = 4, 2


SPANS = st.lists(st.tuples(st.integers(1, 13), st.integers(1, 6)), min_size=1, max_size=4)
TALKS = st.builds(conversation, SPANS, st.integers(0, 3), st.integers(0, 99))
SHORT = st.builds(conversation, SPANS.map(lambda spans: spans[:2]))
PATIENT = settings(deadline=None)
HITS = st.sampled_from(["turn", "uniform"])


def possible(turn, before, kind, window, multiple):
  """Hits that the specification allows, one position after the other."""
  whole = [c for c in range(turn.prompt + 1) if c % multiple == 0 and c > window]
  return [c for c in whole if kind == "uniform" or before - multiple < c <= before]


def with_hits(draw, example, kind, window, multiple):
  found, before = [], 0
  for turn in turns.turns_of(example):
    choices = [0, *possible(turn, before, kind, window, multiple)]
    found.append(turn._replace(hit=draw.draw(st.sampled_from(choices))))
    before = turn.end
  return found


def draws(example, replay, count=400, window=W, multiple=M):
  """Hits [count, turns] of `count` epochs."""
  told = turns.turns_of(example)
  each = (
      turns.drawn(told, replay, window=window, multiple=multiple, seed=(0, 0, epoch))
      for epoch in range(count)
  )
  return np.array([[turn.hit for turn in found] for found in each])


class TestDrawn:

  @PATIENT
  @given(SPANS, st.integers(0, 3))
  def test_turns_are_the_runs_of_tokens_with_loss(self, spans, tail):
    ends = np.cumsum(spans)
    told = [Turn(int(a), int(b)) for a, b in zip(ends[::2], ends[1::2])]
    assert turns.turns_of(conversation(spans, tail)) == told
    assert turns.turns_of(Example(np.zeros(3, np.int32), np.zeros(3, bool))) == []

  @PATIENT
  @given(TALKS, HITS, st.integers(1, 9), st.integers(1, 4), st.sampled_from([0.0, 0.4, 1.0]))
  def test_hits_are_whole_groups_behind_the_window(self, example, kind, window, multiple, q):
    told, replay = turns.turns_of(example), ReplayConfig(1, q, kind)
    found = turns.drawn(told, replay, window=window, multiple=multiple, seed=(1, 2, 3))
    before = 0
    for turn, was in zip(found, told, strict=True):
      allowed = possible(was, before, kind, window, multiple)
      assert turn[:2] == was[:2]
      assert turn.hit in ([0] if not q else allowed or [0] if q == 1 else [0, *allowed])
      before = was.end

  @pytest.mark.parametrize("kind", ["turn", "uniform"])
  def test_a_turn_is_hit_with_its_probability(self, kind):
    example = conversation([(9, 6)] * 3)
    hit = draws(example, ReplayConfig(1, 0.3, kind), 2000) > 0
    assert hit.shape == (2000, 3)
    for turn in range(kind == "turn", 3):
      assert abs(hit[:, turn].mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 2000)
    both = hit[:, 1] & hit[:, 2]
    assert abs(both.mean() - 0.09) < 4 * np.sqrt(0.09 * 0.91 / 2000)  # each turn for itself

  def test_the_turn_before_is_hit_at_its_end_rounded_down(self):
    hits = draws(conversation([(6, 3), (2, 2), (1, 1), (20, 5)]), ReplayConfig(1, 1.0), 3)
    assert (hits == [0, 8, 12, 14]).all()

  def test_uniform_hits_are_everywhere_and_equally_often(self):
    hits = draws(conversation([(15, 1)]), ReplayConfig(1, 1.0, "uniform"), 2000)[:, 0]
    counts = collections.Counter(hits.tolist())
    assert sorted(counts) == [6, 8, 10, 12, 14]
    assert all(abs(n - 400) < 4 * np.sqrt(2000 * 0.2 * 0.8) for n in counts.values())

  def test_draws_follow_from_seed_example_and_epoch_alone(self):
    examples, replay = [conversation([(9, 6)] * 12)] * 3, ReplayConfig(1, 0.5, "uniform")

    def hits(i, epoch, seed=7):
      views = Views(examples, replay=replay, window=W, multiple=M, seed=seed)
      return [turn.hit for turn in views.turns(i, epoch)]

    grid = list(itertools.product(range(3), range(3), (7, 8)))
    assert len({tuple(hits(*where)) for where in grid}) == len(grid)
    assert hits(2, 2) == hits(2, 2)
    # The stream that a resumed run goes on with.
    assert hits(1, 2)[:6] == [0, 16, 8, 0, 0, 0]


def expected(example, told, window):
  """Spec 17, row by row.

  Returns:
    For every pass of the encoder, 0 the first and t turn t's replay, and for the decoder's rows of
    every turn: rows {position: (floor, writes, pass, hit, target)}. Entries of the first pass end
    before the hit, what follows is the pass's own.
  """
  passes, decoder = {0: {}}, {}
  for i in range(told[-1].end):
    passes[0][i] = (0, True, 0, 0, None)
  for t, (prompt, end, hit) in enumerate(told, 1):
    decoder[t] = {}
    if hit:
      passes[t] = {}
      for i in range(max(0, hit - window), end):
        passes[t][i] = (max(0, hit - window), i >= hit, t, hit, None)
    for i in range(max(0, prompt - window), end):
      answer = int(example.tokens[i + 1]) if prompt <= i + 1 < end else None
      decoder[t][i] = (max(0, prompt - window), False, t if hit else 0, hit, answer)
  return passes, decoder


def entries_wanted(position, number, hit, ratio):
  """Entries (pass, entry) that a row sees by the specification."""
  whole = range((position + 1) // ratio)
  return {(0 if (j + 1) * ratio <= hit or not number else number, j) for j in whole}


def entries_read(rows, reads, ratio):
  """Entries (segment, entry) that a row sees by `reads`, of those that are written."""
  written = collections.defaultdict(set)
  for position, segment, writes in zip(rows.positions, rows.segments, rows.writes):
    if writes:
      written[int(segment)].add(int(position))
  exists = lambda s, j: written[s] >= set(range(j * ratio, (j + 1) * ratio))

  def of(row, position):
    own, base, until, _ = (int(a[row]) for a in reads)
    groups = range((position + 1) // ratio)
    seen = {(own, j) for j in groups if exists(own, j)}
    return seen | {(base, j) for j in groups if base and (j + 1) * ratio <= until}

  return of


class TestLines:

  @PATIENT
  @given(st.data(), TALKS, HITS, st.integers(1, 9), st.integers(1, 4))
  def test_rows_are_those_of_the_specification(self, draw, example, kind, window, multiple):
    told = with_hits(draw, example, kind, window, multiple)
    lines = turns.replayed_lines(example, told, window)
    passes, decoder = expected(example, told, window)
    rows, below = lines.rows, lines.decoder.rows
    for part, stack in ((lines.source, rows), passes), ((lines.decoder, lines.weights), decoder):
      counts = {a.shape for a in jax.tree.leaves(part)}
      assert counts == {(sum(map(len, stack.values())),)}
    ratio = draw.draw(st.sampled_from([r for r in range(1, multiple + 1) if multiple % r == 0]))
    seen = entries_read(rows, rows.reads, ratio), entries_read(rows, below.reads, ratio)
    order = list(passes)  # segment s of the line is pass order[s - 1]
    named = lambda found: {(order[s - 1], j) for s, j in found}

    row = 0
    for segment, number in enumerate(order, 1):
      for position, (floor, writes, own, hit, _) in passes[number].items():
        assert lines.source[row] == rows.positions[row] == position
        assert [a[row] for a in rows[1:4]] == [floor, segment, writes]
        if own and position < hit:  # replayed for its window entries
          wanted = entries_wanted(position, 0, 0, ratio)
        else:
          wanted = entries_wanted(position, own, hit, ratio)
        assert named(seen[0](row, position)) == wanted
        row += 1
    at = {(int(s), int(p)): r for r, (s, p) in enumerate(zip(rows.segments, rows.positions))}
    row = 0
    for turn, wanted_rows in decoder.items():
      for position, (floor, _, own, hit, answer) in wanted_rows.items():
        assert below.positions[row] == position
        assert [a[row] for a in below[1:4]] == [floor, turn, False]
        assert lines.decoder.source[row] == at[order.index(own) + 1, position]
        assert named(seen[1](row, position)) == entries_wanted(position, own, hit, ratio)
        assert lines.targets[row] == (-1 if answer is None else answer)
        assert lines.weights[row] == (answer is not None)
        row += 1
    for reads in rows.reads, below.reads:
      for base, first in zip(reads.base, reads.first):
        assert not base or at[int(base), 0] == first

  @PATIENT
  @given(st.data(), TALKS, HITS, st.integers(1, 9), st.integers(1, 4))
  def test_counts_are_what_is_made(self, draw, example, kind, window, multiple):
    told = with_hits(draw, example, kind, window, multiple)
    lines = turns.replayed_lines(example, told, window)
    assert turns.row_counts(told, window) == (len(lines.source), len(lines.targets))

  @PATIENT
  @given(st.data(), TALKS, HITS, st.integers(1, 9))
  def test_every_response_token_is_predicted_once_in_its_own_turn(
      self, draw, example, kind, window
  ):
    told = with_hits(draw, example, kind, window, M)
    lines = turns.replayed_lines(example, told, window)
    rows = lines.decoder.rows
    carries = lines.weights > 0
    assert set(np.unique(lines.weights)) <= {0.0, 1.0}
    predicted = rows.positions[carries] + 1
    assert predicted.tolist() == np.flatnonzero(example.loss).tolist()
    np.testing.assert_array_equal(lines.targets[carries], example.tokens[predicted])
    for number, turn in enumerate(told, 1):
      mine = rows.segments[carries] == number
      assert predicted[mine].tolist() == list(range(turn.prompt, turn.end))

  @PATIENT
  @given(st.data(), SHORT, HITS)
  def test_the_costliest_hits_are_counted(self, draw, example, kind):
    window, q = draw.draw(st.integers(1, 9)), draw.draw(st.sampled_from([0.0, 0.01, 1.0]))
    views = Views([example], replay=ReplayConfig(1, q, kind), window=window, multiple=M)
    told, most = turns.turns_of(example), []
    ends = [0, *(turn.end for turn in told)]
    for turn, before in zip(told, ends):
      allowed = possible(turn, before, kind, window, M) if q else []
      most.append([turn._replace(hit=hit) for hit in (0, *allowed)])
    every = [turns.row_counts(found, window) for found in itertools.product(*most)]
    assert views.most(0) == tuple(np.max(every, axis=0))

  @PATIENT
  @given(st.data(), TALKS, HITS, st.integers(1, 60), st.integers(9, 30))
  def test_a_cut_conversation_is_the_longest_that_always_fits(
      self, draw, example, kind, rows, below
  ):
    replay = ReplayConfig(below, draw.draw(st.sampled_from([0.0, 1.0])), kind)
    kept = turns.cut(example, replay, window=W, multiple=M, seq_len=rows)
    n, whole = len(kept.tokens), len(example.tokens)
    chex.assert_trees_all_equal(kept, Example(example.tokens[:n], example.loss[:n]))

    def fits(n):
      one = Example(example.tokens[:n], example.loss[:n])
      counts = (
          Views([one], replay=replay, window=W, multiple=M).most(0) if one.loss.any() else (0, 0)
      )
      return counts[0] <= rows and counts[1] <= below

    assert [fits(i) for i in range(whole + 1)] == [i <= n for i in range(whole + 1)]


def test_the_picture_of_a_conversation():
  told = [Turn(6, 9), Turn(11, 13), Turn(20, 25, 14)]
  assert turns.picture(conversation([(6, 3), (2, 2), (7, 5)], tail=2), told, W).split("\n") == [
      "25 tokens, 1 a column; W = 4",
      "encoder                  ppppppRRRppRRpppppppRRRRR  25 rows",
      "decoder, turn 1          ..ppppRRR................  7 rows",
      "decoder, turn 2          .......RRppRR............  6 rows",
      "encoder, turn 3, hit 14  ..........wwwwppppppRRRRR  15 rows",
      "decoder, turn 3          ................ppppRRRRR  9 rows",
  ]


def test_an_overview_counts_the_rows_of_a_line():
  examples = [conversation([(6, 3), (2, 2), (7, 5)], tail=2), conversation([(2, 1)])]
  told = [[Turn(6, 9), Turn(11, 13), Turn(20, 25, 14)], [Turn(2, 3)]]
  views = Views(examples, replay=ReplayConfig(30, 1.0), window=W, multiple=M, turns=told)
  shown, counts = turns.overview(views, [1, 0], 60)
  assert shown == f"{views.picture(1)}\n\n{views.picture(0)}"
  assert counts == {
      "examples": 2,
      "encoder": {"prompt": 15 + 6 + 2, "response": 10 + 5 + 1, "replayed": 4, "padding": 17},
      "decoder": {"prompt": 4 + 2 + 4 + 2, "response": 3 + 4 + 5 + 1, "padding": 5},
  }
  shown, counts = turns.overview(Views(examples, window=W), [1], 10)
  assert shown == "3 tokens, 1 a column; W = 4\nboth stacks              ppR  3 rows"
  assert counts == {
      "examples": 1,
      "encoder": {"prompt": 2, "response": 1, "replayed": 0, "padding": 7},
      "decoder": {"prompt": 2, "response": 1, "padding": 7},
  }
