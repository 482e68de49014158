"""Conversations of given lengths."""

import numpy as np

from deepseek_jax.train.conversations import Example


def conversation(spans, tail=0, seed=0):
  """Prompts and responses of these lengths in turn, and a prompt that nobody answered."""
  loss = np.concatenate([np.repeat([False, True], span) for span in spans] + [[False] * tail])
  tokens = np.random.default_rng([seed, len(loss)]).integers(8, 264, len(loss))
  return Example(tokens.astype(np.int32), loss.astype(bool))
