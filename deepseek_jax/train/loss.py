"""Loss over response tokens, in sums: the caller divides by the whole step's counts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deepseek_jax.config import RolloutConfig
from deepseek_jax.nn import chunks
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.train.data import Batch


class Sums(NamedTuple):
  """Numerators of one micro-batch, f32.

  Attributes:
    nll: Σ weight · −log p(target), in nats, or of what a rollout's objective puts in its place.
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


class Teacher(NamedTuple):
  """A model to be like, and its final hidden state of the decoder's rows."""

  model: Transformer
  hidden: Float[Array, "B D W"]


def token_losses(
    model: Transformer, hidden: Float[Array, "B D W"], batch: Batch, how: RolloutConfig | None,
    teacher: Teacher | None, *, chunk: int,
) -> Float[Array, ""]:  # fmt: skip
  """Σ over targets of weight · loss, the logits of `chunk` rows at a time.

  The loss is −log p(target); for distillation KL(student ‖ teacher) over the vocabulary; for GRPO
  −min(ρ·A, clip(ρ)·A) with the importance ratio ρ of the target against the policy that wrote it.
  """

  def of_chunk(x, _):
    hidden, targets, weights, policy, theirs = x
    logits = model.logits(hidden)
    if how is None:
      picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
      return weights * (jax.nn.logsumexp(logits, axis=-1) - picked)
    if how.objective == "distill":
      taught = jax.lax.stop_gradient(teacher.model.logits(theirs))
      ours, other = (jax.nn.log_softmax(x) for x in (logits, taught))
      return weights * jnp.sum(jnp.exp(ours) * (ours - other), axis=-1)
    logits = logits / how.temperature
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    old, advantages = policy
    ratio = jnp.exp(picked - jax.nn.logsumexp(logits, axis=-1) - old)
    kept = jnp.clip(ratio, 1 - how.clip, 1 + how.clip)
    return -weights * jnp.minimum(ratio * advantages, kept * advantages)

  size = chunks.chunk_rows(hidden.shape[1], chunk, 1)
  policy = batch.policy and tuple(batch.policy[:2])
  rows = hidden, batch.targets, batch.weights, policy, teacher and teacher.hidden
  return jnp.sum(chunks.over_rows(of_chunk, rows, size))


def _taught(teacher: Transformer, batch: Batch) -> Teacher:
  """What the teacher makes of the rows: it reads each line's one conversation without a replay."""
  first = batch.rows.segments == 1
  positions = jnp.where(first, batch.rows.positions, 0)
  rows = Rows(positions, jnp.zeros_like(positions), first.astype(jnp.int32), first)
  hidden = teacher(batch.tokens, rows, batch.ngrams).hidden
  at = (batch.rows if batch.decoder is None else batch.decoder.rows).positions
  hidden = jnp.take_along_axis(hidden, at[..., None], axis=1, mode="clip")
  return Teacher(teacher, hidden)


def sums(
    model: Transformer, batch: Batch, *, index_loss: str, how: RolloutConfig | None = None,
    teacher: Transformer | None = None,
) -> tuple[Sums, Float[Array, "layers E"]]:  # fmt: skip
  """Loss numerators of a micro-batch and the expert loads of its layers; on a mesh this share's.

  Args:
    model: with parameters.
    batch: its lines hold one conversation each if there is a teacher.
    index_loss: see `TrainConfig`.
    how: objective of a rollout; None for the next token.
    teacher: of distillation; it has no gradient.
  """
  model = model.with_whole_ends()
  out = model(
      batch.tokens, batch.rows, batch.ngrams, batch.decoder, batch.policy and batch.policy.routes,
      index_loss=index_loss != "frozen", select_all=index_loss == "warmup",
  )  # fmt: skip
  taught = None if teacher is None else _taught(teacher.with_whole_ends(), batch)
  total = token_losses(model, out.hidden, batch, how, taught, chunk=model.compute.row_chunk * 4)
  return Sums(total, out.balance_loss, out.index_loss), out.load
