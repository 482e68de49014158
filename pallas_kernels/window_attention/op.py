"""Attention of every row over its sliding window (report 2.1; spec 3.6 and 17)."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.window_attention import kernel, kernel_vjp, reference

AVAILABLE = ("pallas", "reference")


def window_attention(
    q: Float[Array, "B T N H"], kv: Float[Array, "B S H"],
    positions: Int[Array, "B T"], floors: Int[Array, "B T"], segments: Int[Array, "B T"],
    key_positions: Int[Array, "B S"], key_segments: Int[Array, "B S"], sink: Float[Array, " N"], *,
    window: int, statistics: bool = False, implementation: str | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:  # fmt: skip
  """Softmax over the row's window and the sink, which only enters the denominator.

  Row t is slot S − T + t of the keys. It sees the slots of its own segment whose position lies in
  [max(floor, i − window + 1), i], i its own; one latent a slot is key and value of all heads. A row
  that sees nothing gives exactly 0. Logits are scaled by H^-0.5; they, the sums and the statistics
  are f32, probabilities are rounded to q's dtype for the value product.

  The kernel reads the S − T slots before a block of rows, so that in every segment the rows must
  follow each other by position; the first S − T slots may come in any order. The gradient goes to
  q, kv and sink; it saves log Σ exp and recomputes the rest.

  Args:
    q: rotated queries, float32 or bfloat16.
    kv: window latents of q's dtype; slots of segment 0 may hold anything, NaN included.
    positions: of the rows; int32, like all integers.
    floors: of the rows.
    segments: of the rows; 0 marks padding, which sees nothing.
    key_positions: of the slots.
    key_segments: of the slots.
    sink: f32 logit per head.
    window: W; S − T is at least W − 1.
    statistics: also return log Σ exp over keys and sink, f32, to merge with other keys:
      out·exp(lse − lse_all) is this part of the joint output. −inf nowhere: the sink is in it.
    implementation: see `dispatch.resolve`. The kernel takes up to 128 heads.

  Raises:
    ValueError: shapes or dtypes are not those above, or four rows exceed the VMEM budget.
  """
  _check(q, kv, segments, key_segments, sink, window)
  integers = positions, floors, segments, key_positions, key_segments
  if dispatch.resolve(implementation, AVAILABLE, refusal(q.shape[2])) == "reference":
    out, lse = reference.attend(q, kv, *integers, sink, window=window)
  else:
    run = functools.partial(_kernel, window=window)
    out, lse = dispatch.over_lines(run, q, kv, *integers, sink, shared={7})
  return (out, lse) if statistics else out


def refusal(heads: int) -> str | None:
  """Why the kernel does not take so many heads, or None."""
  if heads <= kernel.LANES:
    return None
  return f"q has {heads} heads: the kernel takes at most {kernel.LANES}"


def _kernel(q, kv, positions, floors, segments, key_positions, key_segments, sink, *, window):
  _, t, n, h = q.shape
  # Other sizes than the released ones are padded, at the price of a copy.
  sublanes = 8 if q.dtype == jnp.float32 else 16
  heads, channels = -n % sublanes, -h % kernel.LANES
  if heads or channels:
    q = jnp.pad(q, ((0, 0), (0, 0), (0, heads), (0, channels)))
    kv = jnp.pad(kv, ((0, 0), (0, 0), (0, channels)))
    sink = jnp.pad(sink, (0, heads))
  sizes = tuple(
      kernel.sizes_of(t, kv.shape[1] - t, window, n + heads, h + channels, q.dtype, blocks, h**-0.5)
      for blocks in (2, 3)
  )
  first = jnp.maximum(floors, positions - window + 1)
  integers = first, positions, segments, key_positions, key_segments
  out, lse = kernel_vjp.attend(sizes, q, kv, *integers, sink)
  return (out[:, :, :n, :h], lse[:, :, :n]) if heads or channels else (out, lse)


def _check(q, kv, segments, key_segments, sink, window):
  if q.dtype not in (jnp.float32, jnp.bfloat16):
    raise ValueError(f"q has dtype {q.dtype}: allowed are float32 and bfloat16")
  if kv.dtype != q.dtype or sink.dtype != jnp.float32:
    raise ValueError(
        f"kv is {kv.dtype} and sink is {sink.dtype}: they must be q's {q.dtype} and float32"
    )
  if segments.dtype != jnp.int32 or key_segments.dtype != jnp.int32:
    raise ValueError(f"segments are {segments.dtype} and {key_segments.dtype}: allowed is int32")
  front = kv.shape[1] - q.shape[1]
  if window < 1 or front < window - 1:
    raise ValueError(
        f"window={window} with {front} slots before the rows: at least window - 1 are needed"
    )
