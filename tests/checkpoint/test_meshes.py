"""P4: a checkpoint is the same bits on any mesh and any number of processes."""

import contextlib
import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from deepseek_jax.checkpoint import training
from tests.checkpoint import saving_process as states

ROOT = pathlib.Path(__file__).parents[2]
PLAIN = ("x", "y")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A checkpoint of a mesh (4, 2)."""
  directory = tmp_path_factory.mktemp("run") / "checkpoints"
  checkpoints = training.Checkpoints(directory)
  state = states.place(states.make_state(0), states.mesh_of(4, 2, names=PLAIN))
  checkpoints.save(3, state, {}, states.CONFIG)
  checkpoints.close()
  return directory, states.bytes_of(state)


MESHES = [((8,), PLAIN), ((2, 2), PLAIN), ((1,), PLAIN)]
MESHES += [(sizes, states.AXES) for sizes in ((1, 2, 4, 1), (2, 2, 1, 2), (1, 1, 1, 8))]


@pytest.mark.parametrize(("sizes", "names"), MESHES, ids=str)
@pytest.mark.parametrize("active", [False, True], ids=["", "active"])
def test_a_checkpoint_comes_back_on_another_mesh(saved, sizes, names, active):
  directory, expected = saved
  mesh = states.mesh_of(*sizes, names=names)
  with jax.set_mesh(mesh) if active else contextlib.nullcontext():
    found = training.Checkpoints(directory).restore(states.template(mesh))
  assert (found.step, found.damaged) == (3, ())
  assert states.bytes_of(found.state) == expected
  for array in jax.tree.leaves(found.state):
    assert array.sharding == states.sharding_of(array.shape, mesh)


def test_without_a_sharding_it_comes_back_on_the_first_device(saved):
  directory, expected = saved
  abstract = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
  found = training.Checkpoints(directory).restore(jax.tree.map(abstract, states.make_state(0)))
  assert states.bytes_of(found.state) == expected
  assert {d for a in jax.tree.leaves(found.state) for d in a.devices()} == {jax.devices()[0]}


def test_the_record_does_not_know_the_mesh(saved, tmp_path):
  bodies = []
  for number, mesh in enumerate([states.mesh_of(1, 2, 2, 2), states.mesh_of(1)]):
    checkpoints = training.Checkpoints(tmp_path / str(number))
    checkpoints.save(3, states.place(states.make_state(0), mesh), {}, states.CONFIG)
    bodies.append(checkpoints._record(3))
    checkpoints.close()
  assert bodies == [training.Checkpoints(saved[0])._record(3)] * 2


def free_port():
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return str(s.getsockname()[1])


def run_processes(count, devices, *arguments):
  """What each of `count` processes of `saving_process.py` reports."""
  program, port = ROOT / "tests" / "checkpoint" / "saving_process.py", free_port()
  env = os.environ | {
      "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices),
  }  # fmt: skip
  processes = [
      subprocess.Popen(
          [sys.executable, str(program), str(number), str(count), port, *arguments],
          env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
      )
      for number in range(count)
  ]  # fmt: skip
  try:
    reports = []
    for process in processes:
      out, err = process.communicate(timeout=180)
      assert process.returncode == 0, err
      reports.append(json.loads(out.splitlines()[-1]))
    return reports
  finally:
    for process in processes:
      process.kill()


def damage(directory):
  """Of steps 1 to 4, leaves step 1 whole; the second of two processes cannot read step 2."""
  for file in (directory / "3" / "state").rglob("d/*"):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
  (directory / "4" / "record" / "metadata").write_bytes(b"\xff\xfe")


@pytest.mark.slow
def test_one_process_saves_for_two_and_two_for_one(tmp_path):
  """Damage that only one process meets is damage for both, and neither waits for the other."""
  one, two = tmp_path / "one" / "checkpoints", tmp_path / "two" / "checkpoints"
  checkpoints = training.Checkpoints(one, keep=4)
  for step in (1, 2, 3, 4):
    state = states.place(states.make_state(step), states.mesh_of(2, 2, 2, 1))
    checkpoints.save(step, state, {"row": step}, states.CONFIG)
  checkpoints.close()
  damage(one)
  reports = run_processes(2, 4, str(one), str(two))
  expected = states.make_state(1)
  for number, report in enumerate(reports):
    assert (report["listed"], report["after"]) == ([1, 2, 3, 4], [1])
    assert (report["step"], report["damaged"]) == (1, [4, 3, 2])
    assert report["sharding"]
    assert f"array a is on process {number} alone" in report["refused"]
    assert report["saved"] == [6, 7]
    for path, whole in jax.tree_util.tree_flatten_with_path(expected)[0]:
      for bounds, digest in report["shards"][jax.tree_util.keystr(path)]:
        part = np.asarray(whole[tuple(slice(*b) for b in bounds)])
        assert hashlib.sha256(part.tobytes()).hexdigest() == digest
  assert {p.name for p in (one.parent / "damaged").iterdir()} == {"2", "3", "4"}
  for mesh in (states.mesh_of(1, 2, 4, 1), states.mesh_of(1)):
    found = training.Checkpoints(two).restore(states.template(mesh))
    assert (found.step, found.iterator, found.damaged) == (7, {"row": 7}, ())
    assert states.bytes_of(found.state) == states.bytes_of(expected)
