"""What replay costs on text: the standard library's own sources, byte by byte.

Text has what buried facts lack: words, indentation and brackets that are just being written, which
windows carry. The cost is counted in nats a byte, by distance after the boundary.
"""

import dataclasses
import functools
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from deepseek_jax.config import Config, ReplayConfig
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.tokenizer import ByteTokenizer
from deepseek_jax.train.conversations import Example
from deepseek_jax.train.data import Batch, collate
from deepseek_jax.train.turns import Turn, Views, turns_of

_BYTES = ByteTokenizer()


class Pieces(NamedTuple):
  """How texts are cut: `length` bytes, `turns` of `response` bytes in them; 0 turns: all is one."""

  length: int
  turns: int
  response: int


@functools.cache
def sources(held_out: bool) -> tuple[np.ndarray, ...]:
  """Token ids of the library's modules; every tenth file is held out."""
  folder = pathlib.Path(sysconfig.get_path("stdlib"))
  files = sorted(path for path in folder.glob("*.py")) + sorted(folder.glob("*/*.py"))
  files = [path for path in files if "site-packages" not in path.parts and "test" not in path.parts]
  chosen = [path for i, path in enumerate(files) if (i % 10 == 0) == held_out]
  texts = (path.read_bytes() for path in chosen)
  special = _BYTES.vocab_size - 256
  return tuple(
      np.frombuffer(text, np.uint8).astype(np.int32) + special for text in texts if len(text) > 4096
  )


def documents(
    rng: np.random.Generator, pieces: Pieces, window: int, *, held_out: bool = False
) -> Iterator[Example]:
  """Pieces of files, without end; responses begin behind a window at least, at even positions."""
  texts = sources(held_out)
  share = np.cumsum([len(text) for text in texts])
  n, width = pieces.length, pieces.response
  while True:
    text = texts[np.searchsorted(share, rng.integers(share[-1]), side="right")]
    begin = int(rng.integers(len(text) - n + 2))
    tokens = np.concatenate([[_BYTES.bos_id], text[begin : begin + n - 1]]).astype(np.int32)
    loss = np.arange(n) > 0
    if pieces.turns:
      first = window + 2
      free = n - first - pieces.turns * (width + 2)
      starts = np.sort(rng.integers(0, free // 2 + 1, pieces.turns)) * 2
      starts += first + np.arange(pieces.turns) * (width + 2)
      loss = np.zeros(n, bool)
      for start in starts // 2 * 2:
        loss[start : start + width] = True
    yield Example(tokens, loss)


def replay_of(training: str, pieces: Pieces, window: int) -> ReplayConfig | None:
  """What a training simulates: "exact", "decoder" or "both"."""
  if training == "exact":
    return None
  rows = pieces.turns * (window + pieces.response)
  return ReplayConfig(decoder_len=rows, encoder=0.5 if training == "both" else 0.0)


def config_of(
    config: Config, pieces: Pieces, *, steps: int, lines: int, learning_rate: float,
    replay: ReplayConfig | None = None,
) -> Config:  # fmt: skip
  """An experiment of one piece a line, with room for what is replayed."""
  rows = pieces.length
  if replay is not None and replay.encoder:
    # Turns do not overlap: behind the first they replay each other's rows, and a window each.
    rows += pieces.length + pieces.turns * (config.model.sliding_window + 1)
  train = dataclasses.replace(
      config.train, steps=steps, batch_size=lines, seq_len=rows, replay=replay,
      learning_rate=learning_rate, schedule="cosine", warmup_steps=min(20, steps // 2),
  )  # fmt: skip
  return dataclasses.replace(config, train=train)


def batch_of(seed: Sequence[int], pieces: Pieces, config: Config) -> Batch:
  """The batch of a step [1, lines, ...], of new pieces."""
  t, window = config.train, config.model.sliding_window
  rng = np.random.Generator(np.random.PCG64(list(seed)))
  stream = documents(rng, pieces, window)
  examples = [next(stream) for _ in range(t.batch_size)]
  views = Views(examples, replay=t.replay, window=window, multiple=2, seed=int(seed[-1]))
  lines = [[i] for i in range(len(examples))]
  return jax.tree.map(lambda a: a[None], collate(views, lines, t.seq_len, _BYTES.pad_id))


@jax.jit
def _losses(model: Transformer, batch: Batch):
  logits = model.logits(model(batch.tokens, batch.rows, batch.ngrams, batch.decoder).hidden)
  picked = jnp.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
  return jax.nn.logsumexp(logits, axis=-1) - picked


def costs(
    model: Transformer, pieces: Pieces, documents_: Iterator[Example], count: int, lines: int = 8
) -> dict[str, Float32[np.ndarray, "turns response"]]:
  """−log p of every byte of every response, by serving arm.

  The rows are those of training's simulation, which equals the arms (`tests/serve`): A exact, B
  cold, D behind a hit at the prompt's end; C is B.

  Args:
    model: over bytes.
    pieces: of `documents_`.
    documents_: held out.
    count: of documents.
    lines: of a batch.
  """
  w, found = model.config.sliding_window, {arm: [] for arm in "ABD"}
  for _ in range(-(-count // lines)):
    examples = [next(documents_) for _ in range(lines)]
    cold = [turns_of(example) for example in examples]
    hits = [[Turn(t.prompt, t.end, t.prompt // 2 * 2) for t in turns] for turns in cold]
    below = pieces.turns * (w + pieces.response)
    replayed = pieces.length + below + 2 * pieces.turns
    for arm, replay, turns, rows in (
        ("A", None, None, pieces.length),
        ("B", ReplayConfig(below), cold, pieces.length),
        ("D", ReplayConfig(below, 1.0), hits, replayed),
    ):
      views = Views(examples, replay=replay, window=w, turns=turns)
      batch = collate(views, [[i] for i in range(lines)], rows, _BYTES.pad_id)
      losses = np.asarray(_losses(model, batch))
      found[arm].append(losses[batch.weights > 0].reshape(-1, pieces.response))
  return {arm: np.concatenate(parts) for arm, parts in found.items()}


def by_distance(
    costs_: dict[str, np.ndarray], distances: tuple[int, ...] = (1, 2, 8, 32)
) -> dict[str, dict[str, tuple[float, float]]]:
  """Mean excess of B over A and of D over B, at each byte after the boundary and over all of them.

  Returns:
    By name and distance ("all" for the whole response) mean and standard error in nats a byte.
  """
  found = {}
  for name, arm, other in (("B_over_A", "B", "A"), ("D_over_B", "D", "B")):
    excess = costs_[arm] - costs_[other]
    parts = {str(d): excess[:, d - 1] for d in distances} | {"all": excess.mean(axis=1)}
    found[name] = {
        key: (float(v.mean()), float(v.std(ddof=1) / np.sqrt(len(v)))) for key, v in parts.items()
    }
  return found
