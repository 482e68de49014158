"""A tiny model with every layer mode, and how the laws of serving run it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deepseek_jax import tokenizer
from deepseek_jax.cache import Cache, Table
from deepseek_jax.config import CacheFormats, ComputeConfig, ModelConfig
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.serve import decode, prefill

# Encoder: window, Full m = 2 with an Engram, Reuse. Decoder: Full with the pool, Reindex with an
# Engram, two Reuse that are scanned. The window is small, so that the last row which a stack of
# layers can see still shows in f32.
CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=7,
    num_attention_heads=2,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=16,
    o_lora_rank=8,
    o_groups=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    sliding_window=4,
    compress_ratios=(0, 2, 2, 1, 1, 1, 1),
    kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3, 4),
    index_n_heads=8,
    index_head_dim=32,
    index_topk=4,
    candidate_source_layer_id=3,
    candidate_topk_blocks=3,
    candidate_block_size=2,
    max_position_embeddings=64,
    engram_layer_ids=(1, 4),
    engram_num_embeddings=(120, 184),
    engram_max_ngram_size=3,
    engram_vocab_size=20,
    engram_n_heads=2,
    engram_head_dim=8,
    engram_compressed_vocab_size=16,
)
W = CONFIG.sliding_window
LINES = 3 * W
PAD_CLASS = 1
# Large in every format: E8M0 gives 1/2, E4M3 448, E2M1 6 and -4.
_POISON_WORD, _POISON_VALUE = 0x7E7E7E7E, 1e4


class Chunked(prefill.Reader):
  """Reads in chunks of one length, shorter than W too."""

  def _chunks(self, lines, extra=None):
    return super()._chunks(lines)


class Served:
  """Models, caches and runs that the laws share."""

  config, window, lines, pad_class = CONFIG, W, LINES, PAD_CLASS
  classes = np.arange(CONFIG.vocab_size, dtype=np.int32) % CONFIG.engram_compressed_vocab_size

  @functools.cache
  @staticmethod
  def model(config: ModelConfig = CONFIG, quantize: tuple[str, ...] = (), seed: int = 0):
    """A model with every parameter random, sinks, norms and biases too."""
    compute = ComputeConfig(row_chunk=7, quantize=quantize)
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, compute, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(seed)

    def draw(leaf):
      x = rng.standard_normal(leaf.shape)
      matrix = leaf.ndim >= 2 and leaf.shape[-1] >= 8 and leaf.shape[-2] >= 8
      return jnp.asarray(x * leaf.shape[-1] ** -0.5 if matrix else 0.5 + 0.3 * x, leaf.dtype)

    return nnx.merge(graph, jax.tree.map(draw, state))

  @staticmethod
  def ids(length: int, lines: int = LINES, seed: int = 1) -> np.ndarray:
    """Token ids [lines, length]."""
    drawn = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (lines, length))
    return drawn.astype(np.int32)

  @classmethod
  def cache(cls, model=None, *, lines: int = LINES, storage: CacheFormats | None = None) -> Cache:
    """A cache in which everything is poisoned that a prefill must set or never read."""
    model = model or cls.model()
    storage = storage or CacheFormats.of(model.compute)
    empty = Cache.init(model.config, storage, batch=lines, capacity=1, pad_class=PAD_CLASS)
    return cls.poisoned(empty)

  @staticmethod
  def poisoned(cache: Cache) -> Cache:
    """Large finite values in tables and tails, false counters and histories; NumPy."""

    def fill(a):
      a = np.asarray(a)
      words = a.dtype == np.int32 and a.ndim > 2
      return np.full_like(a, _POISON_WORD if words else 3 if a.dtype == np.int32 else _POISON_VALUE)

    return jax.tree.map(fill, cache)

  @classmethod
  def reader(cls, model=None, buckets: tuple[int, ...] = (W, 4 * W), *, chunk: int | None = None):
    """A reader by buckets, or one whose chunks all have one length."""
    made, lengths = (prefill.Reader, buckets) if chunk is None else (Chunked, (chunk,))
    return made(model or cls.model(), lengths, cls.classes, PAD_CLASS)

  @classmethod
  def ngrams(cls, ids: np.ndarray) -> np.ndarray:
    order = CONFIG.engram_max_ngram_size
    return np.stack([tokenizer.ngrams(cls.classes[line], PAD_CLASS, order) for line in ids])

  @classmethod
  def forward(cls, model, ids: np.ndarray) -> np.ndarray:
    """Logits of every position from one pass without a cache."""
    return np.asarray(_forward(model, ids, cls.ngrams(ids)))

  @classmethod
  def write(cls, cache: Cache, ids: np.ndarray, lengths, model=None) -> tuple[Cache, np.ndarray]:
    """Reads ids[b, lengths[b]:] a token at a time; logits [B, T, V], NaN before the first."""
    model, at = model or cls.model(), np.array(lengths)
    logits = np.full((*ids.shape, model.config.vocab_size), np.nan, np.float32)
    while (live := at < ids.shape[1]).any():
      now = np.minimum(at, ids.shape[1] - 1)
      every = np.arange(len(ids))
      cache, new = decode.step(model, cache, ids[every, now], live, cls.classes)
      logits[every[live], now[live]] = np.asarray(new)[live]
      at = at + live
    return cache, logits

  @staticmethod
  def line(cache: Cache, number: int) -> list[np.ndarray]:
    """Every array of a line's state."""
    rings = (cache.encoder_window, cache.decoder_window)
    rest = dataclasses.replace(cache, encoder_window=None, decoder_window=None)
    own = [np.asarray(a)[:, number] for a in jax.tree.leaves(rings)]
    return own + [np.asarray(a)[number] for a in jax.tree.leaves(rest)]

  @staticmethod
  def same_bytes(one, other) -> bool:
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )

  @staticmethod
  def rows(table: Table) -> np.ndarray:
    """Rows as stored, uint8 [*lead, rows, row_bytes]."""
    every = np.arange(table.layout.rows)
    lines = range(table.data.shape[-3])
    return np.stack([table.export(n, every) for n in lines], axis=-3)


@jax.jit
def _forward(model, ids, ngrams):
  return model.logits(model(ids, Rows.single(*ids.shape), ngrams).hidden)


@pytest.fixture(scope="session")
def served():
  return Served
