"""TPU slices that a program can be compiled for, and the mesh a model gets on one."""

import dataclasses
import math

from deepseek_jax.config import Config, MeshConfig
from deepseek_jax.fields import require

# Shapes in chips, ascending: what Google Cloud lists for a slice of each generation.
SLICES = {
    "v5e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": (
        "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16",
        "8x16x16", "16x16x16",
    ),
    "v6e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "tpu7x": (
        "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16",
        "8x16x16", "16x16x16",
    ),
}  # fmt: skip

# Rows of a line that a device should hold at most: their activations fill its memory first.
_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Topology:
  """A slice. `devices` is what JAX counts: on TPU7x a chip has two."""

  generation: str
  shape: str

  @property
  def name(self) -> str:
    return f"{self.generation}:{self.shape}"

  @property
  def chips(self) -> int:
    return math.prod(int(n) for n in self.shape.split("x"))

  @property
  def devices_per_chip(self) -> int:
    return 2 if self.generation == "tpu7x" else 1

  @property
  def devices(self) -> int:
    return self.chips * self.devices_per_chip


def topology(name: str) -> Topology:
  """From its name, such as "v5p:4x4x8".

  Raises:
    ValueError: no such generation or slice.
  """
  generation, _, shape = name.partition(":")
  require(generation in SLICES, "topology", name, f"GENERATION:SHAPE of {', '.join(SLICES)}")
  allowed = ", ".join(f"{generation}:{each}" for each in SLICES[generation])
  require(shape in SLICES[generation], "topology", name, f"one of {allowed}")
  return Topology(generation, shape)


def larger(at: Topology) -> list[Topology]:
  """The listed slices of a generation from this one up."""
  shapes = SLICES[at.generation]
  return [Topology(at.generation, shape) for shape in shapes[shapes.index(at.shape) :]]


def _divisor(number: int, most: int) -> int:
  return max(n for n in range(1, min(number, most) + 1) if number % n == 0 and most % n == 0)


def mesh_for(config: Config, devices: int, mode: str) -> MeshConfig:
  """The mesh of a slice where the configuration names none.

  Training: as many devices along seq as leave each at most 4,096 rows of a line, experts over as
  many more as divide them, fsdp for the rest. Serving: experts over as many devices as divide
  them, the rest repeats the model for other requests.

  Args:
    config: its `mesh` is taken if it is of more than one device.
    devices: of the slice.
    mode: "train", "prefill" or "decode".

  Raises:
    ValueError: a configured mesh of another number of devices.
  """
  if config.mesh.devices > 1:
    told = dataclasses.asdict(config.mesh)
    require(config.mesh.devices == devices, "mesh", told, f"of {devices} devices in all")
    return config.mesh
  experts = config.model.n_routed_experts
  if mode != "train":
    expert = _divisor(experts, devices)
    return MeshConfig(data=devices // expert, expert=expert)
  require(config.train is not None, "train", None, "a section, to compile a training step")
  wanted = max(1, -(-config.train.seq_len // _ROWS))
  seq = _divisor(_divisor(experts, devices), 1 << (wanted - 1).bit_length())
  expert = _divisor(experts // seq, devices // seq)
  return MeshConfig(fsdp=devices // seq // expert, expert=expert, seq=seq)
