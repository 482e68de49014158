"""What replay costs on text: the standard library's own sources, byte by byte.

Text has what buried facts lack: words, indentation and brackets that are just being written, which
windows carry. The cost is counted in nats a byte, by distance after the boundary.
"""

import dataclasses
import functools
import pathlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float32

from deepseek_jax.config import Config, ReplayConfig
from deepseek_jax.eval import replay_experiment as experiment
from deepseek_jax.eval.replay_experiment import Case
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.tokenizer import ByteTokenizer
from deepseek_jax.train import step
from deepseek_jax.train.conversations import Example
from deepseek_jax.train.data import Batch, collate
from deepseek_jax.train.turns import Turn, Views, turns_of

_BYTES = ByteTokenizer()


class Pieces(NamedTuple):
  """How texts are cut: `length` bytes, `turns` of `response` bytes in them; 0 turns: all is one."""

  length: int
  turns: int
  response: int


@dataclasses.dataclass(frozen=True)
class Setting:
  """A model of bytes, how it is taught and fine-tuned (in exact steps), and what is measured.

  Attributes:
    name: of the setting.
    window: W.
    taught, tuned: how texts are cut, in teaching and from then on.
    steps, tune_steps: of lines of one piece each.
    documents: held-out pieces.
    lines: of a step.
  """

  name: str
  window: int
  taught: Pieces
  tuned: Pieces
  steps: int
  tune_steps: int
  documents: int
  lines: int = 4

  def config(self, config: Config) -> Config:
    """`config` over bytes, with this setting's window."""
    model = dataclasses.replace(config.model, vocab_size=264, sliding_window=self.window)
    return dataclasses.replace(config, model=model)


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


def tuning(setting: Setting, config: Config, training: str, seed: int = 0) -> Case:
  """The fine-tuning of a training, for `setting.tune_steps` steps."""
  pieces = setting.tuned
  one = config_of(
      setting.config(config), pieces, steps=setting.tune_steps, lines=setting.lines,
      learning_rate=3e-3, replay=replay_of(training, pieces, setting.window),
  )  # fmt: skip
  return one, lambda number: batch_of((seed, 1, number), pieces, one)


def run(
    setting: Setting, config: Config, seed: int, workdir: pathlib.Path, say: Callable[[str], Any]
) -> None:
  """Trains and measures one seed; leaves `NAME_SEED_TRAINING_costs.npz` files."""
  base = setting.config(config)
  base = dataclasses.replace(base, train=dataclasses.replace(base.train, seed=seed))
  one = config_of(
      base, setting.taught, steps=setting.steps, lines=setting.lines, learning_rate=1e-2
  )
  teach = one, lambda n: batch_of((seed, 0, n), setting.taught, one)
  tune = functools.partial(tuning, setting, config, seed=seed)
  steps = experiment.steps_of(setting.name, tune, workdir)
  graphdef, _ = step.abstract_model(base)
  trained = experiment.learn(f"{setting.name}_{seed}", [teach], tune, steps, workdir, say)
  for training, params in trained:
    name = f"{setting.name}_{seed}_{training}"
    path = workdir / f"{name}_costs.npz"
    if not path.exists():
      say(f"{name}: serving")
      rng = experiment.generator(20_000 + seed)
      held_out = documents(rng, setting.tuned, setting.window, held_out=True)
      found = costs(nnx.merge(graphdef, params), setting.tuned, held_out, setting.documents)
      experiment.write_arrays(path, found)
