"""Next-token loss over response tokens, in sums: the caller divides by the whole step's counts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deepseek_jax.nn import chunks
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.train.data import Batch


class Sums(NamedTuple):
  """Numerators of one micro-batch, f32.

  Attributes:
    nll: Σ weight · −log p(target), in nats.
    balance: Σ over layers and lines of tokens · Σ_e f_e P_e.
    index: Σ over layers and rows of the index divergence.
  """

  nll: Float[Array, ""]
  balance: Float[Array, ""]
  index: Float[Array, ""]


class Counts(NamedTuple):
  """Denominators over a whole step: Σ weights, and rows that are no padding."""

  targets: Float[Array, ""]
  tokens: Float[Array, ""]

  @classmethod
  def of(cls, batch: Batch) -> "Counts":
    valid = jnp.sum(batch.rows.segments > 0)
    return cls(jnp.sum(batch.weights), valid.astype(jnp.float32))


def next_token_nll(
    model: Transformer, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"],
    weights: Float[Array, "B T"], *, chunk: int,
) -> Float[Array, ""]:  # fmt: skip
  """Σ weights · −log softmax(logits)[target], the logits of `chunk` rows at a time."""

  def of_chunk(x, _):
    hidden, targets, weights = x
    logits = model.logits(hidden)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return weights * (jax.nn.logsumexp(logits, axis=-1) - picked)

  size = chunks.chunk_rows(hidden.shape[1], chunk, 1)
  return jnp.sum(chunks.over_rows(of_chunk, (hidden, targets, weights), size))


def sums(
    model: Transformer, batch: Batch, *, index_loss: str
) -> tuple[Sums, Float[Array, "layers E"]]:
  """Loss numerators of a micro-batch and the expert loads of its layers; on a mesh this share's."""
  model = model.with_whole_ends()
  out = model(
      batch.tokens, batch.rows, batch.ngrams, batch.decoder,
      index_loss=index_loss != "frozen", select_all=index_loss == "warmup",
  )  # fmt: skip
  nll = next_token_nll(
      model, out.hidden, batch.targets, batch.weights, chunk=model.compute.row_chunk * 4
  )
  return Sums(nll, out.balance_loss, out.index_loss), out.load
