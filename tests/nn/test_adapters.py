"""Laws of adapters: silent at first, the same as merged weights later, and where they may stand."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deepseek_jax.checkpoint import released
from deepseek_jax.lora import LoraConfig
from deepseek_jax.nn import adapters
from deepseek_jax.nn.layers import Adapter, Linear, plain, remade
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.parameter_paths import path_names

DEFAULT = LoraConfig(rank=3, alpha=6.0)
EXPERTS = LoraConfig(rank=2, patterns=(r"ffn\.experts\.",))
# Every matrix that can carry one: the default ones, compressors, indexers, Engram, experts, head.
ALL = LoraConfig(
    rank=2, alpha=2.0,
    patterns=(
        *DEFAULT.patterns, r"ffn\.experts\.", r"compressor\.w", r"indexer\.w", r"^head",
        r"engram\.wkv",
    ),
)  # fmt: skip


def paths(tree):
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {".".join(path_names(key)): leaf for key, leaf in leaves}


@functools.cache
def adapted(model, lora, seed=0):
  return adapters.adapt(model, lora, rngs=nnx.Rngs(seed))


def trained(model, seed=0):
  """The model with every adapter's A and B random."""
  graph, low_rank, rest = nnx.split(model, nnx.LoRAParam, ...)
  rng = np.random.default_rng(seed)
  draw = lambda a: jnp.asarray(0.3 * rng.standard_normal(a.shape), a.dtype)
  return nnx.merge(graph, jax.tree.map(draw, low_rank), rest)


@pytest.mark.slow
def test_a_new_adapter_changes_no_bit_and_a_trained_one_is_its_merged_weight(tiny):
  base = tiny.model(tiny.short)
  inputs = tiny.inputs([[1] * 12 + [2] * 8 + [0] * 4], config=tiny.short)
  every = adapted(base, dataclasses.replace(ALL, patterns=ALL.patterns[:-1]))
  before = tiny.logits(base, inputs)
  np.testing.assert_array_equal(tiny.logits(every, inputs), before)
  model = trained(every)
  found = tiny.logits(model, inputs)
  merged = tiny.logits(adapters.merge_adapters(model), inputs)
  scale = np.abs(before).max()
  np.testing.assert_allclose(found / scale, merged / scale, atol=1e-5, rtol=0)
  assert np.abs(found - before).max() > 0.1 * scale


def test_a_merged_model_is_one_of_the_bases_kind(tiny):
  base = tiny.model()
  merged = adapters.merge_adapters(trained(adapted(base, ALL)))
  assert nnx.split(merged)[0] == nnx.split(base)[0]
  moved = {
      path for path, leaf in paths(merged).items() if not np.array_equal(leaf, paths(base)[path])
  }
  assert moved == {path for path in paths(base) if any(re.search(p, path) for p in ALL.patterns)}


@pytest.mark.parametrize("groups", [1, 4])
def test_a_grouped_product_is_that_of_its_diagonal_blocks(groups):
  linear = Linear((), 8, 12, rngs=nnx.Rngs(0), dtype=jnp.float32)
  linear.lora = Adapter(8, 2, 12, 0.5, rngs=nnx.Rngs(1))
  linear.lora.lora_b.set_value(jax.random.normal(jax.random.key(2), (2, 12)))
  x = jax.random.normal(jax.random.key(3), (5, groups, 8))
  every = linear(x).reshape(5, groups, groups, -1)
  np.testing.assert_allclose(
      linear.grouped(x), jnp.moveaxis(jnp.diagonal(every, axis1=1, axis2=2), -1, 1), atol=1e-5
  )
  np.testing.assert_allclose(linear(x), x @ linear.dense(jnp.float32).T, atol=1e-5)


def test_an_adapter_is_scaled_and_computes_in_the_dtype_of_its_input():
  adapter = Adapter(4, 2, 6, 2.5, rngs=nnx.Rngs(0))
  adapter.lora_b.set_value(jnp.ones((2, 6)))
  x = jnp.ones((3, 4), jnp.bfloat16)
  assert adapter(x).dtype == jnp.bfloat16
  expected = 2.5 * (np.ones((3, 4)) @ np.asarray(adapter.lora_a[...])).sum(-1, keepdims=True)
  np.testing.assert_allclose(
      adapter(x.astype(jnp.float32)), np.broadcast_to(expected, (3, 6)), rtol=1e-5
  )
  assert adapter.lora_a.dtype == adapter.lora_b.dtype == jnp.float32


def test_paths_and_shapes(tiny):
  base = tiny.model()
  model = adapted(base, LoraConfig(rank=2, patterns=(*DEFAULT.patterns, *EXPERTS.patterns)))
  found, before = paths(model), paths(base)
  new = found.keys() - before.keys()
  assert not before.keys() - found.keys()
  assert new == {path for path in found if adapters.is_adapter(tuple(path.split(".")))}
  shapes = {path: found[path].shape for path in found}
  c = tiny.config
  assert shapes["runs.1.attn.wq_a.lora.lora_a"] == (1, c.hidden_size, 2)
  assert shapes["runs.0.attn.wq_a.lora.lora_b"] == (2, 2, c.q_lora_rank)
  e, f = c.n_routed_experts, c.moe_intermediate_size
  assert shapes["runs.0.ffn.experts.w2.lora.lora_a"] == (2, e, f, 2)
  assert shapes["runs.0.ffn.experts.w2.lora.lora_b"] == (2, e, 2, c.hidden_size)
  kinds = {path.rpartition(".lora.")[0].split(".", 2)[2] for path in new}
  linear = {f"attn.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")}
  assert kinds == linear | {
      f"ffn.{bank}.w{k}" for bank in ("experts", "shared_experts") for k in (1, 2, 3)
  }


def test_every_adapter_draws_its_own_a_and_starts_with_b_zero(tiny):
  model = adapted(tiny.model(), ALL)
  first = []
  for path, leaf in paths(model).items():
    if path.endswith("lora_b"):
      assert not np.any(leaf)
    elif path.endswith("lora_a"):
      first += list(np.asarray(leaf)[..., 0, 0].ravel())
  assert len(set(first)) == len(first) > 100
  other = adapted(tiny.model(), ALL, seed=1)
  same = paths(adapted(tiny.model(), ALL))["runs.0.attn.wkv.lora.lora_a"]
  np.testing.assert_array_equal(same, paths(model)["runs.0.attn.wkv.lora.lora_a"])
  assert not np.array_equal(same, paths(other)["runs.0.attn.wkv.lora.lora_a"])


def test_the_given_model_stays_as_it_is(tiny):
  base = tiny.model()
  graph = nnx.split(base)[0]
  model = trained(adapted(base, DEFAULT))
  assert nnx.split(base)[0] == graph
  changed, before = nnx.split(model)[0], paths(model)
  adapters.merge_adapters(model)
  assert nnx.split(model)[0] == changed != graph
  assert all(leaf is before[path] for path, leaf in paths(model).items())
  assert adapters.adapt(base, None, rngs=nnx.Rngs(0)) is base


def test_shapes_alone(tiny):
  """From inside of `eval_shape`, and from a model that is shapes already."""
  make = lambda: Transformer(tiny.config, tiny.compute, rngs=nnx.Rngs(0))
  inside = nnx.eval_shape(lambda: adapted(make(), ALL))
  outside = adapted(nnx.eval_shape(make), ALL)
  real = adapted(tiny.model(), ALL)
  form = lambda model: {path: (leaf.shape, leaf.dtype) for path, leaf in paths(model).items()}
  assert form(inside) == form(outside) == form(real)
  assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in paths(outside).values())


def test_kernels_that_read_weights_as_they_are_are_told(tiny):
  base = tiny.model()
  dense, bank = adapted(base, DEFAULT), adapted(base, EXPERTS)
  assert [plain(m.runs[0]) for m in (base, dense, bank)] == [True, False, False]
  # Adding a bank's adapters makes weights anew; a product of low rank does not.
  assert [remade(m.runs[0]) for m in (base, dense, bank)] == [False, False, True]


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("wq_c", r"lora.patterns: 'wq_c' matches no parameter; a path is, for example, runs"),
        (r"q_norm", r"'q_norm' matches runs.0.attn.q_norm.weight, which cannot carry an adapter"),
        (r"^embed", r"'\^embed' matches embed.weight, which cannot carry"),
        (r"hc_ffn_fn", r"matches runs.0.hc_ffn_fn, which cannot carry"),
        (r"ffn\.gate", r"matches runs.0.ffn.gate.bias, which cannot carry"),
        (r"engram\.embed", r"matches runs.1.engram.embed.weight, which cannot carry"),
    ],
)  # fmt: skip
def test_patterns_that_name_no_matrix(tiny, pattern, told):
  with pytest.raises(ValueError, match=told):
    adapted(tiny.model(), LoraConfig(patterns=(r"attn\.wq_a", pattern)))


def test_other_bad_input(tiny):
  with pytest.raises(ValueError, match=r"lora.rank is 0; it must be at least 1"):
    LoraConfig(rank=0)
  with pytest.raises(ValueError, match=r"lora.alpha is 0.0; it must be above 0"):
    LoraConfig(alpha=0.0)
  with pytest.raises(ValueError, match=r"lora.patterns is \(\); it must be at least one"):
    LoraConfig(patterns=())
  with pytest.raises(ValueError, match=r"lora.patterns: '\(' is no regular expression"):
    LoraConfig(patterns=("(",))
  model = adapted(tiny.model(), DEFAULT)
  with pytest.raises(ValueError, match="the model has adapters; merge them"):
    adapted(model, DEFAULT)
  with pytest.raises(ValueError, match=r"runs.0.attn.wkv.lora.lora_a is an adapter, which no rele"):
    released.to_released(nnx.split(model)[1], tiny.config)


def test_merging_keeps_the_dtype_of_a_weight(tiny):
  half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), tiny.model())
  model = trained(adapted(half, EXPERTS))
  merged = adapters.merge_adapters(model)
  a, b = model.runs[0].ffn.experts.w1, merged.runs[0].ffn.experts.w1
  assert b.weight.dtype == jnp.bfloat16
  exact = a.weight[...].astype(jnp.float32) + a.lora.delta(jnp.float32)
  np.testing.assert_array_equal(b.weight[...], exact.astype(jnp.bfloat16))
