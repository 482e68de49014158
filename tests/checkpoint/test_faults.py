"""P5: of 200 seeded faults in a checkpoint, or in what is asked of it, none changes a state."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from deepseek_jax.checkpoint import record as records
from deepseek_jax.checkpoint import training
from tests.checkpoint import saving_process as states

pytestmark = pytest.mark.slow

DAMAGED, GOOD = 8, 5
# Read by every restore, and each byte is covered by a checksum of ours or of OCDBT. Of the others,
# no restore reads the markers, `_sharding` and what OCDBT has left of the parts it has merged.
COVERED = {"record/metadata", "state/d", "state/manifest.ocdbt"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Checkpoints of steps 5 and 8."""
  directory = tmp_path_factory.mktemp("run") / "checkpoints"
  checkpoints = training.Checkpoints(directory)
  for step in (GOOD, DAMAGED):
    checkpoints.save(step, jax.device_put(states.make_state(step)), {"row": step}, states.CONFIG)
  checkpoints.close()
  return directory


def restore(directory, template=None):
  return training.Checkpoints(directory).restore(template or states.make_state(0))


def outcome(directory):
  """Whether the damage was seen; in either case the bits are right."""
  found = restore(directory)
  assert (found.step, found.damaged) in ((GOOD, (DAMAGED,)), (DAMAGED, ()))
  assert states.bytes_of(found.state) == states.bytes_of(states.make_state(found.step))
  assert found.iterator == {"row": found.step}
  return "detected" if found.damaged else "harmless"


def files_of(directory):
  step = directory / str(DAMAGED)
  found = [p for part in ("state", "record") for p in (step / part).rglob("*") if p.is_file()]
  return sorted(found, key=lambda p: (place_of(p, directory), p.stat().st_size))


def pick(files, rng, fault):
  """A flipped bit hits any byte of the checkpoint, other faults any file."""
  sizes = np.array([f.stat().st_size if fault is flip else 1.0 for f in files])
  return files[rng.choice(len(files), p=sizes / sizes.sum())]


def place_of(file, directory):
  """Path in the step, without the names of OCDBT's data files, which are random."""
  path = file.relative_to(directory / str(DAMAGED))
  return str(path.parent if path.parent.name == "d" else path)


def flip(file, rng):
  content = bytearray(file.read_bytes())
  content[rng.integers(len(content))] ^= 1 << rng.integers(8)
  file.write_bytes(content)


def truncate(file, rng):
  file.write_bytes(file.read_bytes()[: rng.integers(file.stat().st_size)])


def remove(file, rng):
  file.unlink()


def forge(directory, change):
  """Replaces the arrays of the step by a whole Orbax item with other arrays."""
  arrays = training.names_of(states.make_state(DAMAGED))
  change(arrays)
  shutil.rmtree(directory / str(DAMAGED) / "state")
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    path = directory / str(DAMAGED) / "state"
    checkpointer.save(path, args=ocp.args.PyTreeSave(arrays))


def other_dtype(name, arrays):
  to = {4: np.uint16, 2: np.uint32, 1: np.uint16}[arrays[name].dtype.itemsize]
  arrays[name] = np.zeros(arrays[name].shape, to)


def other_shape(name, arrays):
  arrays[name] = np.zeros((*arrays[name].shape, 1), arrays[name].dtype)


def other_bit(name, arrays):
  arrays[name] = arrays[name].copy()
  arrays[name].reshape(-1).view(np.uint8)[-1] ^= 1


def missing(name, arrays):
  del arrays[name]


def renamed(name, arrays):
  arrays[name + "_"] = arrays.pop(name)


def exchanged(name, arrays):
  """Elements change their places."""
  arrays[name] = np.roll(arrays[name], 1)


FILES = [flip] * 80 + [truncate] * 25 + [remove] * 25
FORGERIES = [other_dtype, other_shape, other_bit, missing, renamed, exchanged]
TEMPLATES = ["dtype", "shape", "missing", "renamed"]
SEEDS = range(200)


@pytest.mark.parametrize("seed", SEEDS[: len(FILES)])
def test_a_damaged_file_is_noticed_or_holds_nothing(run, seed):
  rng = np.random.default_rng(seed)
  fault = FILES[seed]
  file = pick(files_of(run), rng, fault)
  place = place_of(file, run)
  whole = file.read_bytes()
  try:
    fault(file, rng)
    found = outcome(run)
    assert found == "detected" or place not in COVERED
  finally:
    file.write_bytes(whole)


def array_of(rng):
  names = sorted(training.names_of(states.make_state(0)))
  return names[rng.integers(len(names) - 1)]


@pytest.mark.parametrize("seed", SEEDS[130:160])
def test_arrays_of_another_hand_are_noticed(run, seed, tmp_path):
  """Orbax itself restores other values and other dtypes without a word."""
  fault, name = FORGERIES[seed % len(FORGERIES)], array_of(np.random.default_rng(seed))
  directory = tmp_path / "checkpoints"
  shutil.copytree(run, directory)
  forge(directory, lambda arrays: fault(name, arrays))
  assert outcome(directory) == "detected"


@pytest.mark.parametrize("seed", SEEDS[160:200])
def test_what_the_checkpoint_does_not_hold_is_refused(run, seed):
  rng = np.random.default_rng(seed)
  kind = TEMPLATES[seed % len(TEMPLATES)]
  abstract = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
  wanted = jax.tree.map(abstract, states.make_state(0))
  name = array_of(rng).removeprefix("params.")
  leaves = wanted["params"] if name in wanted["params"] else wanted
  a = leaves[name]
  if kind == "dtype":
    other = {4: jnp.bfloat16, 2: jnp.float32, 1: jnp.int16}[a.dtype.itemsize]
    leaves[name] = jax.ShapeDtypeStruct(a.shape, other)
  elif kind == "shape":
    leaves[name] = jax.ShapeDtypeStruct((*a.shape, 1), a.dtype)
  else:
    leaves[name + "_"] = leaves.pop(name) if kind == "renamed" else a
  with pytest.raises(ValueError, match=rf"array (params\.)?{name}_?: checkpoint {DAMAGED} holds "):
    restore(run, wanted)


def test_a_record_of_another_format_is_refused(run, tmp_path):
  """As whole, so that nothing takes it for damage and moves it away."""
  directory = tmp_path / "checkpoints"
  shutil.copytree(run, directory)
  file = directory / str(DAMAGED) / "record" / "metadata"
  body = records.parse(file.read_text(), DAMAGED)
  del body["format"]
  sealed = {"sha256": records._digest(body), "body": body}
  file.write_text(json.dumps(sealed))
  with pytest.raises(ValueError, match="checkpoint 8 has a record of format 1; this version reads"):
    restore(directory)
  with pytest.raises(ValueError, match="format 1"):
    training.Checkpoints(directory).config()
