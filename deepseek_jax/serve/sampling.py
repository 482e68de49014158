"""Next tokens from logits: greedy, temperature, top-p."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How the next token is drawn.

  Attributes:
    temperature: logits are divided by it; 0 takes the likeliest token, the lowest id among equals.
    top_p: the draw is from the fewest likeliest tokens whose probabilities reach it; 1 is all.
    seed: of the draws. A request's draws depend on seed, its number and the position alone.

  Raises:
    ValueError: a temperature below 0, top_p outside (0, 1], a seed that does not fit 32 bits.
  """

  temperature: float = 0.0
  top_p: float = 1.0
  seed: int = 0

  def __post_init__(self):
    if not 0 <= self.temperature < float("inf"):
      raise ValueError(f"temperature is {self.temperature}; it must be finite and at least 0")
    if not 0 < self.top_p <= 1:
      raise ValueError(f"top_p is {self.top_p}; it must be within (0, 1]")
    if not 0 <= self.seed < 1 << 32:  # JAX would take another seed for it.
      raise ValueError(f"seed is {self.seed}; it must be within 0..2^32 - 1")


def nucleus(logits: Float[Array, "B V"], top_p: float) -> Float[Array, "B V"]:
  """Logits with −inf outside the fewest likeliest tokens whose probabilities sum to top_p."""
  p, order = jax.lax.top_k(jax.nn.softmax(logits), logits.shape[-1])
  keep = jnp.cumsum(p, axis=-1) - p < top_p  # the sum before the token; the first is always kept
  line = jnp.arange(logits.shape[0])[:, None]
  return jnp.where(jnp.zeros(logits.shape, bool).at[line, order].set(keep), logits, -jnp.inf)


@functools.partial(jax.jit, static_argnames="how")
def sample(
    logits: Float[Array, "B V"], positions: Int[Array, " B"], how: Sampling
) -> Int[Array, " B"]:
  """One token a line.

  Args:
    logits: f32.
    positions: of the tokens to come.
    how: static.
  """
  if how.temperature < jnp.finfo(logits.dtype).tiny:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  # The likeliest token is at 0: no quotient overflows that can be drawn.
  logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / how.temperature
  if how.top_p < 1:
    logits = nucleus(logits, how.top_p)
  key = jax.random.key(how.seed)
  keys = jax.vmap(lambda line, at: jax.random.fold_in(jax.random.fold_in(key, line), at))(
      jnp.arange(logits.shape[0]), positions
  )
  return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
