"""What the model rounds to storage formats while it computes (report 2.4.4)."""

import dataclasses
import functools
import math

import jax
from jaxtyping import Array, Float

from pallas_kernels import dispatch
from pallas_kernels.quantize import formats, op
from pallas_kernels.quantize.stored import LAYOUTS


@dataclasses.dataclass(frozen=True)
class QuantPlan:
  """The storage format of each cached component; `None` leaves it in the activation dtype.

  Rounding happens in the forward pass, after RoPE, on all channels alike, so that training,
  prefill and decode see what the cache gives back. The report trains the main KV in FP4 during
  post-training; which formats pre-training used is not stated.

  Released plan:
    * main KV, the compressed entries: E2M1 with an E4M3 scale per 16. No second, global scale:
      448 * 6 = 2688 is far above the norm of an entry (about sqrt(512) = 22.6 after RMSNorm).
    * index queries and keys: MXFP4, both sides, since scores only rank entries.
    * window KV: FP8, E4M3 with a power-of-two scale per 32, not FP4. Its size is bounded by the
      window, so four bits would save nothing that grows with the context.
  Left alone: main queries, index head weights, compressor state, attention output, norms, router,
  residual streams. The released kernels also round activations entering FP8 and FP4 linears; here
  weights are decoded when they are loaded and multiplied as they are.

  Attributes:
    main_kv: compressed main-KV entries.
    index: indexer queries and keys.
    window_kv: sliding-window entries.

  Raises:
    ValueError: a format is not `None` or a name in `formats.FORMATS`.
  """

  main_kv: str | None
  index: str | None
  window_kv: str | None

  def __post_init__(self):
    for field in dataclasses.fields(self):
      name = getattr(self, field.name)
      if name is not None:
        _format(name, field.name)

  @classmethod
  def released(cls) -> "QuantPlan":
    return cls(
        main_kv=formats.FP4_MAIN.name,
        index=formats.MXFP4.name,
        window_kv=formats.FP8_WINDOW.name,
    )

  @classmethod
  def none(cls) -> "QuantPlan":
    return cls(main_kv=None, index=None, window_kv=None)


def fake_quant(
    x: Float[Array, "*batch H"], format_name: str | None, *, component: str = "x"
) -> Float[Array, "*batch H"]:
  """`x` as its cache would give it back, with the gradient of the identity (straight through).

  The forward value equals quantise, pack, unpack, dequantise bit for bit. The tangent passes
  everywhere, also where a value saturates and in blocks of zeros.

  Args:
    x: float32 or bfloat16.
    format_name: a name in `formats.FORMATS`; `None` returns `x`.
    component: what `x` is, for the error message.

  Raises:
    ValueError: the format is unknown, or its block does not divide the last axis.
  """
  if format_name is None:
    return x
  fmt = _format(format_name, component)
  if x.shape[-1] % fmt.block:
    raise ValueError(
        f"{component} has {x.shape[-1]} channels: {fmt.name} needs a multiple of its block of"
        f" {fmt.block}"
    )
  return _straight_through(x, fmt)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _straight_through(x: Array, fmt: formats.Format) -> Array:
  key = fmt, x.shape[-1]
  stored = next((s for s in LAYOUTS.values() if key == (s.format, s.width)), None)
  if dispatch.platform() != "tpu" or stored is None or math.prod(x.shape[1:-1]) % stored.unit:
    return op.fake_quantize(x, fmt)

  # Two kernels; XLA makes a dozen of a maximum over blocks inside a row and what follows.
  def packed(x):
    rows = op.unpack(op.pack(x.reshape(-1, stored.width), stored), stored)
    return rows.reshape(x.shape).astype(x.dtype)

  return dispatch.over_lines(packed, x)


@_straight_through.defjvp
def _pass_tangent(fmt, primals, tangents):
  return _straight_through(primals[0], fmt), tangents[0]


def _format(name: str, component: str) -> formats.Format:
  if name not in formats.FORMATS:
    allowed = ", ".join(repr(known) for known in formats.FORMATS)
    raise ValueError(f"{component}={name!r} is no storage format: allowed are None, {allowed}")
  return formats.FORMATS[name]
