"""Safetensors files and folders of them: what is read, and what is refused."""

import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from deepseek_jax.checkpoint import safetensors_file
from deepseek_jax.checkpoint.safetensors_file import SafetensorsFile
from deepseek_jax.checkpoint.shards import INDEX, SINGLE, Shards

CHECKPOINT = pathlib.Path(__file__).parents[1] / "golden" / "checkpoint_tiny"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path):
  for path in CHECKPOINT.glob("model*"):
    shutil.copyfile(path, tmp_path / path.name)
  return tmp_path


def change_index(folder, change):
  index = json.loads((folder / INDEX).read_text())
  change(index["weight_map"])
  (folder / INDEX).write_text(json.dumps(index))


def change_header(path, change):
  """Rewrites a file with another header and the payload it has."""
  data = path.read_bytes()
  length = int.from_bytes(data[:8], "little")
  header = json.loads(data[8 : 8 + length])
  change(header)
  raw = json.dumps(header).encode()
  path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


def test_every_tensor_has_the_bytes_that_the_library_reads():
  shards = Shards(CHECKPOINT)
  theirs = {}
  for path in CHECKPOINT.glob("*.safetensors"):
    theirs |= dict(safetensors.deserialize(path.read_bytes()))
  assert shards.tensors.keys() == theirs.keys()
  for name, entry in theirs.items():
    ours = shards.read(name)
    assert (shards.tensors[name].dtype, list(ours.shape)) == (entry["dtype"], entry["shape"])
    assert np.ascontiguousarray(ours).tobytes() == bytes(entry["data"])
  assert shards.bytes_read == sum(len(entry["data"]) for entry in theirs.values())


def test_a_block_is_a_slice_and_counts_its_own_bytes(tmp_path):
  values = {
      "a": np.arange(10000, dtype=np.float32).reshape(50, 200), "b": np.float32([3.5]),
      "c": np.arange(24, dtype=np.int64).reshape(2, 3, 4), "d": np.zeros((0, 4), np.int8),
      "e": np.arange(6, dtype=ml_dtypes.bfloat16), "f": np.array(2.5, np.float32),
  }  # fmt: skip
  safetensors.numpy.save_file(values, tmp_path / SINGLE)
  file = SafetensorsFile(tmp_path / SINGLE)
  for name, index in (
      ("a", (slice(7, 31),)), ("a", (slice(49, 50), slice(3, 200))), ("a", (slice(5, 5),)),
      ("b", (slice(0, 1),)), ("c", (slice(1, 2), slice(None), slice(2, 4))), ("d", ()),
      ("e", (slice(2, 5),)), ("f", ()), ("a", ()),
  ):  # fmt: skip
    before = file.bytes_read
    block = file.read(name, index)
    np.testing.assert_array_equal(block, values[name][index])
    assert file.bytes_read - before == block.nbytes
  shards = Shards(tmp_path)
  for name, value in values.items():
    pieces = list(shards.blocks(name, 1000))
    assert b"".join(np.ascontiguousarray(p).tobytes() for p in pieces) == value.tobytes()
    assert all(piece.nbytes <= 1000 for piece in pieces)


def test_headers_are_written_as_the_library_writes_them():
  for file in Shards(CHECKPOINT).files.values():
    entries = [(name, t.dtype, t.shape) for name, t in file.tensors.items()]
    assert safetensors_file.make_header(entries, file.metadata) == file.header


def test_a_missing_shard_is_named(folder):
  (folder / SECOND).unlink()
  with pytest.raises(ValueError, match=rf"shard .*{SECOND} is missing; .* names 2 shards"):
    Shards(folder)


@pytest.mark.parametrize("left", [0, 7, 8, 5000, 27288, 900000, -1])
def test_a_truncated_shard_is_named(folder, left):
  data = (folder / FIRST).read_bytes()
  (folder / FIRST).write_bytes(data[:left])
  with pytest.raises(ValueError, match=f"{FIRST}.* (truncated|no safetensors header)"):
    Shards(folder)


def test_bytes_that_no_tensor_owns_are_refused(folder):
  with (folder / FIRST).open("ab") as file:
    file.write(b"\0")
  with pytest.raises(ValueError, match=f"{FIRST} is longer than its tensors"):
    Shards(folder)


def test_an_index_that_names_a_missing_tensor(folder):
  change_index(folder, lambda names: names.update({"layers.9.attn.attn_sink": FIRST}))
  with pytest.raises(ValueError, match=rf"tensor layers.9.attn.attn_sink is missing: .* {FIRST}"):
    Shards(folder)


def test_an_index_that_misses_a_tensor_or_puts_it_elsewhere(folder):
  change_index(folder, lambda names: names.pop("norm.weight"))
  with pytest.raises(ValueError, match=rf"shard {SECOND} holds tensor norm.weight \(1 such\)"):
    Shards(folder)
  change_index(folder, lambda names: names.update({"norm.weight": FIRST}))
  with pytest.raises(ValueError, match=f"tensor norm.weight is missing: .* {FIRST}"):
    Shards(folder)


def test_an_index_that_leaves_the_folder(folder):
  change_index(folder, lambda names: names.update({"norm.weight": f"../{SECOND}"}))
  with pytest.raises(ValueError, match="puts tensor norm.weight into '../model"):
    Shards(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(folder, text):
  (folder / INDEX).write_text(text)
  with pytest.raises(ValueError, match=f"{INDEX} has no weight_map"):
    Shards(folder)


def test_a_folder_without_a_checkpoint(tmp_path):
  with pytest.raises(ValueError, match=f"holds neither {INDEX} nor {SINGLE}"):
    Shards(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dtype": "F4"}, "has dtype 'F4'; known are F8_E4M3"),
        ({"dtype": "BF16"}, "has 128 bytes; BF16 .* takes 64"),
        ({"shape": [31]}, r"has 128 bytes; F32 \[31\] takes 124"),
        ({"shape": [-32]}, r"F32 \[-32\]"),
        ({"data_offsets": [0]}, "no safetensors header"),
        ({"shape": None}, "no safetensors header"),
    ],
    ids=["dtype", "size", "shape", "negative", "offsets", "none"],
)
def test_an_entry_that_does_not_fit(tmp_path, change, told):
  safetensors.numpy.save_file({"a": np.zeros(32, np.float32)}, tmp_path / SINGLE)
  change_header(tmp_path / SINGLE, lambda header: header["a"].update(change))
  with pytest.raises(ValueError, match=told):
    SafetensorsFile(tmp_path / SINGLE)


@pytest.mark.parametrize("offsets", [[4, 12], [12, 20]], ids=["overlap", "gap"])
def test_ranges_that_overlap_or_leave_a_gap(tmp_path, offsets):
  values = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
  safetensors.numpy.save_file(values, tmp_path / SINGLE)
  change_header(tmp_path / SINGLE, lambda header: header["b"].update(data_offsets=offsets))
  with pytest.raises(ValueError, match=r"tensor b in .* begins at byte"):
    SafetensorsFile(tmp_path / SINGLE)


def test_a_payload_change_of_the_same_size_changes_the_fingerprint(folder):
  before = Shards(folder).fingerprint()
  assert Shards(folder).fingerprint() == before
  data = bytearray((folder / SECOND).read_bytes())
  data[-1] ^= 1
  (folder / SECOND).write_bytes(data)
  assert Shards(folder).fingerprint() != before
