"""Engines over a small model, and the logits that they draw from."""

import dataclasses
from unittest import mock

import numpy as np

from deepseek_jax.cache import Cache
from deepseek_jax.config import ServeConfig
from deepseek_jax.serve import decode, generate, sampling, state

NEW = 9
EPS = 2e-5


class Letters:
  """64 tokens in 16 classes."""

  vocab_size, bos_id, pad_id, eos_id = 64, 0, 1, 2
  user_id, assistant_id, system_id = 3, 4, None

  def encode(self, text):
    return [8 + byte % 56 for byte in text.encode()]

  def decode(self, ids):
    return "".join(chr(48 + i) for i in ids)

  def pieces(self):
    return [(str(i % 16), str(i)) for i in range(self.vocab_size)]


class Clock:

  def __init__(self):
    self.seconds = 1e6

  def __call__(self):
    return self.seconds


class Serving:
  """A small model, engines over it, and the logits that they draw from."""

  def __init__(self, served):
    self.served, self.window = served, served.window
    self.config = dataclasses.replace(
        served.config, num_hidden_layers=4, compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2), candidate_source_layer_id=2,
        index_topk=24,
        candidate_topk_blocks=13,
        engram_layer_ids=(1,), engram_num_embeddings=(120,), max_position_embeddings=512,
    )  # fmt: skip
    self.steps = []

  def __enter__(self):
    self._patch = mock.patch.object(generate, "sample", self._sample)
    self._patch.start()
    return self

  def __exit__(self, *_):
    self._patch.stop()

  def _sample(self, logits, positions, how):
    self.steps.append(np.asarray(logits))
    return sampling.sample(logits, positions, how)

  def model(self, quantize=(), seed=0):
    return self.served.model(self.config, quantize, seed)

  def engine(self, store=None, *, model=None, clock=None, cache=None, ttl=5.0):
    return generate.Engine(
        self.model() if model is None else model,
        Letters(),
        ServeConfig(buckets=(8,), block=8, ttl_minutes=ttl, cache=cache),
        store=None if store is None else str(store),
        clock=clock or Clock(),
    )

  def window_bytes(self, engine):
    """Of the encoder's windows of one position."""
    ring = Cache.init(self.config, engine.storage, batch=1, capacity=1).encoder_window
    return ring.data.shape[0] * ring.layout.row_bytes

  def text(self, length, seed=0):
    return self.served.ids(length, lines=1, seed=seed)[0].tolist()

  def ask(self, engine, *texts, new=NEW, stop=(), **more):
    """(reply, logits of its tokens [n, V]) of each line."""
    self.steps = []
    result = engine.generate(texts, max_new_tokens=new, stop=stop, **more)
    logits = np.stack(self.steps, axis=1)
    return [(r, own[: len(r.tokens)]) for r, own in zip(result.replies, logits)]

  def by_plan(self, engine, text, plan, entries, windows=None, new=NEW):
    """Greedy tokens and logits by a plan over kept state, in a cache that is poisoned else."""
    cache = self.served.poisoned(
        Cache.init(self.config, engine.storage, batch=1, capacity=engine.capacity(len(text) + new))
    )
    kept = {n: entries[n][: plan.cached // part.ratio] for n, part in engine.parts.items()}
    state.put_entries(cache, engine.model.schedule, 0, kept)
    if windows is not None:
      state.put_window(cache, 0, windows, plan.encoder_start)
    cache, logits, _ = engine.reader.prefill(cache, [np.array(text)], [plan])
    seen = [np.asarray(logits)[0]]
    while len(seen) < new:
      token = np.array([seen[-1].argmax()], np.int32)
      cache, logits = decode.step(engine.weights, cache, token, np.array([True]), engine.classes)
      seen.append(np.asarray(logits)[0])
    return [int(row.argmax()) for row in seen], np.stack(seen)

  def stored(self, engine, text):
    """What the stores of an engine have of a text: hit length, window state, entries."""
    text = np.array(text)
    found, rows = engine.store.read(text, engine.store.lookup(text))
    return found.hit.length, found.windows, rows


def same(one, other, atol=EPS):
  """Two (reply or tokens, logits): the same tokens from the same logits."""
  tokens = lambda reply: list(getattr(reply, "tokens", reply))
  assert tokens(one[0]) == tokens(other[0])
  np.testing.assert_allclose(one[1], other[1], atol=atol, rtol=0)
