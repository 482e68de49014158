"""Laws of a base that stays in FP8 and FP4: values of decoded weights, one layer at a time."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deepseek_jax import quantised
from deepseek_jax import tokenizer as tok
from deepseek_jax.checkpoint import engram_constants, released_reader
from deepseek_jax.checkpoint.shards import Shards
from deepseek_jax.config import ComputeConfig, ModelConfig
from deepseek_jax.lora import LoraConfig
from deepseek_jax.model_config import read_released
from deepseek_jax.nn import adapters
from deepseek_jax.nn.layers import Linear, plain, remade, rows_of
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.quantised import Quantised, dequantised
from deepseek_jax.weight_formats import FORMATS

CHECKPOINT = pathlib.Path(__file__).parents[1] / "golden" / "checkpoint_tiny"
CONFIG = read_released(CHECKPOINT / "config.json")
EVERYWHERE = LoraConfig(
    rank=2, patterns=(r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.", r"experts\.", r"engram\.wkv")
)


def drawn(name, *shape):
  """A weight [..., out, in] as stored: random codes and scales near 2^-7."""
  form, rng = FORMATS[name], np.random.default_rng(0)
  codes = rng.integers(0, 256, form.code_shape(shape), np.uint8).view(form.code_dtype)
  # 0x7F and 0xFF are no numbers in E4M3.
  codes = codes & 0x7E if form.per_byte == 1 else codes
  scales = rng.integers(118, 122, form.scale_shape(shape), np.uint8)
  return Quantised(jnp.asarray(codes), jnp.asarray(scales), name)


def linear(weight, *stack):
  made = Linear(stack, *weight.shape[-2:][::-1], rngs=nnx.Rngs(0), dtype=jnp.float32)
  made.weight.set_value(weight)
  return made


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("name", "shape"), [("fp8_tiles", (96, 80)), ("fp4_rows", (48, 64))])
def test_a_product_and_its_gradient_are_those_of_the_decoded_weight(name, shape, dtype):
  weight = drawn(name, *shape)
  stored, dense = linear(weight), linear(weight.dequantise())
  assert np.isfinite(dense.weight[...]).all()
  x = jax.random.normal(jax.random.key(0), (5, 2, shape[1]), dtype)

  @functools.partial(jax.jit, static_argnums=2)
  def run(module, x, how):
    pick = {"call": module, "grouped": module.grouped}[how]
    return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(pick(x).astype(jnp.float32))))(x)

  for how in ("call", "grouped"):
    for a, b in zip(run(stored, x, how), run(dense, x, how)):
      np.testing.assert_array_equal(a, b)
  assert stored.dense(dtype).dtype == stored(x).dtype == dtype


def test_rows_of_a_stored_table():
  rows = jnp.array([[3, 0], [500, 7]])
  table = drawn("fp8_rows", 40, 64)
  expected = rows_of(table.dequantise(), rows)
  np.testing.assert_array_equal(rows_of(table, rows).astype(jnp.float32), expected)
  np.testing.assert_array_equal(expected[1, 0], table.dequantise()[39])


def test_what_reads_weights_as_they_are_is_told():
  module = nnx.List([linear(drawn("fp4_rows", 2, 48, 64), 2)])
  assert not plain(module)
  assert remade(module)


@functools.cache
def loaded(keep=True):
  shapes = nnx.eval_shape(lambda: Transformer(CONFIG, ComputeConfig(), rngs=nnx.Rngs(0)))
  return released_reader.load(Shards(CHECKPOINT), shapes, keep=lambda path: keep).model


def decoded(model):
  graph, state = nnx.split(model)
  return nnx.merge(graph, dequantised(state))


@pytest.fixture(scope="module")
def expected():
  with np.load(CHECKPOINT / "expected" / "expected.npz") as file:
    return dict(file)


@pytest.fixture(scope="module")
def inputs(expected):
  constants = engram_constants.derive(
      CONFIG, tok.ReleasedTokenizer(CHECKPOINT / "tokenizer.json"), "tiny"
  )
  ids = expected["ids"]
  ngrams = np.stack([tok.ngrams(constants.classes[line], constants.pad_class) for line in ids])
  return ids, Rows.single(*ids.shape), ngrams


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def logits(model, inputs):
  return model.logits(model(*inputs).hidden)


@pytest.mark.slow
def test_logits_of_the_released_form(expected, inputs):
  """Parity where weights stay as stored, bitwise equality with the decoded ones."""
  found = logits(loaded(), inputs)
  np.testing.assert_allclose(found, expected["logits_f32"], atol=5e-5, rtol=0)
  np.testing.assert_array_equal(found, logits(decoded(loaded()), inputs))


@pytest.mark.slow
def test_adapters_on_a_stored_base(inputs):
  base = loaded()
  model = adapters.adapt(base, EVERYWHERE, rngs=nnx.Rngs(0))
  before = logits(base, inputs)
  np.testing.assert_array_equal(logits(model, inputs), before)
  graph, low_rank, rest = nnx.split(model, nnx.LoRAParam, ...)
  rng = np.random.default_rng(0)
  low_rank = jax.tree.map(
      lambda a: jnp.asarray(0.05 * rng.standard_normal(a.shape), a.dtype), low_rank
  )
  model = nnx.merge(graph, low_rank, rest)
  merged = adapters.merge_adapters(model)
  found = logits(model, inputs)
  np.testing.assert_allclose(found, logits(merged, inputs), atol=1e-5, rtol=0)
  assert np.abs(found - before).max() > 0.01
  kept = nnx.state(merged)["runs"][1]["attn"]["wkv"]["weight"].get_value()
  assert kept.dtype == jnp.float32


def test_abstract_is_the_form_of_what_is_loaded():
  """Before there is a checkpoint, with every weight kept or with the experts alone."""
  shapes = nnx.split(
      nnx.eval_shape(lambda: Transformer(CONFIG, ComputeConfig(), rngs=nnx.Rngs(0)))
  )[1]
  form = lambda tree: jax.tree.map(lambda a: (a.shape, str(a.dtype)), tree)
  real = nnx.split(loaded())[1]
  found = quantised.abstract(shapes)
  assert jax.tree.structure(found) == jax.tree.structure(real)
  assert jax.tree.leaves(form(found)) == jax.tree.leaves(form(real))
  experts = quantised.abstract(shapes, lambda path: "experts" in path)
  leaves = jax.tree_util.tree_flatten_with_path(experts, is_leaf=quantised.is_quantised)[0]
  kept = {jax.tree_util.keystr(path) for path, leaf in leaves if isinstance(leaf, Quantised)}
  assert kept == {p for p in map(lambda e: jax.tree_util.keystr(e[0]), leaves) if "'experts'" in p}


def deep(layers):
  """Equal window layers whose experts are nearly all of the model, and the source that it needs."""
  return ModelConfig(
      vocab_size=32, hidden_size=128, moe_intermediate_size=256, num_hidden_layers=layers + 1,
      num_attention_heads=1, head_dim=32, qk_rope_head_dim=8, q_lora_rank=32, o_lora_rank=32,
      o_groups=1, n_routed_experts=8, num_experts_per_tok=1, sliding_window=4,
      compress_ratios=(0,) * layers + (1,), kv_source_layer_ids=(layers,),
      index_source_layer_ids=(layers,), index_n_heads=1, index_head_dim=32, index_topk=2,
      hc_mult=1, hc_sinkhorn_iters=1, max_position_embeddings=16,
  )  # fmt: skip


LAYER_BYTES = 4 * 3 * 9 * 128 * 256


@functools.cache
def temporary_bytes(layers, remat, gradient):
  """Of a pass over a stored base, or of the gradient of adapters on it."""
  compute = ComputeConfig(remat=remat)
  model = nnx.eval_shape(lambda: Transformer(deep(layers), compute, rngs=nnx.Rngs(0)))
  graph, state = nnx.split(model)
  model = nnx.merge(graph, quantised.abstract(state))
  model = adapters.adapt(model, LoraConfig(rank=1), rngs=nnx.Rngs(0))
  graph, low_rank, rest = nnx.split(model, nnx.LoRAParam, ...)

  def total(low_rank, rest, tokens):
    model = nnx.merge(graph, low_rank, rest)
    return jnp.sum(jnp.sin(model(tokens, Rows.single(1, 4)).hidden))

  run = jax.grad(total) if gradient else total
  tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
  compiled = jax.jit(run).lower(low_rank, rest, tokens).compile()
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "gradient"), [("none", False), ("none", True)])
def test_a_scanned_run_holds_the_values_of_one_layer(remat, gradient):
  """Six more layers add less than half of one; all eight, the source too, stay under five."""
  eight = temporary_bytes(8, remat, gradient)
  assert eight - temporary_bytes(2, remat, gradient) < 0.5 * LAYER_BYTES
  assert eight < (5 if gradient else 3) * LAYER_BYTES
