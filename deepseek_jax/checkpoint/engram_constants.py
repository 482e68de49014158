"""What Engram needs beside its weights and no released file holds (spec 11)."""

from typing import NamedTuple

import numpy as np

from deepseek_jax import tokenizer as tok
from deepseek_jax.config import ModelConfig
from deepseek_jax.nn.engram import HashConstants, hash_constants


class EngramConstants(NamedTuple):
  """Token classes [V], the class of the pad token, and the hash constants of each Engram layer."""

  classes: np.ndarray
  pad_class: int
  layers: tuple[HashConstants, ...]


def derive(config: ModelConfig, tokenizer: tok.Tokenizer, name: str) -> EngramConstants:
  """Derives the constants anew from configuration and tokenizer.

  The rows of a table are the sum of its primes: a configuration that agrees with the shapes in a
  checkpoint and passes here fits its tables.

  Args:
    config: of the model.
    tokenizer: of the checkpoint.
    name: of the tokenizer, for messages.

  Raises:
    ValueError: the tokenizer has more tokens than the model or another number of classes, or the
      primes do not sum to the rows of a table.
  """
  if tokenizer.vocab_size > config.vocab_size:
    raise ValueError(
        f"vocab_size is {config.vocab_size}; it must be at least {tokenizer.vocab_size}, the tokens"
        f" of tokenizer {name}"
    )
  classes = tok.token_classes(tokenizer)
  count = int(classes.max()) + 1
  if count != config.engram_compressed_vocab_size:
    raise ValueError(
        f"engram_compressed_vocab_size is {config.engram_compressed_vocab_size}; tokenizer"
        f" {name} has {count} classes"
    )
  if config.engram_pad_token_id >= len(classes):
    raise ValueError(
        f"engram_pad_token_id is {config.engram_pad_token_id}; tokenizer {name} has"
        f" {len(classes)} tokens"
    )
  pad_class = int(classes[config.engram_pad_token_id])
  return EngramConstants(classes, pad_class, hash_constants(config))
