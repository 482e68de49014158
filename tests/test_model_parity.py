"""The whole model against the released code: logits, every layer's state, gradients, checkpoint."""

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from flax import nnx

from deepseek_jax import tokenizer
from deepseek_jax.checkpoint import released
from deepseek_jax.config import ComputeConfig, ModelConfig
from deepseek_jax.model_config import read_released
from deepseek_jax.nn.engram import hash_constants, table_rows
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.schedule import Mode
from pallas_kernels.quantize import op

GOLDEN = pathlib.Path(__file__).parent / "golden"
CHECKPOINT = GOLDEN / "checkpoint_tiny"
QUANTIZE = ("main_kv", "index", "window_kv")


def ngrams_of(ids, token_map, pad_token, order=4):
  classes, pad = np.asarray(token_map, np.int32), int(token_map[pad_token])
  return np.stack([tokenizer.ngrams(classes[line], pad, order) for line in ids])


def loaded(config, tensors, quantize=(), dtype="float32"):
  compute = ComputeConfig(quantize=quantize, dtype=dtype)
  blank = nnx.eval_shape(lambda: Transformer(config, compute, rngs=nnx.Rngs(0)))
  return released.load(blank, tensors)


@jax.jit
def forward(model, tokens, rows, ngrams):
  out = model(tokens, rows, ngrams, trace=True)
  return model.logits(out.hidden), out.trace


@jax.jit
def loss_and_gradient(model, tokens, rows, ngrams):
  def loss(model):
    log_p = jax.nn.log_softmax(model.logits(model(tokens, rows, ngrams).hidden)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))

  return jax.value_and_grad(loss)(model)


def close(ours, theirs, limit):
  np.testing.assert_allclose(ours, theirs, atol=limit, rtol=0)


@pytest.fixture(scope="module")
def config():
  return ModelConfig.from_released(
      json.loads((GOLDEN / "model_args.json").read_text())["text_config"]
  )


@pytest.fixture(scope="module")
def weights(golden):
  return {k[2:]: v for k, v in golden("model_f32").items() if k.startswith("w/")}


@pytest.fixture(scope="module")
def inputs(golden):
  file = golden("model_f32")
  ngrams = ngrams_of(file["ids"], file["engram_token_map"], 2)
  return file["ids"], Rows.single(*file["ids"].shape), ngrams


@pytest.fixture(scope="module", params=["model_f32", "model_f32_quant"])
def run(request, golden, config, weights, inputs):
  """Golden file, logits, trace and slack: rounding is discontinuous, hence the looser limits."""
  quantize, slack = (QUANTIZE, 20) if request.param.endswith("quant") else ((), 1)
  logits, trace = forward(loaded(config, weights, quantize), *inputs)
  return golden(request.param), np.asarray(logits), jax.tree.map(np.asarray, trace), slack


def test_logits(run):
  file, logits, _, slack = run
  close(logits, file["logits"], 5e-5 * slack)


def test_streams_and_collapse_coefficients_of_every_layer(run):
  file, _, trace, slack = run
  for i, layer in enumerate(trace):
    close(layer["x_out"], file[f"cap/layer{i}.x_out"], 1e-4 * slack)
    close(layer["pre_out"], file[f"cap/layer{i}.pre_out"], 1e-5 * slack)


def test_window_latents_of_every_layer(run):
  file, _, trace, slack = run
  for i, layer in enumerate(trace):
    close(layer["window_kv"][:, 56:], file[f"cap/layer{i}.window_kv"], 5e-5 * slack)


def test_entries_and_index_keys_of_every_source(run, config):
  file, _, trace, slack = run
  for i in config.kv_source_layer_ids:
    entries = trace[i]["entries"]
    close(entries.kv, file[f"cap/layer{i}.compress_kv"], 5e-5 * slack)
    close(entries.index_keys, file[f"cap/layer{i}.index_k"], 5e-5 * slack)


def test_index_scores(run, config):
  file, _, trace, slack = run
  for i in config.index_source_layer_ids:
    close(trace[i]["index_scores"], file[f"cap/layer{i}.index_scores"], 1e-4 * slack)


def test_selections_and_pools_are_the_same_sets(run, config):
  file, _, trace, _ = run
  for i in range(2, config.num_hidden_layers):
    ours, theirs = (np.sort(x, axis=-1) for x in (trace[i]["topk"], file[f"cap/layer{i}.topk"]))
    np.testing.assert_array_equal(ours, theirs)
  np.testing.assert_array_equal(trace[6]["candidates"], file["cap/layer6.candidates"])


def test_engram_constants_and_hashes(golden, config, inputs):
  file = golden("model_f32")
  for k, constants in enumerate(hash_constants(config)):
    np.testing.assert_array_equal(constants.multipliers, file["engram_multipliers"][k])
    np.testing.assert_array_equal(constants.primes, file["engram_primes"][k])
    np.testing.assert_array_equal(constants.offsets, file["engram_offsets"][k])
    ours = jax.jit(lambda n, c=constants: table_rows(n, c))(inputs[2])
    np.testing.assert_array_equal(ours, file["engram_hash"][:, :, k])


@pytest.fixture(scope="module")
def gradients(golden, config, weights, inputs):
  model = loaded(config, weights)
  loss, grads = loss_and_gradient(model, *inputs)
  return golden("grads_f32"), float(loss), released.to_released(grads, model.config)


@pytest.mark.slow
def test_loss_and_gradient_norm(gradients):
  file, loss, grads = gradients
  assert loss == pytest.approx(float(file["loss"]), abs=2e-6)
  norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in grads.values()))
  assert norm == pytest.approx(float(file["global_norm"]), rel=1e-4)


@pytest.mark.slow
def test_the_gradient_of_every_parameter(gradients):
  file, _, grads = gradients
  theirs = {k[2:]: v for k, v in file.items() if k.startswith("g/")}
  unknown = {k for k in grads.keys() ^ theirs.keys() if not k.endswith("gate.bias_vl")}
  assert not unknown
  for name, expected in theirs.items():
    np.testing.assert_allclose(
        grads[name], expected, atol=1e-3 * np.abs(expected).max() + 1e-6, rtol=0, err_msg=name
    )


@pytest.mark.slow
def test_selection_parameters_get_exact_zeros(gradients):
  _, _, grads = gradients
  hard = [k for k in grads if ".indexer." in k or ".gate.bias" in k]
  assert len([k for k in hard if ".indexer." in k]) == 2 * 5 + 2 * 3
  assert not any(grads[k].any() for k in hard)


def read_shards():
  """Tensors of the checkpoint under released names, in f32; tables keep values and scales apart."""
  raw = {}
  for shard in sorted(CHECKPOINT.glob("*.safetensors")):
    raw |= dict(safetensors.deserialize(shard.read_bytes()))
  kinds = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "I8": np.int8}

  def array(name):
    entry = raw[name]
    return np.frombuffer(entry["data"], kinds.get(entry["dtype"], np.uint8)).reshape(entry["shape"])

  tensors = {}
  for name in raw:
    value, scale = array(name), name.removesuffix("weight") + "scale"
    if name.endswith(".scale"):
      if "engram.embed" in name:
        tensors[name] = np.exp2(value.astype(np.float32) - 127)
    elif "engram.embed" in name:
      tensors[name] = value.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    elif raw[name]["dtype"] == "F8_E4M3":
      tensors[name] = np.asarray(op.dequantize_tiles(jnp.asarray(value), jnp.asarray(array(scale))))
    elif raw[name]["dtype"] == "I8":
      tensors[name] = np.asarray(op.dequantize_rows(jnp.asarray(value), jnp.asarray(array(scale))))
    else:
      tensors[name] = value.astype(np.float32)
  return tensors


@pytest.fixture(scope="module")
def expected():
  with np.load(CHECKPOINT / "expected" / "expected.npz") as file:
    return dict(file)


@pytest.fixture(scope="module")
def tensors():
  return read_shards()


def checkpoint_run(expected, tensors, quantize, dtype="float32"):
  config = read_released(CHECKPOINT / "config.json")
  ngrams = ngrams_of(expected["ids"], expected["token_map"], config.engram_pad_token_id)
  rows = Rows.single(*expected["ids"].shape)
  return forward(loaded(config, tensors, quantize, dtype), expected["ids"], rows, ngrams)


def test_weights_of_the_checkpoint(expected, tensors):
  for name in (k for k in expected if k.startswith("deq/") and "engram" not in k):
    np.testing.assert_array_equal(tensors[name.removeprefix("deq/")], expected[name])
  table = "layers.1.engram.embed."
  first = tensors[table + "weight"][:16] * np.repeat(tensors[table + "scale"][:16], 32, -1)
  np.testing.assert_array_equal(first, expected[f"deq/{table}weight_first16rows"])


def test_checkpoint_logits_and_streams_without_rounding(expected, tensors):
  logits, trace = checkpoint_run(expected, tensors, ())
  close(logits, expected["logits_f32"], 5e-5)
  for i in (0, 1, 7):
    close(trace[i]["x_out"], expected[f"f32_layer{i}.x_out"], 1e-4)


@pytest.mark.slow
def test_checkpoint_logits_with_rounded_caches(expected, tensors):
  logits, _ = checkpoint_run(expected, tensors, QUANTIZE)
  close(logits, expected["logits_f32_kvquant"], 1e-3)


@pytest.mark.slow
def test_checkpoint_logits_in_bf16(expected, tensors):
  """Experts and entries flip, so only the distribution over positions is bounded."""
  logits, trace = checkpoint_run(expected, tensors, QUANTIZE, "bfloat16")
  assert trace[0]["x_out"].dtype == jnp.bfloat16
  assert logits.dtype == jnp.float32
  for name in ("logits_bf16_kvquant", "logits_f32_kvquant"):
    theirs = expected[name]
    error = np.sqrt(np.mean((logits - theirs) ** 2, axis=-1) / np.mean(theirs**2, axis=-1))
    assert np.median(error) < 0.1
    assert np.mean(np.argmax(logits, -1) == np.argmax(theirs, -1)) > 0.8


def test_checkpoint_schedule():
  config = read_released(CHECKPOINT / "config.json")
  blank = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  census = {Mode.WINDOW: 2, Mode.FULL: 2, Mode.REINDEX: 1, Mode.REUSE: 3}
  assert blank.schedule.census == census
