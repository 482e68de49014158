"""Joint attention over a window and selected entries (report 2.3, spec 3.6).

One softmax over the keys of both and a sink, which only enters the denominator. Keys are values
and logits are scaled by H^-0.5, the sink is not. An entry that is selected twice, or a latent that
is in the window and selected, counts twice. A row that sees nothing gives exactly 0.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import block_sizes, dispatch
from pallas_kernels.sparse_attention import kernel, kernel_vjp, layout, reference

_FLOATS = (jnp.float32, jnp.bfloat16)


def sparse_attention_decode(
    q: Float[Array, "B N H"], entries: Int[Array, "... R 128"], slots: Int[Array, "B K"],
    window: Int[Array, "B R1 128"], window_scales: Int[Array, "B R2 128"],
    seen: Int[Array, "B W"], sink: Float[Array, " N"], *, implementation: str | None = None,
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
  if entries.ndim == 3:
    lines = entries.shape[1] * layout.LANES // (codes + scales) * jnp.arange(b, dtype=jnp.int32)
    slots = jnp.where(slots < 0, -1, slots + lines[:, None])
    entries = entries.reshape(-1, layout.LANES)
  if dispatch.resolve(implementation, ("pallas", "reference")) == "reference":
    return reference.sparse_attention_decode(q, entries, slots, window, window_scales, seen, sink)
  _check_kernel(n, h, k, w)
  chip = block_sizes.current_chip()
  needed = kernel.vmem_bytes(n, k, w, q.dtype)
  if needed > chip.vmem_bytes:
    raise ValueError(f"the kernel needs {needed} bytes of VMEM; {chip.name} has {chip.vmem_bytes}")
  blocks = kernel.blocks_for(chip, q.dtype, unrolled=not dispatch.interpreted())
  return kernel.sparse_attention_decode(
      q, entries, slots, window, window_scales, seen, sink, blocks
  )


def sparse_attention(
    q: Float[Array, "B T N H"], entries: Float[Array, "B C H"], slots: Int[Array, "B T K"],
    window: Float[Array, "B S H"], first: Int[Array, "B T"], last: Int[Array, "B T"],
    sink: Float[Array, " N"], *, chunk: int = 64, implementation: str | None = None,
) -> Float[Array, "B T N H"]:  # fmt: skip
  """Many rows over decoded keys, with a gradient for q, entries, window and sink.

  The gradient is deterministic: entries are summed in the order of the rows, chunk by chunk, by a
  scatter of sorted slots.

  Args:
    q: rotated queries, float32 or bfloat16.
    entries: decoded entries of q's dtype.
    slots: selected entries, −1 for absent ones in any place.
    window: latents of q's dtype, in the order that `first` and `last` count.
    first: row t sees latents first[t] to last[t]; none if last < first.
    last: see `first`.
    sink: f32 logits.
    chunk: rows whose gathered keys exist at one time.
    implementation: see `dispatch.resolve`; there is only what XLA makes of the chunks.

  Raises:
    ValueError: dtypes or chunk are not those above.
  """
  dispatch.resolve(implementation, ("reference",))
  _check_floats(q, q.shape[-1], 1, sink)
  for name, array in (("entries", entries), ("window", window)):
    if array.dtype != q.dtype:
      raise ValueError(f"{name} has dtype {array.dtype}; that of q is {q.dtype}")
  if chunk < 1:
    raise ValueError(f"chunk is {chunk}; it must be at least 1")
  return kernel_vjp.sparse_attention(chunk, q, entries, slots, window, first, last, sink)


def _check_floats(q: Array, h: int, unit: int, sink: Array):
  if q.dtype not in _FLOATS:
    raise ValueError(f"q has dtype {q.dtype}; allowed are float32 and bfloat16")
  if h % unit:
    raise ValueError(f"q has {h} channels; allowed are multiples of {unit}")
  if sink.dtype != jnp.float32:
    raise ValueError(f"sink has dtype {sink.dtype}; it must be float32")


def _check_kernel(n: int, h: int, k: int, w: int):
  if h != kernel.WIDTH:
    raise ValueError(f"q has {h} channels; the kernel takes {kernel.WIDTH}")
  if n < 16 or n % 16:
    raise ValueError(f"q has {n} heads; the kernel takes multiples of 16")
  if k % 32 or not 32 <= k <= 512:
    raise ValueError(f"slots has {k} entries a row; the kernel takes multiples of 32 up to 512")
  if w not in (64, 128):
    raise ValueError(f"seen has {w} slots; the kernel takes a window of 64 or 128")
