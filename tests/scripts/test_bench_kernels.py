"""The kernel benchmark: its registry, its keys, its figures of one kernel and its refusals."""

import json
import pathlib
import subprocess
import sys

import pytest

from pallas_kernels.anchors import ANCHORS
from pallas_kernels.aot import GENERATIONS
from pallas_kernels.chips import CHIPS
from scripts import bench_kernels

ROOT = pathlib.Path(__file__).parents[2]
KEYS = {
    "kernel", "shape", "generation", "cycles_issue", "cycles_latency", "per", "hbm_bytes",
    "dma_descriptors", "vmem_bytes", "temp_bytes", "roofline_cycles", "binds", "reference_cycles",
    "peer_cycles", "unknown",
}  # fmt: skip


def run(*arguments):
  return subprocess.run(
      [sys.executable, str(ROOT / "scripts" / "bench_kernels.py"), *arguments],
      cwd=ROOT, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}, check=False,
      capture_output=True, text=True,
  )  # fmt: skip


@pytest.mark.slow
def test_json_of_one_kernel():
  done = run("--generation=v6e,v5e", "--kernel=unpack_main", "--noreference", "--json")
  assert done.returncode == 0, done.stderr
  rows = json.loads(done.stdout.splitlines()[-1])
  assert [row["generation"] for row in rows] == ["v6e", "v5e"]
  for row in rows:
    assert row.keys() == KEYS
    assert (row["kernel"], row["per"]) == ("unpack_main", "entry")
    assert row["hbm_bytes"] == 288 + 1024
    chip = CHIPS[row["generation"]]
    assert row["roofline_cycles"] == pytest.approx(1312 / chip.bytes_per_cycle, rel=1e-3)
    assert 0 < row["cycles_issue"] <= row["cycles_latency"]
    # Cycles do not wait for DMAs: the kernel may issue faster than HBM delivers.
    assert (row["binds"] == "HBM") == (row["cycles_latency"] < row["roofline_cycles"])
    assert row["temp_bytes"] == 0
    assert row["unknown"] == []


@pytest.mark.slow
def test_xla_program_of_the_definition_is_measured_beside_it():
  done = run("--generation=v6e", "--kernel=unpack_window_128", "--json")
  assert done.returncode == 0, done.stderr
  (row,) = json.loads(done.stdout.splitlines()[-1])
  assert row["reference_cycles"] > row["roofline_cycles"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--generation=v4"], "generation is 'v4'; it must be one of v5e, v5p, v6e, tpu7x"),
        (["--kernel=unpack_mane"], "--kernel has 'unpack_mane'; it must be one of "),
        (["--timeout=soon"], "--timeout"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_sentence(flags, message):
  done = run(*flags, "--json")
  assert done.returncode == 2
  assert done.stdout == ""
  assert done.stderr.count("\n") == 1
  assert message in done.stderr


def test_shapes_have_what_a_row_needs():
  shapes = bench_kernels.registry()
  assert {"unpack_main", "pack_main"} <= {shape.kernel for _, shape in shapes.values()}
  for name, (_, shape) in shapes.items():
    assert shape.units >= 1, name
    assert shape.hbm_bytes > 0, name
    assert shape.peer is None or shape.peer in ANCHORS, name


def test_a_kernel_means_all_its_shapes_and_a_shape_itself():
  known = bench_kernels.registry()
  assert bench_kernels.chosen(known, []) == known
  assert set(bench_kernels.chosen(known, ["pack_main"])) == {"pack_main_2k", "pack_main_1m"}
  assert set(bench_kernels.chosen(known, ["pack_main_2k"])) == {"pack_main_2k"}


def test_anchors_are_of_known_generations():
  for anchor in ANCHORS.values():
    assert set(anchor.cycles) <= set(GENERATIONS)
    assert anchor.source
