"""The TPU generations that kernels are compiled for: sizes, peaks, clock."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device as JAX sees it.

  That is a chip on v5e and v6e, a chip whose two TensorCores share a grid on v5p, and one of the
  two cores of a chip on TPU7x, with its half of the chip's memory and peaks.

  Attributes:
    name: the generation.
    cores: TensorCores of the device.
    vmem_bytes: VMEM of one core.
    hbm_bytes: of the device.
    hbm_bandwidth: bytes per second of the device.
    bf16_flops: peak per second of the device's matrix units.
    clock: Hz. Rated bf16 peak over flops per cycle at one packed matrix push in 16 (v5e, v5p) or 8
      cycles and unit.
    bf16_vectors: the vector unit computes in bf16.
    float4_casts: kernels may cast from and to float4_e2m1fn.
    network_bandwidth: bytes per second that the device sends to others of its slice, and receives.
  """

  name: str
  cores: int
  vmem_bytes: int
  hbm_bytes: int
  hbm_bandwidth: float
  bf16_flops: float
  clock: float
  bf16_vectors: bool
  float4_casts: bool
  network_bandwidth: float

  @property
  def bytes_per_cycle(self) -> float:
    """HBM bytes per cycle of the device."""
    return self.hbm_bandwidth / self.clock

  @property
  def flops_per_cycle(self) -> float:
    """Peak bf16 flops per cycle of the device."""
    return self.bf16_flops / self.clock

  def roofline_cycles(self, hbm_bytes: int | float, flops: int | float = 0) -> float:
    """Cycles below which no kernel moves these bytes and computes these bf16 flops."""
    return max(hbm_bytes / self.bytes_per_cycle, flops / self.flops_per_cycle)


_MIB = 1 << 20

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 1, 128 * _MIB, 16 * 10**9, 819e9, 197e12, 1.503e9, False, False, 200e9),
        Chip("v5p", 2, 64 * _MIB, 95 * 10**9, 2765e9, 459e12, 1.751e9, False, False, 600e9),
        Chip("v6e", 1, 128 * _MIB, 32 * 10**9, 1640e9, 918e12, 1.751e9, True, False, 400e9),
        Chip("tpu7x", 1, 64 * _MIB, 96 * 10**9, 3685e9, 1153.5e12, 2.2e9, True, True, 300e9),
    )
}

# What JAX calls the devices.
_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}


def of_kind(device_kind: str) -> Chip:
  """The generation of a device kind as JAX names it.

  Raises:
    ValueError: no generation that the kernels have been compiled for.
  """
  if device_kind not in _KINDS:
    known = ", ".join(map(repr, _KINDS))
    raise ValueError(f"device kind is {device_kind!r}; kernels are made for {known}")
  return CHIPS[_KINDS[device_kind]]
