"""Which implementation of an op runs, and where in a mesh."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

# JAX has no public question for this, only the context manager and the setter that change it.
from jax._src.config import pallas_tpu_interpret_mode_context_manager as _interpretation
from jax.sharding import AxisType, PartitionSpec


def platform() -> str:
  """Where the function that is being traced will run: "tpu", "cpu" and so on.

  The platform of the current mesh (`jax.set_mesh`, `jax.shard_map`), which for ahead-of-time
  compilation is the one of the described chips; without a mesh, the default backend.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def interpreted() -> bool:
  """Whether Pallas kernels are interpreted: `pltpu.force_tpu_interpret_mode` or its setter."""
  return bool(_interpretation.value)


def resolve(
    implementation: str | None, available: Sequence[str], refusal: str | None = None
) -> str:
  """Returns the implementation to run: "pallas", "reference", or what the op names in `available`.

  `None` is the Pallas kernel where the trace is for a TPU and the op has one that takes the sizes,
  the reference everywhere else, in the interpreter as well: that is slow and has to be asked for by
  name.

  Call it while the op is traced, outside of a kernel.

  Args:
    implementation: what the caller asked for.
    available: what the op has.
    refusal: why its kernel does not take these sizes, a sentence that names the limit, or None.

  Raises:
    ValueError: `implementation` is a name that the op does not offer, or "pallas" while neither is
      the trace for a TPU nor interpretation on, or "pallas" and `refusal`.
  """
  if implementation is None:
    takes = "pallas" in available and platform() == "tpu" and refusal is None
    return "pallas" if takes else "reference"
  if implementation not in available:
    allowed = ", ".join(repr(name) for name in available)
    raise ValueError(f"implementation={implementation!r}: allowed are None, {allowed}")
  if implementation == "pallas" and platform() != "tpu" and not interpreted():
    raise ValueError(
        f"implementation='pallas' on {platform()}: the kernel runs on a TPU, in the interpreter"
        " (pltpu.force_tpu_interpret_mode), or is compiled for a TPU with its mesh set"
        " (pallas_kernels.aot); None takes the reference here"
    )
  if implementation == "pallas" and refusal is not None:
    raise ValueError(refusal)
  return implementation


# Mesh axes over which lines of a batch are spread.
LINE_AXES = ("data", "fsdp")


def over_lines(fn: Callable[..., Any], *args: Any, shared: Collection[int] = ()) -> Any:
  """`fn(*args)`, every device with its own lines where a mesh is set: kernels need a `shard_map`.

  The compiler partitions no Pallas kernel; left alone it would gather all operands on all devices.

  Args:
    fn: of arrays alone; lines do not depend on one another. Its results lead with the lines.
    *args: pytrees of arrays that lead with the lines, B of them.
    shared: numbers of those arguments that have no lines: weights, sinks.

  Returns:
    As `fn`. Lines are spread over the axes of `LINE_AXES` whose devices divide them; over all other
    axes every device does the same.
  """
  mesh = jax.sharding.get_abstract_mesh()
  free = [n for n, t in zip(mesh.axis_names, mesh.axis_types) if t != AxisType.Manual]
  if not free:
    return fn(*args)
  first = next(a for i, a in enumerate(args) if i not in shared and a is not None)
  lines = jax.tree.leaves(first)[0].shape[0]
  axes = []
  for name in LINE_AXES:
    if name in free and lines % math.prod(mesh.shape[n] for n in (*axes, name)) == 0:
      axes.append(name)
  spread = PartitionSpec(tuple(axes)) if axes else PartitionSpec()
  specs = tuple(PartitionSpec() if i in shared else spread for i in range(len(args)))
  # A kernel's results do not say over which axes they vary, so that this cannot be checked; a test
  # compares gradients of shared arguments on meshes of 4 and 8 with those of one device.
  return jax.shard_map(
      fn, in_specs=specs, out_specs=spread, axis_names=frozenset(free), check_vma=False
  )(*args)
