"""Conversations as rows: what every turn of a served conversation would have run (spec 17).

The encoder reads a conversation once. A turn's decoder begins W rows before the response, in a
segment of its own, as after every prefill. A turn that comes back after its window entries were
dropped has an encoder segment as well: it replays the W rows before the hit, which write nothing,
and goes on from there; of the first pass it reads the entries before the hit. Nothing else runs.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from deepseek_jax.config import ReplayConfig
from deepseek_jax.nn.rows import DecoderRows, Reads, Rows
from deepseek_jax.train.conversations import Example


class Turn(NamedTuple):
  """A response and all before it, in tokens of the conversation.

  Attributes:
    prompt: end of the prompt, where the response begins.
    end: of the response.
    hit: entries of the tokens before it were found, without window entries; 0 for a cold prefill.
  """

  prompt: int
  end: int
  hit: int = 0


class Lines(NamedTuple):
  """Rows of a conversation for both stacks. Segments and places in a line begin at its first.

  Attributes:
    source: token that an encoder row reads.
    rows: of the encoder.
    decoder: of the decoder; None where it runs the encoder's.
    targets: token that each row of the decoder predicts, −1 for none.
    weights: 1 where that carries loss.
  """

  source: Int32[np.ndarray, " T"]
  rows: Rows
  decoder: DecoderRows | None
  targets: Int32[np.ndarray, " D"]
  weights: Float32[np.ndarray, " D"]


def turns_of(example: Example) -> list[Turn]:
  """The runs of tokens that carry loss."""
  edges = np.flatnonzero(np.diff(np.r_[False, example.loss, False].astype(np.int8)))
  return [Turn(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2])]


def drawn(
    turns: Sequence[Turn], replay: ReplayConfig, *, window: int, multiple: int,
    seed: Sequence[int],
) -> list[Turn]:  # fmt: skip
  """Turns with the hits of one epoch.

  A turn is hit with probability `replay.encoder`: where the turn before ended, or at a position
  drawn from all that are left. Positions are whole groups, and further in than the window: a
  shorter hit is recomputed whole, as in serving.

  Args:
    turns: of one conversation.
    replay: how hits are drawn.
    window: W.
    multiple: tokens of the largest group.
    seed: of the draws, such as (seed, example, epoch).
  """
  # NumPy promises this stream for all its versions.
  raw = np.random.PCG64(list(seed)).random_raw((len(turns), 2)) / 2.0**64
  found, before = [], 0
  for turn, (coin, place) in zip(turns, raw):
    first, last = window // multiple + 1, turn.prompt // multiple
    hit = before // multiple
    if replay.hits == "uniform":
      hit = first + int(place * (last - first + 1))
    replays = coin < replay.encoder and first <= hit <= last
    found.append(turn._replace(hit=hit * multiple if replays else 0))
    before = turn.end
  return found


def row_counts(turns: Sequence[Turn], window: int) -> tuple[int, int]:
  """Rows of the encoder and of the decoder: of a conversation up to its last response."""
  replayed = sum(turn.end - max(0, turn.hit - window) for turn in turns if turn.hit)
  return turns[-1].end + replayed, sum(turn.end - max(0, turn.prompt - window) for turn in turns)


def most_rows(
    turns: Sequence[Turn], replay: ReplayConfig, *, window: int, multiple: int
) -> tuple[int, int]:
  """`row_counts` with the hits, of all that `drawn` can give, that need most."""
  if replay.encoder and replay.hits == "uniform":
    nearest = (window // multiple + 1) * multiple
    turns = [turn._replace(hit=nearest if nearest <= turn.prompt else 0) for turn in turns]
  elif replay.encoder:
    always = dataclasses.replace(replay, encoder=1.0)
    turns = drawn(turns, always, window=window, multiple=multiple, seed=(0,))
  return row_counts(turns, window)


def cut(
    example: Example, replay: ReplayConfig, *, window: int, multiple: int, seq_len: int
) -> Example:
  """The longest beginning whose rows fit in a line in every epoch; it may have no response."""

  def fits(n: int) -> bool:
    turns = turns_of(Example(example.tokens[:n], example.loss[:n]))
    if not turns:
      return True
    rows, below = most_rows(turns, replay, window=window, multiple=multiple)
    return rows <= seq_len and below <= replay.decoder_len

  # More tokens never need fewer rows.
  n = bisect.bisect_left(range(1, len(example.tokens) + 1), True, key=lambda n: not fits(n))
  return Example(example.tokens[:n], example.loss[:n])


def _segment(start: int, stop: int, floor: int, number: int, writes: int, reads: Reads) -> Rows:
  positions = np.arange(start, stop, dtype=np.int32)
  same = lambda value: np.full_like(positions, value)
  return Rows(positions, same(floor), same(number), positions >= writes, Reads(*(map(same, reads))))


def exact_lines(example: Example) -> Lines:
  """Both stacks over every token, as in pre-training."""
  n = len(example.tokens)
  rows = Rows.of_segments(np.ones(n, np.int32))
  targets = np.append(example.tokens[1:], -1).astype(np.int32)
  return Lines(
      np.arange(n, dtype=np.int32), rows, None, targets,
      np.append(example.loss[1:], False).astype(np.float32),
  )  # fmt: skip


def replayed_lines(example: Example, turns: Sequence[Turn], window: int) -> Lines:
  """Rows of simulated serving: a decoder replay in every turn, encoder replays at the hits."""
  total = turns[-1].end
  encoder = [_segment(0, total, 0, 1, 0, Reads(1, 0, 0, 0))]
  below, source, targets, weights = [], [], [], []
  begin = total  # row of the encoder's line where the next segment begins
  for number, (prompt, end, hit) in enumerate(turns, 1):
    reads, offset = Reads(1, 0, 0, 0), 0
    if hit:
      start = max(0, hit - window)
      reads, offset = Reads(len(encoder) + 1, 1, hit, 0), begin - start
      encoder.append(_segment(start, end, start, len(encoder) + 1, hit, reads))
      begin += end - start
    start = max(0, prompt - window)
    rows = _segment(start, end, start, number, end, reads)
    below.append(rows)
    source.append(rows.positions + offset)
    following = rows.positions + 1
    answers = (following >= prompt) & (following < end)
    targets.append(np.where(answers, example.tokens[np.minimum(following, end - 1)], -1))
    weights.append(answers)
  tokens = np.concatenate([rows.positions for rows in encoder])
  join = lambda parts, dtype: np.concatenate(parts).astype(dtype)
  together = lambda parts: Rows(
      *(np.concatenate(field) for field in zip(*(rows[:4] for rows in parts))),
      Reads(*(np.concatenate(field) for field in zip(*(rows.reads for rows in parts)))),
  )
  return Lines(
      tokens, together(encoder), DecoderRows(join(source, np.int32), together(below)),
      join(targets, np.int32), join(weights, np.float32),
  )  # fmt: skip


class Views:
  """The rows of examples, epoch by epoch.

  Without `replay` both stacks run every token of them.

  Args:
    examples: conversations; with `replay` each has a response.
    replay: what is simulated.
    window: W.
    multiple: tokens of the largest group.
    seed: of the draws: a turn's hits follow from (seed, example, epoch).
    turns: of every example, with the hits that it had; nothing is drawn then.

  Raises:
    ValueError: with `replay`, an example without a response; `turns` with hits if it replays no
      encoder rows.
  """

  def __init__(
      self, examples: Sequence[Example], *, replay: ReplayConfig | None = None, window: int = 1,
      multiple: int = 1, seed: int = 0, turns: Sequence[Sequence[Turn]] | None = None,
  ):  # fmt: skip
    self.examples, self.replay, self.seed = examples, replay, seed
    self.window, self.multiple = window, multiple
    self._turns, self._drawn = list(turns or ()), turns is None
    if replay is not None:
      self._turns = self._turns or [turns_of(example) for example in examples]
      for i, turns in enumerate(self._turns):
        if not turns:
          raise ValueError(f"example {i}: no token carries loss; a turn needs a response")
        if not replay.encoder and any(turn.hit for turn in turns):
          raise ValueError(f"example {i}: a turn has a hit; replay.encoder is 0, expected above 0")

  def turns(self, i: int, epoch: int = 0) -> list[Turn]:
    """Of example i, with hits."""
    if not self._drawn:
      return list(self._turns[i])
    return drawn(
        self._turns[i], self.replay, window=self.window, multiple=self.multiple,
        seed=(self.seed, i, epoch),
    )  # fmt: skip

  def counts(self, i: int, epoch: int = 0) -> tuple[int, ...]:
    """Rows of example i in a line of the encoder, and with `replay` in one of the decoder."""
    if self.replay is None:
      return (len(self.examples[i].tokens),)
    return row_counts(self.turns(i, epoch), self.window)

  def most(self, i: int) -> tuple[int, ...]:
    """`counts` of the epoch that needs most."""
    if self.replay is None or not self._drawn:
      return self.counts(i)
    return most_rows(self._turns[i], self.replay, window=self.window, multiple=self.multiple)

  def lines(self, i: int, epoch: int = 0) -> Lines:
    """Rows of example i."""
    if self.replay is None:
      return exact_lines(self.examples[i])
    return replayed_lines(self.examples[i], self.turns(i, epoch), self.window)

  def picture(self, i: int, epoch: int = 0) -> str:
    """Of example i."""
    turns = None if self.replay is None else self.turns(i, epoch)
    return picture(self.examples[i], turns, self.window)


def picture(example: Example, turns: Sequence[Turn] | None, window: int, width: int = 96) -> str:
  """Segments of a conversation against its tokens, one line each.

  `p` prompt, `R` response, `w` replayed without writing entries, `.` not run.

  Args:
    example: the conversation.
    turns: its turns; None where both stacks run every token.
    window: W.
    width: most characters for the tokens.
  """
  total = len(example.tokens) if turns is None else turns[-1].end
  scale = max(1, -(-total // width))
  segments = [("both stacks" if turns is None else "encoder", 0, 0, total)]
  for number, (prompt, end, hit) in enumerate(turns or (), 1):
    if hit:
      name = f"encoder, turn {number}, hit {hit}"
      segments.append((name, max(0, hit - window), hit, end))
    start = max(0, prompt - window)
    segments.append((f"decoder, turn {number}", start, start, end))
  found = [f"{total} tokens, {scale} a column; W = {window}"]
  for name, start, writes, stop in segments:
    marks = np.full(total, ".")
    marks[start:stop] = np.where(example.loss, "R", "p")[start:stop]
    marks[start:writes] = "w"
    # A column shows the first of these that it has.
    columns = [min(marks[i : i + scale], key="wRp.".index) for i in range(0, total, scale)]
    found.append(f"{name:<24} {''.join(columns)}  {stop - start} rows")
  return "\n".join(found)


def overview(views: Views, ids: Sequence[int], seq_len: int) -> tuple[str, dict[str, Any]]:
  """What a packed line holds in epoch 0.

  Args:
    views: rows of the examples.
    ids: examples of the line.
    seq_len: rows of a line of the encoder.

  Returns:
    Pictures of the examples, and counts: `examples`, and the rows of each role and of padding in
    `encoder` and `decoder`.
  """
  encoder, decoder = {"prompt": 0, "response": 0, "replayed": 0}, {"prompt": 0, "response": 0}
  for i in ids:
    lines = views.lines(i)
    answers, writes = views.examples[i].loss[lines.source], lines.rows.writes
    below = answers if lines.decoder is None else answers[lines.decoder.source]
    for stack, roles in (
        (encoder, (writes & ~answers, writes & answers, ~writes)), (decoder, (~below, below))
    ):  # fmt: skip
      for role, rows in zip(stack, roles):
        stack[role] += int(np.count_nonzero(rows))
  replay = views.replay
  for stack, rows in (encoder, seq_len), (decoder, replay.decoder_len if replay else seq_len):
    stack["padding"] = rows - sum(stack.values())
  counts = {"examples": len(ids), "encoder": encoder, "decoder": decoder}
  return "\n\n".join(views.picture(i) for i in ids), counts
