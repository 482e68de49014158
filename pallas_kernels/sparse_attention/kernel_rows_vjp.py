"""Attention of many rows and its gradient by kernels; see `kernel_vjp.extend`."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.chips import Chip
from pallas_kernels.sparse_attention import kernel_rows, kernel_rows_gradient, kernel_vjp
from pallas_kernels.sparse_attention import resident as store
from pallas_kernels.window_attention.kernel import HIDDEN

# Passes over all rows whose entries and sums fit together; beyond them XLA's program is no slower.
_PASSES = (1, 2, 4)


class Plan(NamedTuple):
  """How one call runs.

  Attributes:
    forward: sizes of the kernel.
    gradient: of its gradient; None if the entries are too many.
    chunk: rows at a time of the gradient without a kernel.
  """

  forward: kernel_rows.Sizes
  gradient: kernel_rows_gradient.Sizes | None
  chunk: int


def plan_for(
    chip: Chip, shape, c: int, k: int, dtype, *, scale: float, mass: bool, unrolled: bool,
    chunk: int, budget: int | None = None,
) -> Plan:  # fmt: skip
  """Of padded sizes.

  Args:
    chip: generation.
    shape: of q.
    c: entries.
    k: slots of a row.
    dtype: of q.
    scale: of the logits.
    mass: see `op.sparse_attention`.
    unrolled: see `resident.in_groups`.
    chunk: see `Plan`.
    budget: bytes of VMEM; what a core has by default.

  Raises:
    ValueError: not even two pairs of rows fit.
  """
  n, h = shape[-2:]
  budget = chip.vmem_bytes if budget is None else budget
  near, far = (kernel_rows.vmem_bytes(c, n, h, k, dtype, remote) for remote in (False, True))
  if far > budget:
    raise ValueError(
        f"{kernel_rows.STEP} rows of {n} heads, {h} channels and {k} slots need {far} bytes of"
        f" VMEM; the budget is {budget}"
    )
  remote = near > budget
  forward = kernel_rows.Sizes(
      scale, chip.cores, remote, mass, True, unrolled, far if remote else near
  )  # fmt: skip
  for passes in _PASSES:
    segment = c // passes
    if c % (16 * passes):
      break
    needed = kernel_rows_gradient.vmem_bytes(segment, n, h, k, dtype)
    if needed <= budget:
      sizes = kernel_rows_gradient.Sizes(scale, chip.cores, segment, unrolled, needed)
      return Plan(forward, sizes, chunk)
  return Plan(forward, None, chunk)


def _pad(a, *missing, value=0):
  """Pads the last axes."""
  if not any(missing):
    return a
  widths = ((0, 0),) * (a.ndim - len(missing)) + tuple((0, n) for n in missing)
  return jnp.pad(a, widths, constant_values=value)


def attend(chip, q, entries, slots, near, near_lse, *, mass, unrolled, chunk, budget=None):
  """`extend` of any sizes; others than the released ones are padded, at the price of a copy.

  Raises:
    ValueError: not even two pairs of rows fit into the VMEM budget.
  """
  _, t, n, h = q.shape
  c, k = entries.shape[1], slots.shape[-1]
  channels = store.channels_for(h, q.dtype)
  sublanes = store.SUBLANES * store.per_word(q.dtype)
  unit = store.LANES if k > store.LANES else kernel_rows_gradient.GROUP
  rows, heads = -t % (kernel_rows.STEP * chip.cores), -n % sublanes
  channels, choices = channels - h, -k % unit
  q, near = (_pad(a, rows, heads, channels) for a in (q, near))
  entries = _pad(entries, -c % 16 if c else 16, channels)
  slots = _pad(slots, rows, choices, value=-1)
  # Heads that are not there must not give the entries mass.
  near_lse = _pad(near_lse, rows, heads, value=-HIDDEN)
  plan = plan_for(
      chip, q.shape, entries.shape[1], k + choices, q.dtype, scale=h**-0.5, mass=mass,
      unrolled=unrolled, chunk=chunk, budget=budget,
  )  # fmt: skip
  out, *mass = extend(plan, q, entries, slots, near, near_lse)
  cut = lambda a, *sizes: a[tuple(slice(None, size) for size in (None, t, *sizes))]
  return cut(out, n, h), *(cut(a, k) for a in mass)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def extend(plan: Plan, q, entries, slots, near, near_lse):
  """`kernel_vjp.extend` of padded arrays; the mass only if planned."""
  out, _, *mass = kernel_rows.attend(plan.forward, q, entries, slots, near, near_lse)
  return (out, *mass)


def _forward(plan, q, entries, slots, near, near_lse):
  # The gradient needs the other part's output again.
  sizes = plan.forward._replace(in_place=False)
  out, lse, *mass = kernel_rows.attend(sizes, q, entries, slots, near, near_lse)
  return (out, *mass), (q, entries, slots, near, near_lse, out, lse)


def _backward(plan, saved, cotangents):
  q, entries, slots, near, near_lse, out, lse = saved
  dout = cotangents[0]
  dnear, dnear_lse, delta = kernel_vjp.part_gradients(near, near_lse, out, lse, dout)
  arrays = q, entries, slots, lse, dout, delta
  if plan.gradient is None:
    dq, dentries = kernel_vjp.gradients(plan.chunk, plan.forward.scale, *arrays)
  else:
    dq, dentries = kernel_rows_gradient.gradients(plan.gradient, *arrays)
  return dq.astype(q.dtype), dentries.astype(entries.dtype), None, dnear, dnear_lse


extend.defvjp(_forward, _backward)
