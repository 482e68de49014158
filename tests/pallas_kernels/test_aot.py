"""Ahead-of-time compilation in a subprocess, and what is modelled of the program."""

import pathlib

import pytest

from pallas_kernels import aot, dispatch
from pallas_kernels.cycles import Program

LOOPS = str(pathlib.Path(__file__).parent / "loops.py")


def test_a_kernel_and_its_schedule(tmp_path):
  report = aot.compile_in_subprocess(
      "v6e", f"{LOOPS}:make", {"kind": "fori", "sizes": [512]}, dump=tmp_path
  )
  assert report.argument_bytes == 64 * 128 * 4
  assert (report.output_bytes, report.alias_bytes, report.temp_bytes) == (8 * 128 * 4, 0, 0)
  assert len(report.kernels) == 1
  assert report.vmem_bytes >= 64 * 128 * 4
  program = Program(report.dump, "v6e")
  assert program.calls == {report.kernels[0]: 1}
  found = program.total()
  # The compiler may change the body; 512 turns of four words are the least.
  assert 512 * 4 < found.issue <= found.latency < 512 * 40
  assert found.hbm_bytes == report.argument_bytes + report.output_bytes
  assert found.unknown == ()
  assert not found.binds("v6e").startswith("HBM")


@pytest.mark.slow
@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_every_generation_compiles(generation, tmp_path):
  arguments = [
      {"kind": "grid", "sizes": [8, "parallel"]},
      {"kind": "scanned", "sizes": [5]},
      {"kind": "twice", "sizes": []},
  ]
  grid, scanned, twice = aot.compile_each(generation, f"{LOOPS}:make", arguments, tmp_path)
  assert grid.argument_bytes == grid.output_bytes == 8 * 64 * 512 * 4
  moved = Program(grid.dump, generation).total()
  # On TPU7x the argument is in VMEM before the kernel starts: XLA's copy is counted instead.
  assert moved.hbm_bytes == 2 * 8 * 64 * 512 * 4
  calls = Program(scanned.dump, generation).calls
  assert {n for name, n in calls.items() if name.startswith("fori10")} == {5}
  assert twice.kernels == ()
  assert twice.alias_bytes == twice.argument_bytes == 256 * 128 * 4


def test_what_the_compiler_process_says_reaches_the_caller():
  with pytest.raises(aot.CompilationError, match=r"ValueError: rows is 3; it must be 4$"):
    aot.compile_in_subprocess("v6e", f"{LOOPS}:make", {"kind": "wrong", "sizes": []})


def test_bad_input_is_refused_before_a_process_starts(tmp_path):
  with pytest.raises(
      ValueError, match="generation is 'v4'; it must be one of v5e, v5p, v6e, tpu7x"
  ):
    aot.compile_in_subprocess("v4", f"{LOOPS}:make")
  with pytest.raises(ValueError, match="no folder with a blank"):
    aot.environment("v6e", tmp_path / "a b")


def test_a_kernel_off_a_tpu_is_refused_with_the_reason():
  both = ("pallas", "reference")
  with pytest.raises(ValueError, match="implementation='pallas' on cpu: the kernel runs on a TPU"):
    dispatch.resolve("pallas", both)
  assert dispatch.resolve(None, both) == "reference"


def test_the_interpreter_runs_a_kernel_that_is_asked_for_by_name():
  from jax.experimental.pallas import tpu as pltpu

  with pltpu.force_tpu_interpret_mode():
    assert dispatch.resolve("pallas", ("pallas", "reference")) == "pallas"
    assert dispatch.resolve(None, ("pallas", "reference")) == "reference"
  assert not dispatch.interpreted()
