"""A released checkpoint as parameters: logits, names, bytes that are read, and what is refused."""

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deepseek_jax import cli
from deepseek_jax import tokenizer as tok
from deepseek_jax.checkpoint import engram_constants, parts, released, released_reader
from deepseek_jax.checkpoint.safetensors_file import Tensor
from deepseek_jax.checkpoint.shards import Shards
from deepseek_jax.config import ComputeConfig, Config
from deepseek_jax.model_config import read_released
from deepseek_jax.nn.engram import allocated_rows
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.parameter_paths import path_names
from deepseek_jax.quantised import Quantised, dequantised, is_quantised
from deepseek_jax.weight_formats import FORMATS
from tests.checkpoint import reading_process

ROOT = pathlib.Path(__file__).parents[2]
CHECKPOINT = ROOT / "tests" / "golden" / "checkpoint_tiny"
CONFIG = read_released(CHECKPOINT / "config.json")
ALL = lambda path: True


@functools.cache
def abstract(config=CONFIG, **compute):
  compute = ComputeConfig(**compute)
  return nnx.eval_shape(lambda: Transformer(config, compute, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def expected():
  with np.load(CHECKPOINT / "expected" / "expected.npz") as file:
    return dict(file)


def test_decoded_weights(expected):
  loaded = released_reader.load(Shards(CHECKPOINT), abstract())
  named = released.to_released(nnx.split(loaded.model)[1], loaded.model.config)
  for key in (k for k in expected if k.startswith("deq/")):
    name, _, rows = key.removeprefix("deq/").partition("_first")
    found = named[name][:16] if rows else named[name]
    np.testing.assert_array_equal(found, expected[key])
  outside = ("mtp.", "vision.", "image_")
  assert len(loaded.skipped) == 7
  assert all(name.startswith(outside) for name in loaded.skipped)


def test_kept_weights_are_the_files_bytes_and_decode_to_the_others():
  shards = Shards(CHECKPOINT)
  kept = nnx.split(released_reader.load(shards, abstract(), keep=ALL).model)[1]
  decoded = nnx.split(released_reader.load(shards, abstract()).model)[1]
  stored = []
  for a, b in zip(jax.tree.leaves(kept, is_leaf=is_quantised), jax.tree.leaves(decoded)):
    if is_quantised(a):
      stored.append(a)
      assert a.shape == b.shape
      for at in np.ndindex(b.shape[:-2]):
        values = FORMATS[a.format].decode(np.asarray(a.codes)[at], np.asarray(a.scales)[at])
        np.testing.assert_array_equal(values, np.asarray(b)[at])
    else:
      np.testing.assert_array_equal(a, b)
  unused = sum(allocated_rows(n) - n for n in CONFIG.engram_num_embeddings)
  held = sum(leaf.codes.nbytes + leaf.scales.nbytes for leaf in stored)
  held -= unused * (CONFIG.engram_head_dim + CONFIG.engram_head_dim // 32)
  quantised = ("F8_E4M3", "F8_E8M0", "I8")
  wanted = parts.wanted(parts.plan(abstract()))
  assert held == sum(
      shards.tensors[name].num_bytes for name, (dtype, _) in wanted.items() if dtype in quantised
  )
  first = shards.read("layers.0.ffn.experts.3.w2.weight")
  run = kept["runs"][0]
  codes = run["ffn"]["experts"]["w2"]["weight"].get_value().codes
  np.testing.assert_array_equal(codes[0, 3], first)


def test_only_what_keep_names_stays_as_stored():
  experts = lambda path: "experts" in path
  kept = nnx.split(released_reader.load(Shards(CHECKPOINT), abstract(), keep=experts).model)[1]
  leaves = jax.tree_util.tree_flatten_with_path(kept, is_leaf=is_quantised)[0]
  for path, leaf in leaves:
    assert isinstance(leaf, Quantised) == ("experts" in path_names(path))
    if not isinstance(leaf, Quantised):
      assert leaf.dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "quantize", "key", "limit"),
    [
        (ALL, (), "logits_f32", 5e-5),
        (lambda path: False, (), "logits_f32", 5e-5),
        (ALL, ("main_kv", "index", "window_kv"), "logits_f32_kvquant", 1e-3),
    ],
    ids=["kept", "decoded", "kept-kvquant"],
)
def test_logits_from_both_paths(expected, keep, quantize, key, limit):
  model = abstract(quantize=quantize)
  graph, state = nnx.split(released_reader.load(Shards(CHECKPOINT), model, keep=keep).model)
  constants = engram_constants.derive(
      CONFIG, tok.ReleasedTokenizer(CHECKPOINT / "tokenizer.json"), "tiny"
  )
  ids = expected["ids"]
  ngrams = np.stack([tok.ngrams(constants.classes[line], constants.pad_class) for line in ids])

  @jax.jit
  def logits(state, ids, ngrams):
    model = nnx.merge(graph, dequantised(state))
    return model.logits(model(ids, Rows.single(*ids.shape), ngrams).hidden)

  np.testing.assert_allclose(logits(state, ids, ngrams), expected[key], atol=limit, rtol=0)


def test_engram_constants_come_from_tokenizer_and_configuration(expected):
  tokenizer = tok.ReleasedTokenizer(CHECKPOINT / "tokenizer.json")
  found = engram_constants.derive(CONFIG, tokenizer, "tiny")
  np.testing.assert_array_equal(found.classes, expected["token_map"])
  for k, layer in enumerate(found.layers):
    for name in ("multipliers", "primes", "offsets"):
      np.testing.assert_array_equal(getattr(layer, name), expected[f"engram_{name}"][k])
  other = dataclasses.replace(CONFIG, engram_compressed_vocab_size=412)
  with pytest.raises(
      ValueError, match="engram_compressed_vocab_size is 412; tokenizer tiny has 413 classes"
  ):
    engram_constants.derive(other, tokenizer, "tiny")
  with pytest.raises(ValueError, match="vocab_size is 480; it must be at least 129280"):
    engram_constants.derive(CONFIG, tok.ReleasedTokenizer(), "deepseek")
  with pytest.raises(ValueError, match=r"engram_num_embeddings for layer 1 is 435; .* sum to 434"):
    abstract(dataclasses.replace(CONFIG, engram_num_embeddings=(435, 606)))


def test_names_are_a_bijection_and_the_released_model_has_the_released_bytes():
  """Spec 13: 96,085 tensors in 510,286,023,000 bytes, of which the text backbone is this."""
  config = Config.from_config_dict(cli.load(str(ROOT / "configs" / "flash.py")))
  planned = parts.plan(abstract(config.model, param_dtype="bfloat16"), ALL)
  names = [name for part in parts.leaves(planned) for _, name, _, _ in part.tensors()]
  needs = parts.wanted(planned)
  assert len(names) == len(needs) == 96_085 - 2_401 - 266
  shapes = {
      "layers.39.ffn.experts.383.w2.weight": ("I8", (5120, 1152)),
      "layers.39.ffn.experts.383.w2.scale": ("F8_E8M0", (5120, 72)),
      "layers.0.ffn.shared_experts.w2.scale": ("F8_E8M0", (160, 72)),
      "layers.14.engram.embed.weight": ("F8_E4M3", (384_016_682, 256)),
      "layers.14.engram.embed.scale": ("F8_E8M0", (384_016_682, 8)),
      "layers.1.engram.wkv.scale": ("F8_E8M0", (800, 192)),
      "layers.1.engram.q_weight": ("BF16", (4, 5120)),
      "layers.36.attn.indexer.wq_b.scale": ("F8_E8M0", (128, 40)),
      "layers.8.attn.compressor.wgate.weight": ("BF16", (512, 5120)),
      "layers.7.attn.wo_a.scale": ("F8_E8M0", (256, 128)),
      "layers.7.attn.attn_sink": ("F32", (64,)),
      "layers.7.ffn.gate.bias_vl": ("F32", (384,)),
      "layers.7.hc_ffn_fn": ("F32", (24, 20480)),
      "head.weight": ("BF16", (129280, 5120)),
  }
  for name, form in shapes.items():
    assert needs[name] == form
  # No tensor in F32 may land in a parameter of bf16.
  for part in parts.leaves(planned):
    assert part.file_dtype != "F32" or part.dtype == np.float32


def blocks_of_half(shards, part, axis, half):
  """Reads one half of an array and returns its values."""
  index = [slice(0, n) for n in part.shape]
  size = part.shape[axis] // 2
  index[axis] = slice(half * size, (half + 1) * size)
  return released_reader.read(shards, part, tuple(index))


@pytest.mark.parametrize("keep", [ALL, lambda path: False], ids=["kept", "decoded"])
def test_halves_make_the_whole_and_read_half_of_it(keep):
  """Along every axis: stacked layers are one array, so its halves cut layers, experts or rows."""
  for part in parts.leaves(parts.plan(abstract(), keep)):
    if "runs" in part.path and part.path[1] not in "13":
      continue
    shards = Shards(CHECKPOINT)
    whole = released_reader.read(shards, part, tuple(slice(0, n) for n in part.shape))
    needed = shards.bytes_read
    for axis, size in enumerate(part.shape):
      if size % 2 or not size:
        continue
      shards = Shards(CHECKPOINT)
      found = [blocks_of_half(shards, part, axis, 0)]
      one = shards.bytes_read
      found.append(blocks_of_half(shards, part, axis, 1))
      np.testing.assert_array_equal(np.concatenate(found, axis), whole)
      inside = axis - part.depth
      unit = 1 if inside < 0 or part.stored is None or part.role != "values" else 32
      rows = part.stored.rows if part.stored and inside == 0 else unit
      if unit == 1 or (size // 2) % rows == 0:
        # Of a table, the file holds fewer rows.
        held = part.released_rows if inside == 0 else size
        assert one * held == needed * (size // 2)
        assert shards.bytes_read == needed
      else:
        # A tile that both halves need: its scales are read twice, its codes are not.
        assert needed // 2 < one <= needed // 2 + needed // 17


def free_port():
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return str(s.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["keep", "decode"])
def test_two_processes_read_their_halves(keep):
  """Each with two devices that hold the same half: that half is read once."""
  program, port = ROOT / "tests" / "checkpoint" / "reading_process.py", free_port()
  env = {
      "PYTHONPATH": str(ROOT),
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
  }
  processes = [
      subprocess.Popen(
          [sys.executable, str(program), str(number), "2", port, keep],
          env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
      )
      for number in range(2)
  ]  # fmt: skip
  found = []
  for process in processes:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found.append(json.loads(out.splitlines()[-1]))
  shards = Shards(CHECKPOINT)
  model = released_reader.load(shards, abstract(), keep=lambda path: keep == "keep").model
  leaves = jax.tree_util.tree_flatten_with_path(nnx.split(model)[1])[0]
  split = 0
  for path, whole in leaves:
    name = jax.tree_util.keystr(path)
    bounds = [report["shards"][name]["bounds"] for report in found]
    for report in found:
      index = tuple(slice(*b) for b in report["shards"][name]["bounds"])
      digest = hashlib.sha256(np.asarray(whole)[index].tobytes()).hexdigest()
      assert report["shards"][name]["digests"] == [digest]
    split += bounds[0] != bounds[1]
  assert split > 0.8 * len(leaves)
  for report in found:
    assert report["bytes"] <= 1.001 * shards.bytes_read / 2


def test_memory_holds_less_than_two_slices(tmp_path):
  """What numpy allocates while one array of experts is put together from 24 tensors."""
  config = dataclasses.replace(
      CONFIG, n_routed_experts=24, moe_intermediate_size=512, hidden_size=2048,
      engram_layer_ids=(), engram_num_embeddings=(),
  )  # fmt: skip
  (part,) = [
      p for p in parts.leaves(parts.plan(abstract(config)))
      if p.path == ("runs", "0", "ffn", "experts", "w1", "weight")
  ]  # fmt: skip

  class Zeros:
    """Tensors that take no memory of their own."""

    def read(self, name, index=()):
      fmt = part.stored
      shape = fmt.scale_shape(part.weight) if "scale" in name else fmt.code_shape(part.weight)
      dtype = np.uint8 if "scale" in name else np.int8
      return np.broadcast_to(np.zeros((), dtype), shape)[index]

  slice_bytes = 4 * np.prod(part.shape, dtype=np.int64)
  assert slice_bytes > 90 << 20
  tracemalloc.start()
  released_reader.assemble(Zeros(), part)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert slice_bytes <= peak < 2 * slice_bytes


@pytest.fixture
def folder(tmp_path):
  for path in CHECKPOINT.iterdir():
    if path.is_file():
      shutil.copyfile(path, tmp_path / path.name)
  return tmp_path


def refused(tensors, config=CONFIG):
  with pytest.raises(ValueError, match=r".") as error:
    parts.check(tensors, parts.plan(abstract(config)))
  return str(error.value)


def test_tensors_that_are_missing_unknown_or_of_another_form():
  tensors = dict(Shards(CHECKPOINT).tensors)
  assert len(parts.check(tensors, parts.plan(abstract()))) == 7
  name = "layers.3.ffn.gate.bias_vl"
  less = {k: v for k, v in tensors.items() if k != name}
  assert refused(less) == (
      f"tensor {name} is missing (1 such); the configuration needs it as F32 [6]"
  )
  more = tensors | {"layers.3.ffn.gate.other": tensors[name]}
  assert refused(more) == (
      "tensor layers.3.ffn.gate.other has no place in the configured model (1 such)"
  )
  for form, told in (
      (Tensor("BF16", (6,), 0, 12), "BF16 [6]"), (Tensor("F32", (7,), 0, 28), "F32 [7]")
  ):  # fmt: skip
    assert refused(tensors | {name: form}) == (
        f"tensor {name} is {told}; the configuration needs F32 [6]"
    )
  # FP4 opened as FP8 has half the inputs.
  expert = "layers.0.ffn.experts.0.w1.weight"
  as_fp8 = tensors | {expert: tensors[expert]._replace(dtype="F8_E4M3")}
  assert refused(as_fp8).startswith(f"tensor {expert} is F8_E4M3 [32, 32]; the configuration")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"n_routed_experts": 5}, r"layers\.\d\.ffn\.experts\.5\.\w+\.\w+ has no place"),
        ({"n_routed_experts": 7}, r"layers\.\d\.ffn\.experts\.6\.\w+\.\w+ is missing"),
        ({"vocab_size": 481}, r"embed.weight is BF16 \[480, 64\]; .* BF16 \[481, 64\]"),
        ({"q_lora_rank": 64}, r"q_norm.weight is BF16 \[32\]; .* needs BF16 \[64\]"),
        ({"index_source_layer_ids": (2, 4)}, r"layers.6.attn.indexer.* has no place"),
        ({"kv_source_layer_ids": (2, 4, 6), "index_source_layer_ids": (2, 4, 6)}, "is missing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_configuration_that_contradicts_the_tensors(change, told):
  config = dataclasses.replace(CONFIG, **change)
  assert re.search(told, refused(Shards(CHECKPOINT).tensors, config))


def test_a_width_that_fp4_cannot_hold():
  config = dataclasses.replace(CONFIG, moe_intermediate_size=48)
  with pytest.raises(ValueError, match=r"experts.w2.weight has 48 inputs; fp4_rows needs a mult"):
    parts.plan(abstract(config))


def test_shardings_of_codes_and_scales_cut_whole_blocks():
  mesh = jax.sharding.AbstractMesh((2,), ("half",))
  named = lambda *spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
  unit = lambda spec, whole, own, step: tuple(parts._split(named(*spec), whole, own, step).spec)
  assert unit(("half", None), (64, 96), (2, 3), (32, 32)) == ("half", None)
  # A half of 48 rows is one and a half tiles; 96 inputs are three blocks.
  assert unit(("half", None), (96, 96), (3, 3), (32, 32)) == (None, None)
  assert unit((None, "half"), (64, 96), (2, 3), (32, 32)) == (None, None)
  assert unit((None, "half", None), (8, 6, 64), (8, 6, 2), (1, 32)) == (None, "half", None)
  assert unit((None, "half"), (64, 96), (64, 48), (1, 2)) == (None, "half")
  assert reading_process.split_axis("['runs'][0]['ffn']['experts']['w1']", (1, 6, 32, 64)) == 1
