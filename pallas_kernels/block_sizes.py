"""Block sizes of kernels: derived from a VMEM budget, refused where they cannot fit."""

import dataclasses

import jax

from pallas_kernels.chips import CHIPS, Chip, of_kind

# What the compiler needs besides: spills, its own scratch, semaphores.
_SPARE_BYTES = 4 << 20


def current_chip() -> Chip:
  """The generation that the current trace is for; v5e, the smallest, where it is for no TPU.

  Raises:
    ValueError: a TPU that the kernels have not been compiled for.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  if device is not None and device.platform == "tpu":
    return of_kind(device.device_kind)
  if device is None and jax.default_backend() == "tpu":
    return of_kind(jax.devices()[0].device_kind)
  return CHIPS["v5e"]


@dataclasses.dataclass(frozen=True)
class BlockSizes:
  """Rows of a grid step; negligible effect on numerics.

  Attributes:
    rows: rows of one block.
    vmem_bytes: what two buffers of every block and the scratch take: the limit for the compiler.
  """

  rows: int
  vmem_bytes: int

  @classmethod
  def largest(
      cls,
      kernel: str,
      rows: int,
      unit: int,
      bytes_per_row: int | float,
      fixed_bytes: int = 0,
      budget: int | None = None,
      at_most: int | None = None,
  ) -> "BlockSizes":
    """The largest block of whole units that divides the rows and fits.

    Args:
      kernel: named in errors.
      rows: of the whole array, a multiple of `unit`.
      unit: rows that a kernel takes at once.
      bytes_per_row: of all blocked operands and results; two buffers of each are counted.
      fixed_bytes: scratch, and operands that are not blocked.
      budget: bytes of VMEM; half of a core's by default.
      at_most: rows beyond which a larger block has nothing to give.

    Raises:
      ValueError: rows are no multiple of the unit, or one unit does not fit.
    """
    budget = current_chip().vmem_bytes // 2 if budget is None else budget
    if rows < 1 or rows % unit:
      raise ValueError(f"{kernel}: {rows} rows; allowed are positive multiples of {unit}")

    def needed(units: int) -> int:
      return int(2 * units * unit * bytes_per_row) + fixed_bytes + _SPARE_BYTES

    if needed(1) > budget:
      raise ValueError(
          f"{kernel}: {unit} rows of {bytes_per_row:g} bytes, twice, with {fixed_bytes} bytes of"
          f" scratch and {_SPARE_BYTES} spare need {needed(1)} bytes of VMEM; the budget is"
          f" {budget}"
      )
    units = rows // unit
    most = min(units, (at_most or rows) // unit or 1)
    fitting = (n for n in range(most, 0, -1) if units % n == 0 and needed(n) <= budget)
    chosen = next(fitting)
    return cls(chosen * unit, needed(chosen))
