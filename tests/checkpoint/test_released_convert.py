"""Released shards to a training checkpoint and back: every byte, every interruption."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deepseek_jax import sharding
from deepseek_jax import tokenizer as tok
from deepseek_jax.checkpoint import (
    conversion,
    parts,
    released,
    released_export,
    released_import,
    released_reader,
    stored_checkpoint,
    training,
)
from deepseek_jax.checkpoint.partial_folder import open_partial
from deepseek_jax.checkpoint.shards import INDEX, Shards
from deepseek_jax.config import ComputeConfig, Config, MeshConfig
from deepseek_jax.model_config import read_released
from deepseek_jax.parameter_paths import path_names

CHECKPOINT = pathlib.Path(__file__).parents[1] / "golden" / "checkpoint_tiny"
CONFIG = Config(read_released(CHECKPOINT / "config.json"))
NONE = lambda path: False


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
  target = tmp_path_factory.mktemp("converted") / "stored"
  released_import.to_training(CHECKPOINT, target, CONFIG)
  return target


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
  target = tmp_path_factory.mktemp("converted") / "decoded"
  released_import.to_training(CHECKPOINT, target, CONFIG, keep=NONE)
  return target


@pytest.fixture(scope="module")
def weights():
  """Every parameter under its released name."""
  model = released_reader.load(Shards(CHECKPOINT), conversion.abstract_model(CONFIG)).model
  return released.to_released(nnx.split(model)[1], model.config)


def forget(workdir, tmp_path):
  """A copy of a converted checkpoint that does not find the shards it came from."""
  copy = tmp_path / "forgetful"
  shutil.copytree(workdir, copy)
  layout = copy / "released" / "layout.json"
  found = json.loads(layout.read_text()) | {"source": str(tmp_path / "gone")}
  layout.write_text(json.dumps(found))
  return copy


def files_of(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def raw(folder):
  shards = Shards(folder)
  form = lambda name: (shards.tensors[name].dtype, shards.tensors[name].shape)
  return {name: (*form(name), shards.read(name).tobytes()) for name in shards.tensors}


def same_weights(model, weights):
  named = released.to_released(nnx.split(model)[1], model.config)
  assert named.keys() == weights.keys()
  for name, value in weights.items():
    np.testing.assert_array_equal(named[name], value, err_msg=name)


@pytest.mark.parametrize("way", ["stored", "decoded"])
def test_there_and_back_is_every_byte(request, way, tmp_path):
  """Both ways alike: decoded blocks that nothing has touched take the original's bytes."""
  report = released_export.to_released(request.getfixturevalue(way), tmp_path / "back")
  assert files_of(tmp_path / "back") == files_of(CHECKPOINT)
  assert report == (568, 1386772, [], str(CHECKPOINT))
  assert [path.name for path in tmp_path.iterdir()] == ["back"]


def test_stored_weights_keep_their_bytes_without_the_original(stored, tmp_path):
  copy = forget(stored, tmp_path)
  report = released_export.to_released(copy, tmp_path / "back")
  ours, theirs = raw(tmp_path / "back"), raw(CHECKPOINT)
  assert sorted(theirs.keys() - ours.keys()) == report.skipped
  assert len(report.skipped) == 7
  assert all(theirs[name] == value for name, value in ours.items())
  assert report.original is None
  where = json.loads((tmp_path / "back" / INDEX).read_text())["weight_map"]
  theirs = json.loads((CHECKPOINT / INDEX).read_text())["weight_map"]
  assert all(theirs[name] == file for name, file in where.items())
  again = released_import.to_training(tmp_path / "back", tmp_path / "again", CONFIG)
  assert again.skipped == []


def test_decoded_weights_keep_their_values_without_the_original(decoded, tmp_path, weights):
  released_export.to_released(forget(decoded, tmp_path), tmp_path / "back")
  model = released_reader.load(Shards(tmp_path / "back"), conversion.abstract_model(CONFIG)).model
  same_weights(model, weights)
  # Why the original is asked for: blocks that do not use their upper half come back rescaled.
  ours, theirs = raw(tmp_path / "back"), raw(CHECKPOINT)
  changed = {name for name, value in ours.items() if value != theirs[name]}
  assert changed
  assert all(theirs[name][0] in ("F8_E4M3", "F8_E8M0", "I8") for name in changed)


def test_a_converted_checkpoint_is_a_training_checkpoint(stored, decoded, weights):
  for model in (
      training.load_model(decoded)[1],
      stored_checkpoint.load_model(decoded)[1],
      stored_checkpoint.load_model(stored)[1],
  ):
    same_weights(model, weights)
  config, model, step = stored_checkpoint.load_model(stored, dequantise=False)
  assert step == 0
  codes = model.runs[0].ffn.experts.w1.weight.get_value().codes
  assert (codes.dtype, codes.shape) == (jnp.int8, (1, 6, 32, 32))
  assert config.model == CONFIG.model
  copied = pathlib.Path(config.data.tokenizer)
  assert copied == stored / "released" / "tokenizer.json"
  assert copied.read_bytes() == (CHECKPOINT / "tokenizer.json").read_bytes()
  assert tok.from_name(str(copied)).vocab_size == 480


@pytest.mark.parametrize("dequantise", [True, False])
def test_devices_of_a_mesh_read_their_parts(stored, dequantise):
  mesh = sharding.make_mesh(MeshConfig(fsdp=2, expert=2), jax.devices()[:4])
  _, alone, _ = stored_checkpoint.load_model(stored, dequantise=dequantise)
  config, spread, _ = stored_checkpoint.load_model(stored, dequantise=dequantise, mesh=mesh)
  expected, found = (training.names_of(nnx.state(model)) for model in (alone, spread))
  specs = sharding.parameter_specs(nnx.state(alone), mesh, dense=config.compute.spread_dense)
  at = training.names_of(sharding.placed(specs, mesh))
  assert expected.keys() == found.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert found[name].sharding.is_equivalent_to(at[name], value.ndim), name
  assert any(not value.is_fully_replicated for value in found.values())


def test_some_kept_and_some_decoded(tmp_path):
  config = dataclasses.replace(CONFIG, compute=ComputeConfig(param_dtype="bfloat16"))
  experts = lambda path: "experts" in path
  released_import.to_training(CHECKPOINT, tmp_path / "mixed", config, keep=experts)
  arrays = training.names_of(stored_checkpoint.load_model(tmp_path / "mixed", dequantise=False)[1])
  for name, array in arrays.items():
    kept = name.endswith((".codes", ".scales"))
    assert kept == ("experts.w" in name and "shared" not in name)
    if not kept:
      f32 = any(part in name for part in ("hc_", "bias", "sink"))
      assert array.dtype == (jnp.float32 if f32 else jnp.bfloat16)
  released_export.to_released(tmp_path / "mixed", tmp_path / "back")
  assert files_of(tmp_path / "back") == files_of(CHECKPOINT)


def trained(workdir, change):
  """A run that began with the golden weights and changed some; knows nothing of its origin."""
  model = released_reader.load(Shards(CHECKPOINT), conversion.abstract_model(CONFIG)).model
  state = nnx.split(model)[1]

  def changed(path, leaf):
    value = np.array(leaf)
    change(".".join(path_names(path)), value)
    return jnp.asarray(value)

  state = jax.tree_util.tree_map_with_path(changed, state)
  checkpoints = training.Checkpoints(workdir / "checkpoints")
  checkpoints.save(3, {"params": state, "opt_state": jnp.zeros(4)}, {}, CONFIG)
  checkpoints.close()
  return workdir


def test_after_training_only_touched_blocks_have_other_bytes(tmp_path):
  def change(name, value):
    if name == "runs.1.ffn.experts.w2.weight":
      value[0, 4, 17, 5] += 0.25
    if name == "norm.weight":
      value[3] = 2.5

  run = trained(tmp_path / "run", change)
  report = released_export.to_released(run, tmp_path / "back", original=CHECKPOINT)
  ours, theirs = raw(tmp_path / "back"), raw(CHECKPOINT)
  assert report.tensors == len(theirs)
  changed = {name for name in theirs if ours[name] != theirs[name]}
  expert = "layers.1.ffn.experts.4.w2."
  assert {"norm.weight", f"{expert}weight"} <= changed <= {
      "norm.weight", f"{expert}weight", f"{expert}scale"
  }  # fmt: skip
  a, b = (np.frombuffer(x[f"{expert}weight"][2], np.uint8).reshape(64, 16) for x in (ours, theirs))
  assert {row for row, _ in np.argwhere(a != b)} == {17}
  assert np.frombuffer(ours["norm.weight"][2], jnp.bfloat16)[3] == 2.5
  for name in ("config.json", "tokenizer.json", INDEX):
    assert (tmp_path / "back" / name).read_bytes() == (CHECKPOINT / name).read_bytes()


def test_rows_of_a_table_that_nothing_reads_are_not_written(tmp_path):
  def change(name, value):
    if name.endswith("engram.embed.weight"):
      rows = max(n for n in CONFIG.model.engram_num_embeddings if n < value.shape[1])
      value[0, rows:] = np.nan

  run = trained(tmp_path / "run", change)
  released_export.to_released(run, tmp_path / "back", original=CHECKPOINT)
  assert files_of(tmp_path / "back") == files_of(CHECKPOINT)


def test_a_run_without_an_original_gets_shards_of_its_own(tmp_path, weights):
  run = trained(tmp_path / "run", lambda name, value: None)
  report = released_export.to_released(run, tmp_path / "back", shard_bytes=400_000)
  assert (report.tensors, report.skipped, report.original) == (561, [], None)
  shards = Shards(tmp_path / "back")
  sizes = [file.path.stat().st_size for file in shards.files.values()]
  assert len(sizes) == 4
  assert max(sizes) < 450_000
  assert read_released(tmp_path / "back" / "config.json") == CONFIG.model
  same_weights(released_reader.load(shards, conversion.abstract_model(CONFIG)).model, weights)
  report = released_export.to_released(run, tmp_path / "one")
  assert {path.name for path in (tmp_path / "one").iterdir()} == {
      "model.safetensors", "config.json"
  }  # fmt: skip


def test_values_that_are_not_finite_are_refused(tmp_path):
  def change(name, value):
    if name == "runs.0.attn.wq_a.weight":
      value[0, 3, 3] = np.nan

  run = trained(tmp_path / "run", change)
  with pytest.raises(ValueError, match="tensor layers.0.attn.wq_a.* holds values that are not fin"):
    released_export.to_released(run, tmp_path / "back", original=CHECKPOINT)
  assert not (tmp_path / "back").exists()


def test_an_original_of_another_model_is_refused(stored, tmp_path):
  other = tmp_path / "other"
  shutil.copytree(CHECKPOINT, other)
  config = json.loads((other / "config.json").read_text())
  config["text_config"]["index_topk"] = 4
  (other / "config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match=r"model.index_topk is 8; .*other/config.json says 4"):
    released_export.to_released(stored, tmp_path / "back", original=other)
  with pytest.raises(ValueError, match=r"model.index_topk is 8; .*other/config.json says 4"):
    released_import.to_training(other, tmp_path / "new", CONFIG)
  assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("seed", range(16))
def test_damage_is_found_before_anything_appears(stored, tmp_path, seed):
  """A flipped bit, a truncated or a missing file, anywhere in the step."""
  rng = np.random.default_rng(seed)
  copy = tmp_path / "copy"
  shutil.copytree(stored, copy)
  step = copy / "checkpoints" / "0"
  files = sorted(p for p in [*step.glob("state/params.*/*"), *step.glob("record/*")] if p.is_file())
  file = files[rng.integers(len(files))]
  data = bytearray(file.read_bytes())
  if seed % 3 == 0:
    file.unlink()
  elif seed % 3 == 1:
    file.write_bytes(data[: rng.integers(len(data))])
  else:
    data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    file.write_bytes(data)
  try:
    released_export.to_released(copy, tmp_path / "back")
  except ValueError:
    assert not (tmp_path / "back").exists()
  else:
    # Not all bits of Orbax's own files matter.
    assert files_of(tmp_path / "back") == files_of(CHECKPOINT)
    assert "params" not in str(file) or file.name == ".zarray"


class Killed(BaseException):
  """Nothing catches it."""


def killed_at(share):
  def progress(done, total):
    if done > share * total:
      raise Killed

  return progress


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_a_killed_conversion_leaves_nothing_and_is_continued(tmp_path, share, monkeypatch):
  target, partial = tmp_path / "new", tmp_path / "new.partial"
  with pytest.raises(Killed):
    released_import.to_training(CHECKPOINT, target, CONFIG, progress=killed_at(share))
  assert not target.exists()
  finished = len((partial / "journal.jsonl").read_text().splitlines()) - 1
  assert finished >= 1
  with (partial / "journal.jsonl").open("a") as journal:
    journal.write('["cut sho')
  wrote = []
  write = released_import.ArrayWriter.write
  monkeypatch.setattr(
      released_import.ArrayWriter, "write",
      lambda self, name, *rest: (wrote.append(name), write(self, name, *rest))[1],
  )  # fmt: skip
  released_import.to_training(CHECKPOINT, target, CONFIG)
  total = len(conversion.arrays_of(parts.plan(conversion.abstract_model(CONFIG), lambda p: True)))
  assert len(wrote) == total - finished
  assert not partial.exists()
  assert sorted(p.name for p in target.iterdir()) == ["checkpoints", "released"]
  released_export.to_released(target, tmp_path / "back")
  assert files_of(tmp_path / "back") == files_of(CHECKPOINT)


def test_another_conversion_to_the_same_target_begins_anew(tmp_path):
  target = tmp_path / "new"
  with pytest.raises(Killed):
    released_import.to_training(CHECKPOINT, target, CONFIG, progress=killed_at(0.5))
  released_import.to_training(CHECKPOINT, target, CONFIG, keep=NONE)
  names = {p.name for p in (target / "checkpoints" / "0" / "state").glob("params.*")}
  assert not any(name.endswith("codes") for name in names)


def test_a_killed_export_leaves_nothing_and_is_continued(stored, tmp_path):
  target, partial = tmp_path / "back", tmp_path / "back.partial"
  with pytest.raises(Killed):
    released_export.to_released(stored, target, progress=killed_at(0.9))
  assert not target.exists()
  first = partial / "model-00001-of-00002.safetensors"
  before = first.stat().st_mtime_ns
  released_export.to_released(stored, target)
  assert (target / first.name).stat().st_mtime_ns == before
  assert files_of(target) == files_of(CHECKPOINT)


def test_a_target_that_is_in_use(tmp_path):
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "file").touch()
  with pytest.raises(ValueError, match=r"target .*full exists; it must be a new or an empty"):
    released_import.to_training(CHECKPOINT, tmp_path / "full", CONFIG)
  with open_partial(tmp_path / "new", "a"):
    with pytest.raises(ValueError, match=r"target .*new is being written by another process"):
      released_import.to_training(CHECKPOINT, tmp_path / "new", CONFIG)
    assert (tmp_path / "new.partial" / "journal.jsonl").read_text() == '["fingerprint", "a"]\n'
  (tmp_path / "empty").mkdir()
  released_import.to_training(CHECKPOINT, tmp_path / "empty", CONFIG)


def test_a_source_without_checkpoints(tmp_path):
  with pytest.raises(ValueError, match="source .* holds no checkpoint"):
    released_export.to_released(tmp_path, tmp_path / "back")
  assert not list(tmp_path.iterdir())
