"""Joint attention over a window and selected entries (report 2.3, spec 3.6).

One softmax over the keys of both and a sink, which only enters the denominator. Keys are values
and logits are scaled by H^-0.5, the sink is not. An entry that is selected twice, or a latent that
is in the window and selected, counts twice. A row that sees nothing gives exactly 0.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import block_sizes, dispatch
from pallas_kernels.sparse_attention import (
    kernel,
    kernel_rows_vjp,
    kernel_vjp,
    layout,
    reference,
    resident,
)
from pallas_kernels.window_attention import op as window_attention

AVAILABLE = ("pallas", "reference")

_FLOATS = (jnp.float32, jnp.bfloat16)


def sparse_attention_decode(
    q: Float[Array, "B N H"], entries: Int[Array, "... R 128"], slots: Int[Array, "B K"],
    window: Int[Array, "B R1 128"], window_scales: Int[Array, "B R2 128"],
    seen: Int[Array, "B W"], sink: Float[Array, " N"], *, channels: str = "natural",
    implementation: str | None = None,
) -> Float[Array, "B N H"]:  # fmt: skip
  """One row a request over packed caches: gather, decoding and attention in one pass.

  Reads two rows of 512 bytes a selected entry, wherever it starts in the table, and the window;
  nothing else of the caches. Has no gradient.

  Args:
    q: rotated queries, float32 or bfloat16: the dtype that keys are decoded to.
    entries: FP4 main KV in the word order of `layout.to_stored`: one table int32 [R, 128] of all
      requests, or one a request, [B, R, 128].
    slots: selected entries, −1 for absent ones in any place. Slots beyond the table
      read some entry.
    window: E4M3 codes of each ring, four channels a word.
    window_scales: E8M0 bytes of each ring, four a word.
    seen: not 0 where a slot of the ring is a key of the request.
    sink: f32 logits.
    channels: order of those of q and of the result: "natural", or "planes", `layout.CHANNELS`, in
      which the kernel computes; rows of the weights before and columns of those behind can be put
      into that order once. Only for H = 512.
    implementation: see `dispatch.resolve`. The kernel takes H = 512, heads in multiples of 16,
      up to 512 slots in multiples of 32 and a window of 64 or 128.

  Returns:
    Values in q's dtype. Rounded to q's dtype are the probabilities, before the division by their
    sum; logits and sums are f32.

  Raises:
    ValueError: shapes or dtypes are not those above.
  """
  b, n, h = q.shape
  k, w = slots.shape[1], seen.shape[1]
  _check_floats(q, h, 32, sink)
  if channels not in ("natural", "planes") or (channels == "planes" and h != len(layout.CHANNELS)):
    raise ValueError(
        f"channels is {channels!r} for {h} of them; allowed are 'natural' and, for"
        f" {len(layout.CHANNELS)}, 'planes'"
    )
  natural = channels == "natural"
  codes, scales = h // 8, -(-h // 64)
  if entries.ndim not in (2, 3) or (entries.ndim == 3 and entries.shape[0] != b):
    raise ValueError(f"entries has shape {entries.shape}; allowed are [R, 128] and [{b}, R, 128]")
  if entries.shape[-2] * layout.LANES % (codes + scales):
    raise ValueError(
        f"entries has {entries.shape[-2]} rows a table; its words must be a multiple of the"
        f" {codes + scales} words of an entry"
    )
  for name, words, array in (
      ("window", h // 4, window),
      ("window_scales", -(-h // 128), window_scales),
  ):
    rows = -(-w * words // layout.LANES)
    if array.shape[1] != rows:
      raise ValueError(
          f"{name} has {array.shape[1]} rows a request; {w} slots of {words} words fill {rows}"
      )
  choice = dispatch.resolve(implementation, AVAILABLE, decode_refusal(n, h, k, w))
  if choice == "reference":
    slots, entries = _one_table(slots, entries, codes + scales)
    q = q if natural else q[..., layout.PLACES]
    out = reference.sparse_attention_decode(q, entries, slots, window, window_scales, seen, sink)
    return out if natural else out[..., layout.CHANNELS]

  def run(q, slots, window, window_scales, seen, entries, sink):
    chip = block_sizes.current_chip()
    needed = kernel.vmem_bytes(q.shape[0], n, k, w, q.dtype)
    if needed > chip.vmem_bytes:
      raise ValueError(
          f"the kernel needs {needed} bytes of VMEM; {chip.name} has {chip.vmem_bytes}"
      )
    blocks = kernel.blocks_for(chip, q.dtype, unrolled=not dispatch.interpreted())
    slots, entries = _one_table(slots, entries, codes + scales)
    return kernel.sparse_attention_decode(
        q, entries, slots, window, window_scales, seen, sink, blocks, natural
    )

  shared = {6} if entries.ndim == 3 else {5, 6}
  args = q, slots, window, window_scales, seen, entries, sink
  return dispatch.over_lines(run, *args, shared=shared)


def _one_table(slots: Array, entries: Array, words: int) -> tuple[Array, Array]:
  """Slots and entries of tables of one request each as of one table after another."""
  if entries.ndim == 2:
    return slots, entries
  b, rows, lanes = entries.shape
  lines = rows * lanes // words * jnp.arange(b, dtype=jnp.int32)
  return jnp.where(slots < 0, -1, slots + lines[:, None]), entries.reshape(-1, lanes)


def sparse_attention(
    q: Float[Array, "B T N H"], entries: Float[Array, "B C H"], slots: Int[Array, "B T K"],
    kv: Float[Array, "B S H"], positions: Int[Array, "B T"], floors: Int[Array, "B T"],
    segments: Int[Array, "B T"], key_positions: Int[Array, "B S"],
    key_segments: Int[Array, "B S"], sink: Float[Array, " N"], *, window: int, mass: bool = False,
    chunk: int = 64, implementation: str | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T K"]]:  # fmt: skip
  """Many rows over decoded entries and their window, with a gradient for q, entries, kv and sink.

  The window is that of `window_attention.op.window_attention`, which computes this part; its output
  and log Σ exp are merged with the selected entries by one more pass over the rows. The gradient is
  deterministic: entries are summed in the order of the rows.

  Args:
    q: rotated queries, float32 or bfloat16.
    entries: decoded entries of q's dtype; those that no row selects may hold anything, NaN too.
    slots: selected entries, −1 for absent ones in any place, in any order.
    kv: window latents; see `window_attention`, as for all that follows.
    positions: of the rows.
    floors: of the rows.
    segments: of the rows.
    key_positions: of the slots of the window.
    key_segments: of the slots of the window.
    sink: f32 logits.
    window: W.
    mass: also return the joint probability of every selected entry, summed over heads, f32, 0 where
      absent; it has no gradient.
    chunk: rows whose gathered keys exist at one time, where XLA computes them.
    implementation: see `dispatch.resolve`. The kernel takes up to 128 heads and entries of up to 4
      KB. Of 64 heads and 512 slots, 119 thousand entries of 1 KB are gathered from VMEM on v5e and
      v6e, 54 thousand on v5p and TPU7x; more are laid out anew in HBM and gathered from there by
      DMA. The gradient's kernel makes up to four passes over the rows, 39 (17) thousand entries
      each; the gradient of more is XLA's. Rows beyond multiples of 4 (8 on v5p) and entries beyond
      multiples of 16 cost a copy.

  Raises:
    ValueError: dtypes, chunk, window or sizes are not those above, or the VMEM does not suffice.
  """
  _check_floats(q, q.shape[-1], 1, sink)
  if entries.dtype != q.dtype:
    raise ValueError(f"entries has dtype {entries.dtype}; that of q is {q.dtype}")
  if slots.dtype != jnp.int32:
    raise ValueError(f"slots has dtype {slots.dtype}; it must be int32")
  if chunk < 1:
    raise ValueError(f"chunk is {chunk}; it must be at least 1")
  refusal = rows_refusal(*q.shape[-2:], q.dtype)
  chosen = dispatch.resolve(implementation, AVAILABLE, refusal)
  near, near_lse = window_attention.window_attention(
      q, kv, positions, floors, segments, key_positions, key_segments, sink, window=window,
      statistics=True, implementation=chosen,
  )  # fmt: skip
  if chosen == "reference":
    out, weights = kernel_vjp.extend(chunk, q, entries, slots, near, near_lse)
    return (out, weights) if mass else out
  run = functools.partial(
      kernel_rows_vjp.attend,
      block_sizes.current_chip(),
      mass=mass,
      unrolled=not dispatch.interpreted(),
      chunk=chunk,
  )
  found = dispatch.over_lines(run, q, entries, slots, near, near_lse)
  return found if mass else found[0]


def rows_refusal(heads: int, channels: int, dtype) -> str | None:
  """Why the kernel of `sparse_attention` does not take rows of this kind, or None."""
  if resident.channels_for(channels, dtype):
    return window_attention.refusal(heads)
  return f"q has {channels} channels: the kernel takes entries of up to {resident.LARGEST} bytes"


def _check_floats(q: Array, h: int, unit: int, sink: Array):
  if q.dtype not in _FLOATS:
    raise ValueError(f"q has dtype {q.dtype}; allowed are float32 and bfloat16")
  if h % unit:
    raise ValueError(f"q has {h} channels; allowed are multiples of {unit}")
  if sink.dtype != jnp.float32:
    raise ValueError(f"sink has dtype {sink.dtype}; it must be float32")


def decode_refusal(heads: int, channels: int, k: int, window: int) -> str | None:
  """Why the kernel of `sparse_attention_decode` does not take these sizes, or None."""
  if channels != kernel.WIDTH:
    return f"q has {channels} channels; the kernel takes {kernel.WIDTH}"
  if heads < 16 or heads % 16:
    return f"q has {heads} heads; the kernel takes multiples of 16"
  if k % 32 or not 32 <= k <= 512:
    return f"slots has {k} entries a row; the kernel takes multiples of 32 up to 512"
  if window not in (64, 128):
    return f"seen has {window} slots; the kernel takes a window of 64 or 128"
  return None
