r"""Ahead-of-time compilation for TPU generations that are not there.

The TPU compiler in `libtpu` compiles for a described chip on any machine. It can be told only one
kind of chip per process and only before JAX is imported, so that every generation gets a process:

  python -m pallas_kernels.aot --generation v6e --module pallas_kernels.quantize.shapes \
    --function build --arguments '{"name": "unpack_main_1m"}' [--dump FOLDER] --json

or, from Python (a test, the benchmark):

  report = aot.compile_in_subprocess("v6e", "pallas_kernels.quantize.shapes:build", {"name": ...})
  assert report.temp_bytes < 0.01 * report.argument_bytes

The module is a dotted name or the path of a file; the function takes the arguments by name and
returns a program: `(fn, args)` or `(fn, args, donate)`, where `fn` is not yet jitted, `args` is a
tuple of pytrees of `jax.ShapeDtypeStruct` and `donate` the positions of donated arguments. It is
called, and `fn` traced, with a mesh of the described chip set (axis "chip"), so that
`dispatch.resolve(None, ...)` takes the kernel. Structs without a sharding are replicated. With
`devices` above 1 the mesh has that many; `jax.shard_map` then finds it as the current mesh.

Every op directory has a `shapes.py` with such a function `build(name, implementation="pallas")` and
the names it takes, `SHAPES`; tests and `scripts/bench_kernels.py` share them. See
`pallas_kernels.shape`.

This module imports JAX only in the process that compiles.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Accelerator type and smallest topology of a whole host.
_TOPOLOGIES = {
    "v5e": ("v5litepod-4", "v5e:2x2"),
    "v5p": ("v5p-8", "v5p:2x2x1"),
    "v6e": ("v6e-4", "v6e:2x2"),
    "tpu7x": ("tpu7x-8", "tpu7x:2x2x1"),
}
GENERATIONS = tuple(_TOPOLOGIES)

# A complete dump is twenty times larger and takes twice as long.
_DUMPED = ".*(final_bundles|packed-bundles-post-ra|per-bundle-utilization).*"


@dataclasses.dataclass(frozen=True)
class Report:
  """What the compiler says of one program on one device of a generation.

  Attributes:
    generation: one of `GENERATIONS`.
    device_kind: what JAX calls the device; a TPU7x device is one of the two cores of a chip.
    argument_bytes: of all arguments, as the TPU lays them out.
    output_bytes: of all results, donated ones included.
    alias_bytes: of the results that take the place of donated arguments.
    temp_bytes: HBM that the program needs besides, a copy in another layout for instance.
    flops: of everything outside Pallas kernels, and of kernels with a `cost_estimate`.
    bytes_accessed: likewise.
    compile_seconds: lowering not included.
    kernels: names of the Pallas kernels in the optimised program, in program order.
    vmem_bytes: largest VMEM of one kernel, spills and pipelined blocks included; 0 without kernels.
    fusions: fused operations of XLA in the optimised program.
    dump: folder with the schedules and the optimised program (`program.hlo`), or None.
  """

  generation: str
  device_kind: str
  argument_bytes: int
  output_bytes: int
  alias_bytes: int
  temp_bytes: int
  flops: float
  bytes_accessed: float
  compile_seconds: float
  kernels: tuple[str, ...]
  vmem_bytes: int
  fusions: int
  dump: str | None = None


class CompilationError(RuntimeError):
  """The compiler, or the tracing of a program, refused it; the message is its own."""


def environment(generation: str, dump: str | os.PathLike | None = None) -> dict[str, str]:
  """Variables that must be set before JAX is imported.

  Args:
    generation: one of `GENERATIONS`.
    dump: folder for the schedules, if they are wanted.

  Raises:
    ValueError: an unknown generation, or a folder whose name libtpu would split.
  """
  if generation not in _TOPOLOGIES:
    raise ValueError(f"generation is {generation!r}; it must be one of {', '.join(GENERATIONS)}")
  found = {
      "JAX_PLATFORMS": "cpu",
      "TPU_SKIP_MDS_QUERY": "1",
      "TPU_WORKER_HOSTNAMES": "localhost",
      "TPU_ACCELERATOR_TYPE": _TOPOLOGIES[generation][0],
      # Without it a second process, another test worker for instance, finds a lock file.
      "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  }
  if dump is not None:
    if re.search(r"\s", str(dump)):
      raise ValueError(f"dump is {str(dump)!r}; libtpu takes no folder with a blank in its name")
    found["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
        f" --xla_jf_dump_llo_pass_label_regex={_DUMPED}"
    )
  return found


def compile_in_subprocess(
    generation: str,
    target: str,
    arguments: Mapping[str, Any] | None = None,
    dump: str | os.PathLike | None = None,
    timeout: int | float = 600,
    devices: int = 1,
) -> Report:
  """Compiles one program for a generation in a process of its own (some 5 s besides the compiler).

  Args:
    generation: one of `GENERATIONS`.
    target: "module:function" or "path/of/file.py:function"; see the top of this module.
    arguments: of the function, JSON-able.
    dump: folder for schedules and the optimised program; made if it is not there.
    timeout: seconds.
    devices: size of the mesh.

  Raises:
    CompilationError: the program does not compile, or not in time.
    ValueError: an unknown generation.
  """
  return compile_each(generation, target, [arguments or {}], dump, timeout, devices)[0]


def compile_each(
    generation: str,
    target: str,
    arguments: Sequence[Mapping[str, Any]],
    dump: str | os.PathLike | None = None,
    timeout: int | float = 600,
    devices: int = 1,
) -> list[Report]:
  """Like `compile_in_subprocess`, one program after another in one process.

  With `dump` the files of program i go to the folder `dump`/i.

  Raises:
    CompilationError: one of them does not compile; nothing is returned of the others.
    ValueError: an unknown generation.
  """
  module, _, function = target.rpartition(":")
  command = ["pallas_kernels.aot", f"--generation={generation}", f"--module={module}"]
  command += [f"--function={function}", f"--devices={devices}", "--json"]
  command += [f"--arguments={json.dumps([dict(each) for each in arguments])}"]
  command += [] if dump is None else [f"--dump={dump}"]
  lines = in_subprocess(generation, command, f"{target} for {generation}", timeout)
  found = [json.loads(line) for line in lines[-len(arguments) :]]
  return [Report(**{**each, "kernels": tuple(each["kernels"])}) for each in found]


def in_subprocess(
    generation: str, command: Sequence[str], what: str, timeout: int | float
) -> list[str]:
  """The lines that a module prints in a process with the compiler's variables.

  Args:
    generation: one of `GENERATIONS`.
    command: the module's dotted name and its arguments.
    what: of errors.
    timeout: seconds.

  Raises:
    CompilationError: it fails, or not in time.
    ValueError: an unknown generation.
  """
  variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
  variables |= environment(generation)
  try:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=variables, check=False, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
  except subprocess.TimeoutExpired as error:
    raise CompilationError(f"{what}: not compiled in {timeout:g} s") from error
  if done.returncode:
    raise CompilationError(f"{what}:\n{_last_error(done.stderr)}")
  return done.stdout.splitlines()


def _last_error(text: str) -> str:
  """The exception at the end of a process's log, without the traces before it."""
  starts = re.finditer(r"(?m)^[\w.]+(?:Error|Exit|Exception)\b", text)
  start = max((match.start() for match in starts), default=max(0, len(text) - 4000))
  return text[start : start + 4000].strip()


def _program(module: str, function: str) -> Callable[..., tuple]:
  if module.endswith(".py"):
    spec = importlib.util.spec_from_file_location(pathlib.Path(module).stem, module)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
  else:
    loaded = importlib.import_module(module)
  return getattr(loaded, function)


def _compile(generation: str, build: Callable[..., tuple], arguments: dict, devices: int):
  """Compiles in this process, which has the variables of `environment`: report and HLO text."""
  import jax
  from jax.experimental import topologies
  from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

  described = topologies.get_topology_desc(
      platform="tpu", topology_name=_TOPOLOGIES[generation][1]
  ).devices
  mesh = Mesh(described[:devices], ("chip",), axis_types=(AxisType.Auto,))
  replicated = NamedSharding(mesh, PartitionSpec())

  def placed(struct):
    sharding = struct.sharding or replicated
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)

  with jax.set_mesh(mesh):
    fn, args, *donate = build(**arguments)
    args = jax.tree.map(placed, args)
    lowered = jax.jit(fn, donate_argnums=donate[0] if donate else ()).lower(*args)
    start = time.perf_counter()
    compiled = lowered.compile()
  seconds = time.perf_counter() - start
  memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
  calls = re.findall(r"%(\S+) = [^\n]*custom_call_target=\"tpu_custom_call\"[^\n]*", text)
  report = Report(
      generation=generation,
      device_kind=described[0].device_kind,
      argument_bytes=memory.argument_size_in_bytes,
      output_bytes=memory.output_size_in_bytes,
      alias_bytes=memory.alias_size_in_bytes,
      temp_bytes=memory.temp_size_in_bytes,
      flops=cost.get("flops", 0.0),
      bytes_accessed=cost.get("bytes accessed", 0.0),
      compile_seconds=seconds,
      kernels=tuple(calls),
      vmem_bytes=max(map(_vmem_bytes, text.splitlines()), default=0),
      fusions=len(re.findall(r"(?m)^\s*(?:ROOT )?%\S+ = \S.* fusion\(", text)),
  )
  return report, text


def _vmem_bytes(line: str) -> int:
  if 'custom_call_target="tpu_custom_call"' not in line:
    return 0
  used = re.search(r'"used_scoped_memory_configs":\[(.*?)\]', line)
  spaces = re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', used[1] if used else "")
  return sum(map(int, spaces))


def main() -> None:
  """The command line above; `--arguments` may be a list, which prints one report a line."""
  parser = argparse.ArgumentParser(prog="python -m pallas_kernels.aot")
  parser.add_argument("--generation", choices=GENERATIONS, required=True)
  parser.add_argument("--module", required=True, help="Dotted name, or the path of a file.")
  parser.add_argument("--function", required=True)
  parser.add_argument("--arguments", default="{}", help="JSON: an object, or a list of objects.")
  parser.add_argument("--dump", type=pathlib.Path, help="Folder for the schedules.")
  parser.add_argument("--devices", type=int, default=1)
  parser.add_argument("--json", action="store_true")
  flags = parser.parse_args()
  if importlib.util.find_spec("libtpu") is None:
    raise SystemExit("The TPU compiler is not installed: pip install 'jax[tpu]' brings it.")
  arguments = json.loads(flags.arguments)
  several = isinstance(arguments, list)
  if flags.dump:
    flags.dump.mkdir(parents=True, exist_ok=True)
  os.environ.update(environment(flags.generation, flags.dump))
  build = _program(flags.module, flags.function)
  for i, each in enumerate(arguments if several else [arguments]):
    report, text = _compile(flags.generation, build, each, flags.devices)
    if flags.dump:
      folder = flags.dump / str(i) if several and len(arguments) > 1 else flags.dump
      folder.mkdir(exist_ok=True)
      for file in (file for file in flags.dump.iterdir() if file.is_file()):
        file.rename(folder / file.name)
      (folder / "program.hlo").write_text(text)
      report = dataclasses.replace(report, dump=str(folder))
    found = dataclasses.asdict(report)
    lines = (f"{name}: {value}" for name, value in found.items())
    sys.stdout.write((json.dumps(found) if flags.json else "\n".join(lines)) + "\n")


if __name__ == "__main__":
  main()
