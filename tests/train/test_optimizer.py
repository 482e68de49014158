"""Laws of the optimiser: which rule a parameter follows, and what may move what."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from deepseek_jax.parameter_paths import path_names
from deepseek_jax.train import optimizer as opt

V, D, N, H, L, R, O, I, J, E, F, M = 11, 8, 4, 6, 5, 3, 2, 3, 7, 3, 5, 4
ROWS, HD, COLS = 9, 4, 3

BLOCK = {
    "attn.attn_sink": (N,), "attn.wq_a.weight": (L, D), "attn.q_norm.weight": (L,),
    "attn.wq_b.weight": (N * H, L), "attn.wkv.weight": (H, D), "attn.kv_norm.weight": (H,),
    "attn.wo_a.weight": (O * R, N * H // O), "attn.wo_b.weight": (D, O * R),
    "attn.compressor.wkv.weight": (H, D), "attn.compressor.wgate.weight": (H, D),
    "attn.compressor.norm.weight": (H,), "attn.indexer.wq_b.weight": (I * J, L),
    "attn.indexer.weights_proj.weight": (I, D), "attn.indexer.wk.weight": (J, H),
    "attn.indexer.k_norm.weight": (J,), "attn_norm.weight": (D,), "ffn_norm.weight": (D,),
    "ffn.gate.weight": (E, D), "ffn.gate.bias": (E,), "ffn.gate.bias_vl": (E,),
    "ffn.experts.w1.weight": (E, F, D), "ffn.experts.w2.weight": (E, D, F),
    "ffn.experts.w3.weight": (E, F, D), "ffn.shared_experts.w1.weight": (F, D),
    "ffn.shared_experts.w2.weight": (D, F), "ffn.shared_experts.w3.weight": (F, D),
    "hc_attn_fn": ((2 + M) * M, M * D), "hc_attn_base": ((2 + M) * M,), "hc_attn_scale": (3,),
    "hc_ffn_fn": ((2 + M) * M, M * D), "hc_ffn_base": ((2 + M) * M,), "hc_ffn_scale": (3,),
    "engram.embed.weight": (ROWS, HD), "engram.wkv.weight": ((M + 1) * D, COLS * HD),
    "engram.q_weight": (M, D), "engram.k_weight": (M, D),
}  # fmt: skip
SHAPES = {"embed.weight": (V, D), "head.weight": (V, D), "norm.weight": (D,)}
SHAPES |= {f"runs.0.{name}": (2, *shape) for name, shape in BLOCK.items()}
SPLIT = {"attn.wq_b.weight": N, "attn.indexer.wq_b.weight": I, "attn.wo_a.weight": O}

MUON = [n for n in SHAPES if opt.label(tuple(n.split(".")), np.zeros(SHAPES[n])) == "muon"]
ADAMW = [n for n in SHAPES if opt.label(tuple(n.split(".")), np.zeros(SHAPES[n])) == "adamw"]
SINKHORN = ["embed.weight", "head.weight", "runs.0.engram.embed.weight"]
ROUTER = ["runs.0.ffn.gate.bias", "runs.0.ffn.gate.bias_vl"]
NO_DECAY = [n for n in SHAPES if re.search(r"attn_sink|_base|_scale", n)]


def nest(flat):
  tree = {}
  for name, leaf in flat.items():
    *parents, last = name.split(".")
    functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[last] = leaf
  return tree


def flatten(tree):
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {".".join(path_names(key)): np.array(leaf) for key, leaf in leaves}


def random_tree(seed, scale=1.0, names=tuple(SHAPES)):
  rng = np.random.default_rng(seed)
  return nest({n: jnp.asarray(scale * rng.normal(size=SHAPES[n]), jnp.float32) for n in names})


def matrices(name, x):
  """The matrices that Muon may not mix, [count, rows, columns]."""
  split = SPLIT.get(name.removeprefix("runs.0."), 1)
  return x.reshape(-1, x.shape[-2] // split, x.shape[-1])


# At least one parameter of every rule's group, with and without Engram; compiles quickly.
FEW = (
    "embed.weight", "norm.weight", "runs.0.attn.attn_sink", "runs.0.attn.wq_b.weight", *ROUTER,
    "runs.0.engram.embed.weight", "runs.0.engram.wkv.weight", "runs.0.engram.q_weight",
)  # fmt: skip
PARAMS = random_tree(0)
FEW_PARAMS = random_tree(0, names=FEW)
few = functools.partial(random_tree, names=FEW)


# Compiles in less than half the time.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def optimizer(whole, **options):
  params = PARAMS if whole else FEW_PARAMS
  tx = opt.make_optimizer(params, **({"learning_rate": 1.0, "clip_norm": None} | options))
  return tx, quick_jit(tx.update), params


def updates(*gradients, **options):
  """Flat updates of the last of several steps at fixed parameters."""
  whole = len(jax.tree.leaves(gradients[0])) == len(SHAPES)
  tx, update, params = optimizer(whole, **options)
  state = tx.init(params)
  for gradient in gradients:
    result, state = update(gradient, state, params)
  return flatten(result)


PLAIN = {"weight_decay": 0.0, "engram_lr_scale": 1.0}


def rms(x, axis=None):
  return np.sqrt(np.mean(np.square(x), axis=axis))


def test_every_parameter_has_exactly_one_rule():
  for name in (name.removeprefix("runs.0.") for name in SHAPES):
    assert sum(bool(re.fullmatch(rule.pattern, name)) for rule in opt.RULES) == 1, name
  groups = {".".join(path): group for path, group in opt.parameter_groups(PARAMS).items()}
  assert set(groups) == set(SHAPES)
  for kind, names in dict(sinkhorn=SINKHORN, router_bias=ROUTER, adamw_no_decay=NO_DECAY).items():
    assert {n for n, g in groups.items() if g == kind} == set(names)
  assert {n for n, g in groups.items() if g == "adamw"} == {
      n for n in SHAPES if re.search(r"norm\.weight|hc_.*_fn|engram\.[qk]_weight", n)
  }


def test_every_rule_has_a_parameter():
  names = [name.removeprefix("runs.0.") for name in SHAPES]
  names += ["attn.wq_a.lora.lora_a", "attn.wq_a.weight.value.codes"]
  for rule in opt.RULES:
    assert any(re.fullmatch(rule.pattern, name) for name in names), rule.pattern


def test_unknown_parameters_and_patterns_are_named():
  with pytest.raises(ValueError, match=r"runs\.0\.attn\.wq_c\.weight"):
    opt.label(("runs", "0", "attn", "wq_c", "weight"), np.zeros((2, 2)))
  with pytest.raises(ValueError, match=r"ffn\.gate\.weight.*\(3,\)"):
    opt.label(("ffn", "gate", "weight"), np.zeros(3))
  with pytest.raises(ValueError, match=r"'vision\\\\\.' matches no parameter"):
    opt.make_optimizer(PARAMS, learning_rate=1.0, clip_norm=None, frozen=(r"vision\.",))
  with pytest.raises(ValueError, match=r"'\(' is no regular expression"):
    opt.make_optimizer(PARAMS, learning_rate=1.0, clip_norm=None, frozen=("(",))
  orphan = {"runs": [{"attn": {"wq_b": {"weight": np.zeros((1, 8, 4))}}}]}
  with pytest.raises(ValueError, match=r"runs\.0\.attn\.attn_sink"):
    opt.make_optimizer(orphan, learning_rate=1.0, clip_norm=None)
  uneven = {"attn": {"wq_b": {"weight": np.zeros((8, 4))}, "attn_sink": np.zeros(3)}}
  with pytest.raises(ValueError, match="8 rows; they do not divide into 3 heads"):
    opt.make_optimizer(uneven, learning_rate=1.0, clip_norm=None)


@pytest.mark.parametrize(
    "bad", [{"learning_rate": -1.0}, {"clip_norm": 0.0}, {"weight_decay": -0.1},
            {"engram_lr_scale": 0.0}]
)  # fmt: skip
def test_numbers_out_of_range_are_refused(bad):
  with pytest.raises(ValueError, match=next(iter(bad))):
    opt.make_optimizer(PARAMS, **({"learning_rate": 1.0, "clip_norm": 1.0} | bad))


def test_muon_is_the_polar_factor_of_the_nesterov_momentum_of_each_matrix():
  g1, g2 = random_tree(1), random_tree(2)
  got = updates(g1, g2, **PLAIN)
  g1, g2 = flatten(g1), flatten(g2)
  assert len(MUON) == 18
  for name in MUON:
    direction = matrices(name, 0.95 * (0.95 * g1[name] + g2[name]) + g2[name])
    left, _, right = np.linalg.svd(direction, full_matrices=False)
    scale = 0.18 * np.sqrt(max(direction.shape[-2:]))
    ours = matrices(name, got[name])
    np.testing.assert_allclose(ours, -scale * left @ right, atol=0.03 * scale, err_msg=name)
    np.testing.assert_allclose(rms(ours, (-2, -1)), 0.18, rtol=0.01)


@pytest.mark.parametrize("name", MUON)
def test_the_gradient_of_one_matrix_moves_only_that_matrix(name):
  gradient = random_tree(4)
  before = matrices(name, updates(gradient, **PLAIN)[name])
  flat = flatten(gradient)
  changed = matrices(name, flat[name].copy())
  changed[1] = np.random.default_rng(5).normal(size=changed[1].shape)
  flat[name] = changed.reshape(flat[name].shape)
  after = matrices(name, updates(nest(flat), **PLAIN)[name])
  np.testing.assert_array_equal(np.delete(after, 1, 0), np.delete(before, 1, 0))
  assert rms(after[1] - before[1]) > 0.05


def test_updates_do_not_depend_on_the_scale_of_the_gradient():
  gradient = random_tree(6)
  small = jax.tree.map(lambda g: 1e-5 * g, gradient)
  large, small = updates(gradient, **PLAIN), updates(small, **PLAIN)
  for name in MUON + SINKHORN:
    np.testing.assert_allclose(small[name], large[name], atol=1e-3, err_msg=name)


def test_balanced_tables_have_the_update_rms_of_muon():
  got = updates(few(10))
  for name in ("embed.weight", "runs.0.engram.embed.weight"):
    scale = 5.0 if "engram" in name else 1.0
    np.testing.assert_allclose(rms(got[name], -1), 0.18 * scale, rtol=1e-5)


def test_a_table_row_without_gradient_keeps_its_value():
  gradient = flatten(few(11))
  gradient["embed.weight"][3] = 0.0
  got = updates(nest(gradient))["embed.weight"]
  np.testing.assert_array_equal(got[3], 0.0)
  np.testing.assert_allclose(rms(np.delete(got, 3, 0), -1), 0.18, rtol=1e-5)


def test_adam_starts_with_the_sign_and_ends_bias_corrected():
  g1, g2 = random_tree(12), random_tree(13)
  got = updates(g1, g2, **PLAIN)
  g1, g2 = flatten(g1), flatten(g2)
  for name in ADAMW + NO_DECAY:
    mean = (0.9 * 0.1 * g1[name] + 0.1 * g2[name]) / (1 - 0.9**2)
    square = (0.95 * 0.05 * g1[name] ** 2 + 0.05 * g2[name] ** 2) / (1 - 0.95**2)
    np.testing.assert_allclose(got[name], -mean / np.sqrt(square), rtol=1e-4, atol=1e-6)


def test_zero_gradients_leave_only_decay():
  zero = jax.tree.map(jnp.zeros_like, FEW_PARAMS)
  got = updates(zero, zero)
  for name, p in flatten(FEW_PARAMS).items():
    decay = 0.1 * (5.0 if "engram" in name else 1.0) if name in MUON + ADAMW else 0.0
    np.testing.assert_allclose(got[name], -decay * p, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("size", [1e-6, 1e-12, 1e-19, 1e-21, 1e-23, 1e-38])
def test_tiny_gradients_stay_bounded(size):
  got = updates(random_tree(14, size), **PLAIN)
  for name in MUON + SINKHORN:
    assert np.all(np.abs(got[name]) < 2), name


def test_engram_learns_five_times_faster():
  gradient = few(15)
  fast, slow = updates(gradient), updates(gradient, engram_lr_scale=1.0)
  for name in FEW:
    factor = 5.0 if "engram" in name else 1.0
    np.testing.assert_allclose(fast[name], factor * slow[name], rtol=1e-6, err_msg=name)


def test_clipping_hides_the_length_of_a_long_gradient():
  g1, g2 = few(16, 10.0), few(17, 1e-3)
  longer = jax.tree.map(lambda g: 1000 * g, g1)
  clipped = updates(g1, g2, clip_norm=1.0)
  for name, u in updates(longer, g2, clip_norm=1.0).items():
    np.testing.assert_allclose(u, clipped[name], atol=2e-3, err_msg=name)
  unclipped = updates(longer, g2)
  assert rms(unclipped["norm.weight"] - clipped["norm.weight"]) > 0.01


def test_untrained_gradients_do_not_count_in_the_norm():
  g1, g2 = few(18), few(19, 1e-2)
  flat = flatten(g1)
  for name in [*ROUTER, "norm.weight"]:
    flat[name] = flat[name] * 1e9
  options = {"clip_norm": 1.0, "frozen": (r"^norm\.",)}
  got, expected = updates(nest(flat), g2, **options), updates(g1, g2, **options)
  for name in FEW:
    np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def test_frozen_parameters_are_untouched_bitwise_and_have_no_state():
  tx, update, start = optimizer(False, frozen=(r"runs\.0\.attn\.", r"^embed"))
  state, params = tx.init(start), start
  for seed in (20, 21):
    result, state = update(few(seed), state, params)
    params = optax.apply_updates(params, result)
  before, after = flatten(start), flatten(params)
  frozen = {n for n in FEW if n.startswith(("runs.0.attn.", "embed"))}
  for name in FEW:
    same = np.array_equal(before[name], after[name])
    assert same == (name in frozen or name in ROUTER), name
  held = sum(x.size for x in jax.tree.leaves(state))
  trained = set(FEW) - frozen - set(ROUTER)
  moments = {n: 2 if n in ADAMW + NO_DECAY else 1 for n in trained}
  counters = held - sum(moments[n] * np.prod(SHAPES[n]) for n in trained)
  assert counters <= 5


def test_router_bias_moves_against_the_load_and_only_by_its_own_rule():
  tx, update, initial = optimizer(False, clip_norm=1.0)
  state, params = tx.init(initial), initial
  load = jnp.asarray([[90, 5, 1], [700, 700, 700]], jnp.int32)
  start = np.asarray(params["runs"]["0"]["ffn"]["gate"]["bias"])
  bias = jnp.asarray(start)
  for step in range(100):
    if step < 2:
      result, state = update(few(step), state, params)
      params = optax.apply_updates(params, result)
      for name in ROUTER:
        np.testing.assert_array_equal(flatten(params)[name], flatten(initial)[name])
    previous, bias = bias, opt.router_bias_update(bias, load, 0.001)
    np.testing.assert_allclose(bias - previous, [[-1e-3, 1e-3, 1e-3], [0, 0, 0]], atol=3e-7)
  np.testing.assert_allclose(bias - start, [[-0.1, 0.1, 0.1], [0, 0, 0]], atol=1e-5)
  np.testing.assert_array_equal(opt.router_bias_update(bias, 0 * load, 0.001), bias)


def test_router_bias_refuses_other_shapes():
  with pytest.raises(ValueError, match=r"load has shape \(3,\)"):
    opt.router_bias_update(jnp.zeros((2, 3)), jnp.zeros(3), 0.001)
  with pytest.raises(ValueError, match="speed"):
    opt.router_bias_update(jnp.zeros(3), jnp.zeros(3), 0.0)


def test_a_schedule_drives_every_group():
  def schedule(step):
    return jnp.where(step == 0, 0.0, 0.5)

  gradient = few(22)
  first = updates(gradient, learning_rate=schedule)
  second = updates(gradient, gradient, learning_rate=schedule)
  whole = updates(gradient, gradient)
  for name in FEW:
    np.testing.assert_array_equal(first[name], 0.0)
    np.testing.assert_allclose(second[name], 0.5 * whole[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("jit_init", [False, True])
def test_state_and_parameters_can_be_donated(jit_init):
  tx, _, params = optimizer(False, clip_norm=1.0)
  params = jax.tree.map(jnp.copy, params)
  state = (quick_jit(tx.init) if jit_init else tx.init)(params)

  @functools.partial(quick_jit, donate_argnums=(0, 1))
  def step(params, state, gradient):
    result, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, result), state

  for seed in (23, 24):
    given = jax.tree.leaves((params, state))
    params, state = step(params, state, few(seed))
    assert all(x.is_deleted() for x in given)
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((params, state)))


class Linear(nnx.Module):

  def __init__(self, weight):
    self.weight = nnx.Param(weight)


class Attention(nnx.Module):

  def __init__(self, dtype):
    self.wq_b = Linear(jnp.ones((1, 8, 4), dtype))
    self.attn_sink = nnx.Param(jnp.ones((1, 2), dtype))


class Block(nnx.Module):

  def __init__(self, dtype):
    self.attn = Attention(dtype)


class Model(nnx.Module):

  def __init__(self, dtype=jnp.float32):
    self.embed = Linear(jnp.ones((6, 4), dtype))
    self.norm = Linear(jnp.ones(4, dtype))
    self.runs = nnx.List([Block(dtype)])


def strict_update(tree):
  gradient = jax.tree.map(
      lambda p: jax.random.normal(jax.random.key(p.size), p.shape, p.dtype), tree
  )
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    tx = opt.make_optimizer(tree, learning_rate=0.1, clip_norm=1.0, frozen=("norm",))
    state = quick_jit(tx.init)(tree)
    result, state = quick_jit(tx.update)(gradient, state, tree)
    optax.apply_updates(tree, result)
  assert jax.tree.structure(result) == jax.tree.structure(tree)
  assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("f4"), jnp.dtype("i4")}
  return result


def test_nnx_state_split_module_and_dictionary_agree_under_strict_promotion():
  model = Model()
  state = nnx.state(model, nnx.Param)
  expected = flatten(strict_update(nnx.to_pure_dict(state)))
  assert set(expected) == {
      "embed.weight",
      "norm.weight",
      "runs.0.attn.wq_b.weight",
      "runs.0.attn.attn_sink",
  }
  for tree in (state, nnx.split(model, nnx.Param)[1], model):
    for name, u in flatten(strict_update(tree)).items():
      np.testing.assert_array_equal(u, expected[name])


def test_bfloat16_parameters_get_bfloat16_updates_from_f32_state():
  result = strict_update(nnx.state(Model(jnp.bfloat16), nnx.Param))
  assert all(u.dtype == jnp.bfloat16 for u in jax.tree.leaves(result))


def test_shapes_alone_build_the_optimizer():
  abstract = jax.eval_shape(lambda: PARAMS)
  tx = opt.make_optimizer(abstract, learning_rate=1.0, clip_norm=1.0)
  state = jax.eval_shape(tx.init, abstract)
  assert (
      len(jax.tree.leaves(state))
      == len(MUON) + len(SINKHORN) + 2 * (len(ADAMW) + len(NO_DECAY)) + 2
  )
