"""Modelled cycles, bytes and roofline of every kernel at named real shapes.

  python scripts/bench_kernels.py --generation=v6e [--kernel=NAME,NAME] [--noreference] [--json]

Compiled ahead of time by the TPU compiler, nothing is run: cycles are modelled, never measured, and
a chip needs at least as many. Figures are per query, row, entry or call, as `per` says, and of the
whole program with what XLA puts around a kernel. `cycles_issue` counts VLIW words, `cycles_latency`
also the known latencies of results; `binds` is "HBM" where the counted bytes take longer still.
`reference_cycles` is XLA's program of the definition, its latency or its HBM time, the longer one;
`peer_cycles` somebody else's kernel for the same work (`pallas_kernels/anchors.py`). A device is
both cores of a chip on v5p, one of the two on TPU7x.
"""

import importlib
import pathlib
import sys
import tempfile

from absl import flags

from deepseek_jax import cli
from pallas_kernels import anchors, aot
from pallas_kernels.chips import CHIPS
from pallas_kernels.cycles import Cycles, Program
from pallas_kernels.shape import Shape

_GENERATION = flags.DEFINE_list(
    "generation", None, f"Of {', '.join(aot.GENERATIONS)}; default all."
)
_KERNEL = flags.DEFINE_list("kernel", [], "Names of kernels or of shapes; default all.")
_REFERENCE = flags.DEFINE_bool("reference", True, "Compile XLA's program of the definition too.")
_TIMEOUT = flags.DEFINE_integer("timeout", 600, "Seconds for one compilation.")

_PACKAGE = pathlib.Path(aot.__file__).parent


def registry() -> dict[str, tuple[str, Shape]]:
  """Shapes of every op directory with a `shapes.py`: module and shape by name of the shape."""
  found = {}
  for file in sorted(_PACKAGE.glob("*/shapes.py")):
    module = f"{_PACKAGE.name}.{file.parent.name}.shapes"
    for name, shape in importlib.import_module(module).SHAPES.items():
      found[name] = module, shape
  return found


def chosen(known: dict[str, tuple[str, Shape]], names: list[str]) -> dict[str, tuple[str, Shape]]:
  """The shapes that a list of kernels or shapes means; all if it is empty.

  Raises:
    ValueError: a name that is neither.
  """
  kernels = {shape.kernel for _, shape in known.values()}
  for name in names:
    if name not in kernels and name not in known:
      allowed = ", ".join(sorted(kernels | known.keys()))
      raise ValueError(f"--kernel has {name!r}; it must be one of {allowed}")
  return {
      name: (module, shape)
      for name, (module, shape) in known.items()
      if not names or name in names or shape.kernel in names
  }


def model(module: str, name: str, shape: Shape, generation: str, implementation: str, timeout):
  """Compiles one shape: the compiler's report and the program's cycles.

  Raises:
    CompilationError: it does not compile.
  """
  arguments = {"name": name, "implementation": implementation}
  with tempfile.TemporaryDirectory() as dump:
    report = aot.compile_in_subprocess(generation, f"{module}:build", arguments, dump, timeout)
    program = Program(dump, generation, shape.scalars, shape.trips)
    return report, program.total()


def row(name: str, shape: Shape, generation: str, report: aot.Report, cycles: Cycles) -> dict:
  """One line of the result, without a reference."""
  per = lambda figure: round(figure / shape.units, 4)
  peer = anchors.ANCHORS[shape.peer].cycles.get(generation) if shape.peer else None
  roofline = CHIPS[generation].roofline_cycles(shape.hbm_bytes, shape.flops)
  return {
      "kernel": shape.kernel,
      "shape": name,
      "generation": generation,
      "cycles_issue": per(cycles.issue),
      "cycles_latency": per(cycles.latency),
      "per": shape.per,
      "hbm_bytes": per(cycles.hbm_bytes),
      "dma_descriptors": per(cycles.descriptors),
      "vmem_bytes": report.vmem_bytes,
      "temp_bytes": report.temp_bytes,
      "roofline_cycles": per(roofline),
      "binds": cycles.binds(generation),
      "reference_cycles": None,
      "peer_cycles": peer,
      "unknown": list(cycles.unknown),
  }


def reference(
    module: str, name: str, shape: Shape, generation: str, timeout: float
) -> float | None:
  """Cycles of XLA's program of the definition, None where its schedule does not tell them."""
  try:
    _, cycles = model(module, name, shape, generation, "reference", timeout)
  except (aot.CompilationError, RuntimeError) as error:
    sys.stderr.write(f"{name} on {generation}: no reference: {str(error)[:300]}\n")
    return None
  if cycles.unknown:
    return None
  hbm = cycles.hbm_bytes / CHIPS[generation].bytes_per_cycle
  return round(max(cycles.latency, hbm) / shape.units, 4)


def show(rows: list[dict]) -> None:
  """The rows as a table for every generation."""
  import rich.console
  import rich.table

  console = rich.console.Console(width=150)
  columns = {
      "shape": "shape", "per": "per", "cycles_issue": "issue", "cycles_latency": "latency",
      "roofline_cycles": "roofline", "binds": "binds", "reference_cycles": "XLA",
      "peer_cycles": "peer", "hbm_bytes": "HBM B", "dma_descriptors": "DMAs",
      "vmem_bytes": "VMEM B", "temp_bytes": "temp B",
  }  # fmt: skip
  for generation in dict.fromkeys(each["generation"] for each in rows):
    table = rich.table.Table(*columns.values(), title=f"{generation}: modelled cycles")
    for each in rows:
      if each["generation"] == generation:
        cells = (each[key] for key in columns)
        table.add_row(*(f"{c:,.4g}" if isinstance(c, float) else str(c) for c in cells))
    console.print(table)


def main() -> list[dict] | None:
  """Rows of all chosen shapes on all chosen generations."""
  generations = _GENERATION.value or list(aot.GENERATIONS)
  for generation in generations:
    aot.environment(generation)
  shapes = chosen(registry(), _KERNEL.value)
  rows = []
  for generation in generations:
    for name, (module, shape) in shapes.items():
      sys.stderr.write(f"{name} on {generation}\n")
      try:
        report, cycles = model(module, name, shape, generation, "pallas", _TIMEOUT.value)
      except aot.CompilationError as error:
        raise ValueError(f"shape {name}: {error}") from error
      rows.append(row(name, shape, generation, report, cycles))
      if _REFERENCE.value and shape.reference:
        rows[-1]["reference_cycles"] = reference(module, name, shape, generation, _TIMEOUT.value)
  if flags.FLAGS.json:
    return rows
  show(rows)
  return None


if __name__ == "__main__":
  cli.run(main)
