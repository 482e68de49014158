"""The program that converts checkpoints: its keys, its refusals, and what a kill leaves."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
from absl.testing import flagsaver

from deepseek_jax import cli
from deepseek_jax.checkpoint.shards import INDEX
from deepseek_jax.config import Config
from scripts import convert_checkpoint
from tests.checkpoint import released_files

ROOT = pathlib.Path(__file__).parents[2]
CHECKPOINT = ROOT / "tests" / "golden" / "checkpoint_tiny"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
KEYS = {"tensors", "bytes", "skipped", "original", "peak_rss_bytes", "seconds"}
ENV = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def start(*arguments):
  command = [sys.executable, str(ROOT / "scripts" / "convert_checkpoint.py"), *arguments]
  return subprocess.Popen(
      command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )


def run(*arguments):
  process = start(*arguments)
  out, err = process.communicate(timeout=600)
  return process.returncode, out, err


def convert(**values):
  """`main` in this process."""
  with flagsaver.flagsaver(**{name: str(v) for name, v in values.items()}):
    if not convert_checkpoint.flags.FLAGS.is_parsed():
      convert_checkpoint.flags.FLAGS.mark_as_parsed()
    return convert_checkpoint.main()


def files_of(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def source(tmp_path):
  folder = tmp_path / "source"
  folder.mkdir()
  for name in files_of(CHECKPOINT):
    shutil.copyfile(CHECKPOINT / name, folder / name)
  return folder


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--dequantise=experts", "--dequantise=wq_a")])
def test_there_and_back(tmp_path, more):
  code, out, err = run(f"--source={CHECKPOINT}", f"--target={tmp_path / 'new'}", "--json", *more)
  assert (code, err) == (0, "")
  found = json.loads(out.splitlines()[-1])
  assert found.keys() == KEYS
  assert (found["tensors"], found["bytes"], len(found["skipped"])) == (561, 1373976, 7)
  assert 0 < found["peak_rss_bytes"] < 1 << 30
  code, out, err = run(
      f"--source={tmp_path / 'new'}", f"--target={tmp_path / 'back'}", "--to=released", "--json"
  )
  assert (code, err) == (0, "")
  found = json.loads(out.splitlines()[-1])
  assert (found["tensors"], found["bytes"], found["skipped"]) == (568, 1386772, [])
  assert files_of(tmp_path / "back") == files_of(CHECKPOINT)


def test_bad_input_is_one_sentence_and_status_2(source, tmp_path):
  (source / SECOND).unlink()
  code, out, err = run(f"--source={source}", f"--target={tmp_path / 'new'}")
  assert (code, out) == (2, "")
  assert err == f"error: shard {source / SECOND} is missing; {INDEX} names 2 shards\n"
  assert [path.name for path in tmp_path.iterdir()] == ["source"]


def edit(path, change):
  found = json.loads(path.read_text())
  change(found)
  path.write_text(json.dumps(found))


def truncate(source):
  data = (source / FIRST).read_bytes()
  (source / FIRST).write_bytes(data[:-100])


def replace_in_header(old, new):
  """Of the same length."""

  def change(source):
    data = (source / FIRST).read_bytes()
    assert len(old) == len(new)
    assert data.count(old) >= 1
    (source / FIRST).write_bytes(data.replace(old, new, 1))

  return change


CONFIGURE = lambda **values: lambda source: edit(
    source / "config.json", lambda c: c["text_config"].update(values)
)
BAD = {
    "truncated": (truncate, r"00001-of-00002.safetensors is truncated: its header describes"),
    "index": (
        lambda source: edit(
            source / INDEX, lambda i: i["weight_map"].update({"layers.8.attn.attn_sink": FIRST})
        ),
        rf"tensor layers.8.attn.attn_sink is missing: {INDEX} says that {FIRST} holds it",
    ),
    "shape": (
        replace_in_header(b'{"dtype":"F32","shape":[4]', b'{"dtype":"F32","shape":[5]'),
        r"attn_sink in .* has 16 bytes; F32 \[5\] takes 20",
    ),
    "dtype": (
        replace_in_header(b'{"dtype":"F32","shape":[4]', b'{"dtype":"F33","shape":[4]'),
        r"attn_sink in .* has dtype 'F33'; known are F8_E4M3",
    ),
    "reshaped": (
        replace_in_header(b'"shape":[24,256]', b'"shape":[256,24]'),
        r"hc_attn_fn is F32 \[256, 24\]; the configuration needs F32 \[24, 256\]",
    ),
    "layers": (CONFIGURE(num_hidden_layers=7), "compress_ratios has 11 entries"),
    "experts": (CONFIGURE(n_routed_experts=8), "experts.6.* is missing .*needs it as"),
    "rows": (CONFIGURE(engram_num_embeddings=[434, 607]), "layer 3 is 607; the primes .* 606"),
    "classes": (
        CONFIGURE(engram_compressed_vocab_size=412),
        "engram_compressed_vocab_size is 412; tokenizer .*tokenizer.json has 413 classes",
    ),
    "unknown": (CONFIGURE(n_routed_expert=8), "unknown key text_config.n_routed_expert"),
    "no config": (lambda source: (source / "config.json").unlink(), "--config is missing"),
    "no index": (lambda source: (source / INDEX).unlink(), "holds neither model.safetensors.index"),
}


@pytest.mark.parametrize(("damage", "told"), BAD.values(), ids=BAD)
def test_bad_checkpoints(source, tmp_path, damage, told):
  damage(source)
  with pytest.raises((ValueError, OSError), match=told):
    convert(source=source, target=tmp_path / "new")
  assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"to": "bf16"}, "--to is 'bf16'; it must be training or released"),
        ({"original": "x"}, "--original is for --to=released alone"),
        ({"to": "released", "config": "configs/tiny.py"}, "--config is for --to=training alone"),
        ({"to": "released"}, "holds no checkpoint; it must be the workdir of a run"),
        ({"config": str(ROOT / "configs/tiny.py")}, "model.vocab_size is 264; .* says 480"),
        ({"target": str(CHECKPOINT)}, "exists; it must be a new or an empty folder"),
    ],
    ids=["to", "original", "config", "source", "model", "target"],
)
def test_flags_that_do_not_fit(tmp_path, values, told):
  with pytest.raises(ValueError, match=told):
    convert(**({"source": CHECKPOINT, "target": tmp_path / "new"} | values))
  assert not list(tmp_path.iterdir())


def test_dequantise_must_match():
  paths = ["runs.0.attn.wq_a.weight", "runs.0.ffn.experts.w1.weight"]
  assert convert_checkpoint.decoded([], paths) == set()
  assert convert_checkpoint.decoded(["."], paths) == set(paths)
  assert convert_checkpoint.decoded([r"experts\.w\d"], paths) == {paths[1]}
  with pytest.raises(ValueError, match="--dequantise 'wq_c' matches no parameter in FP8 or FP4"):
    convert_checkpoint.decoded(["wq_c"], paths)
  with pytest.raises(ValueError, match=r"--dequantise '\(' is no regular expression"):
    convert_checkpoint.decoded(["("], paths)


@pytest.mark.slow
def test_killed_at_any_time_no_target_appears_and_a_rerun_finishes(tmp_path):
  target, partial = tmp_path / "new", tmp_path / "new.partial"
  arguments = f"--source={CHECKPOINT}", f"--target={target}"
  caught = 0
  for delay in (0.0, 0.2, 0.5):
    process = start(*arguments)
    while not partial.exists() and process.poll() is None:
      time.sleep(0.01)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    if target.exists():
      break
    caught += 1
    assert partial.is_dir()
  assert caught
  if not target.exists():
    assert run(*arguments)[0] == 0
  assert not partial.exists()
  assert run(f"--source={target}", f"--target={tmp_path / 'back'}", "--to=released")[0] == 0
  assert files_of(tmp_path / "back") == files_of(CHECKPOINT)


@pytest.mark.slow
def test_two_layers_of_released_sizes_take_less_than_3_gb(tmp_path):
  """18.6 GB of zeros in sparse files become 21 MB: 384 experts a layer, embedding and head."""
  config = Config.from_config_dict(cli.load(str(ROOT / "configs" / "flash.py")))
  source = tmp_path / "source"
  source.mkdir()
  config = released_files.two_released_layers(config)
  total = released_files.write_zeros(source, config, 10 << 30)
  code, out, err = run(
      f"--source={source}", f"--target={tmp_path / 'new'}", "--json",
      "--config.data.tokenizer=deepseek",
  )  # fmt: skip
  assert (code, err) == (0, "")
  found = json.loads(out.splitlines()[-1])
  assert found["bytes"] == total > 18e9
  assert found["peak_rss_bytes"] < 3e9
  used = sum(os.stat(p).st_blocks * 512 for p in (tmp_path / "new").rglob("*"))
  assert used < 100 << 20
  shutil.rmtree(tmp_path / "new")
