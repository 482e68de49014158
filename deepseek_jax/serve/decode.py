"""One token a line: both stacks over one new row of every request (spec 6)."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from deepseek_jax.cache import Cache
from deepseek_jax.nn.attention import Pass
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.serve.prefill import Extended, extend_rows, require_alive
from deepseek_jax.serve.weights import Weights, whole

_PLAIN = Pass()


def decode_row(
    model: Transformer | Weights, cache: Cache, tokens: Int[Array, " B"], live: Bool[Array, " B"],
    classes: Int[Array, " V"] | None,
) -> tuple[Cache, Float[Array, "B V"]]:  # fmt: skip
  """Reads one token a line and returns the logits of the next (f32).

  Args:
    model: the model; `Weights` of it spare each call a millisecond.
    cache: lines may stand at different positions; each must have room for one more token.
    tokens: ids.
    live: lines that read; the others keep their state.
    classes: token class of every id, for Engram.
  """
  model = whole(model)
  cache, hidden, *_ = advance_row(model, cache, tokens, live, classes)
  return cache, model.logits(hidden)[:, 0]


def advance_row(
    model: Transformer, cache: Cache, tokens: Int[Array, " B"], live: Bool[Array, " B"],
    classes: Int[Array, " V"] | None, how: Pass = _PLAIN,
) -> Extended:  # fmt: skip
  """`decode_row` up to the hidden state [B, 1, D]."""
  one = lambda a: a[:, None]
  ngrams = None
  if classes is not None:
    ngrams = one(jnp.concatenate([one(classes[tokens]), cache.history], axis=1))
  positions = jnp.where(live, cache.lengths, 0)
  rows = Rows(one(positions), one(cache.floors[:, 0]), one(live.astype(jnp.int32)), one(live))
  return extend_rows(model, cache, one(tokens), rows, ngrams, one(cache.floors[:, 1]), how)


program = functools.partial(jax.jit, donate_argnames="cache")(decode_row)


def step(model, cache, tokens, live, classes):
  """`decode_row`, compiled. The cache is donated: go on with the one that comes back.

  Raises:
    ValueError: a cache that was donated before.
  """
  require_alive(cache)
  return program(model, cache, tokens, live, classes)
