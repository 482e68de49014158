"""A sampled reply by full passes over one buffer: no cache, no compilation per length."""

import functools

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from deepseek_jax import tokenizer as tok
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer


@functools.partial(jax.jit, static_argnums=0)
def _logits(
    graphdef: nnx.GraphDef, params: nnx.State, tokens: Int[Array, "1 T"], rows: Rows,
    ngrams: Int[Array, "1 T n"] | None, at: Int[Array, ""],
) -> Float[Array, " V"]:  # fmt: skip
  model = nnx.merge(graphdef, params)
  hidden = model(tokens, rows, ngrams).hidden
  return model.logits(jax.lax.dynamic_slice_in_dim(hidden, at, 1, axis=1))[0, 0]


def reply(
    model: Transformer,
    tokenizer: tok.Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    buffer: int = 256,
) -> str:
  """The model's answer to one user message.

  Every token costs a pass over the whole buffer, so this is for a look at a small model; serving
  keeps caches.

  Args:
    model: its vocabulary is the tokenizer's.
    tokenizer: one with markers for user and assistant.
    prompt: the message.
    max_new_tokens: the reply ends there if the end token does not come.
    temperature: 0 takes the likeliest token.
    seed: of the draws.
    buffer: the buffer's length is a multiple of it, in tokens.

  Raises:
    ValueError: a temperature below 0, fewer than one token, or a tokenizer without markers.
  """
  if temperature < 0:
    raise ValueError(f"temperature is {temperature}; it must be at least 0")
  if max_new_tokens < 1:
    raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
  if tokenizer.user_id is None or tokenizer.assistant_id is None:
    raise ValueError("the tokenizer has no markers for user and assistant; a reply needs both")
  text = tokenizer.encode(prompt)
  ids = [tokenizer.bos_id, tokenizer.user_id, *text, tokenizer.assistant_id]
  start = len(ids)
  length = -(-(start + max_new_tokens) // buffer) * buffer
  classes = tok.token_classes(tokenizer) if model.config.engram_layer_ids else None
  order = model.config.engram_max_ngram_size
  graphdef, params = nnx.split(model)
  rng = np.random.default_rng(seed)
  for _ in range(max_new_tokens):
    tokens = np.full((1, length), tokenizer.pad_id, np.int32)
    tokens[0, : len(ids)] = ids
    rows = Rows.of_segments((np.arange(length) < len(ids)).astype(np.int32)[None])
    ngrams = None
    if classes is not None:
      live = np.arange(length) < len(ids)
      own = tok.classes_of(tokens[0], classes, live)
      ngrams = tok.ngrams(own, classes[tokenizer.pad_id], order)[None]
    logits = np.asarray(_logits(graphdef, params, tokens, rows, ngrams, np.int32(len(ids) - 1)))
    if temperature > 0:
      # The largest of logits with Gumbel noise is a draw from their softmax.
      logits = logits.astype(np.float64) / temperature + rng.gumbel(size=logits.shape)
    ids.append(int(np.argmax(logits)))
    if ids[-1] == tokenizer.eos_id:
      break
  return tokenizer.decode(ids[start:])
