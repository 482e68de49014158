"""Results do not depend on the mesh: logits, selections, gradients, losses of 1 and 8 devices."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from deepseek_jax import sharding
from deepseek_jax.checkpoint.training import names_of
from deepseek_jax.config import ComputeConfig, Config, MeshConfig, ModelConfig, TrainConfig
from deepseek_jax.nn.engram import allocated_rows
from deepseek_jax.nn.rows import Rows
from deepseek_jax.train import step
from deepseek_jax.train.data import Batch

T, V, LINES = 64, 40, 8

# Every mode in both stacks. On 8 devices along seq a window of 12 reaches over two of them.
MODEL = ModelConfig(
    vocab_size=V, hidden_size=64, moe_intermediate_size=16, num_hidden_layers=5,
    num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_lora_rank=32,
    o_groups=1, n_routed_experts=16, num_experts_per_tok=3, sliding_window=12,
    compress_ratios=(0, 2, 1, 1, 1), kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2, 3), index_n_heads=8, index_head_dim=32, index_topk=4,
    candidate_source_layer_id=2, candidate_topk_blocks=3, candidate_block_size=4, hc_mult=2,
    hc_sinkhorn_iters=2, max_position_embeddings=64, engram_layer_ids=(1,),
    engram_num_embeddings=(348,), engram_max_ngram_size=3, engram_vocab_size=75, engram_n_heads=2,
    engram_head_dim=32, engram_compressed_vocab_size=V,
)  # fmt: skip
TRAIN = TrainConfig(
    steps=20, batch_size=LINES, seq_len=T, learning_rate=1e-4, schedule="constant",
    warmup_steps=0, index_loss="sparse",
)  # fmt: skip

# data, fsdp, expert, seq
MESHES = [(8, 1, 1, 1), (1, 2, 4, 1), (1, 1, 8, 1), (1, 1, 2, 4)]


def meshes(*more):
  return pytest.mark.parametrize("sizes", [*MESHES, *more], ids=lambda s: "x".join(map(str, s)))


def experiment(sizes=(1, 1, 1, 1), **compute):
  return Config(model=MODEL, train=TRAIN, mesh=MeshConfig(*sizes), compute=ComputeConfig(**compute))


def make_batch(seed=0, micro=1):
  """Packed documents of any length, so that edges of devices fall inside and between them."""
  rng = np.random.default_rng(seed)
  shape = (micro, LINES, T)
  cuts = rng.random(shape) < 0.06
  segments = 1 + np.cumsum(cuts, axis=-1).astype(np.int32)
  segments[:, ::3, T - 9 :] = 0
  valid = segments > 0
  tokens = np.where(valid, rng.integers(3, V, shape), 2).astype(np.int32)
  targets = np.where(valid, rng.integers(3, V, shape), 2).astype(np.int32)
  weights = (valid & (rng.random(shape) < 0.7)).astype(np.float32)
  rows = Rows.of_segments(segments)
  at = np.arange(T)[:, None] - np.arange(3)
  grams = np.where(np.arange(3) <= rows.positions[..., None], tokens[..., np.maximum(at, 0)], 2)
  grams[..., 0] = np.where(valid, grams[..., 0], -1)
  return Batch(tokens, rows, grams.astype(np.int32), targets, weights)


def spread(tree, spec, mesh):
  return jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, spec)), tree)


@functools.cache
def alone():
  """Gradient and losses of 20 steps on one device."""
  config = experiment()
  graphdef, _ = step.abstract_model(config)
  state = step.init_state(config)
  found = jax.jit(step.make_gradient(graphdef, config))(state.params, make_batch())
  train, losses = step.make_step(graphdef, config), []
  for seed in range(20):
    state, metrics = train(state, make_batch(seed))
    losses.append(float(metrics.loss))
  return found, losses


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "spread_dense"), [((2, 2, 1, 2), True), ((1, 2, 4, 1), False)])
def test_gradients(sizes, spread_dense):
  config = experiment(sizes, spread_dense=spread_dense)
  mesh = sharding.make_mesh(config.mesh)
  graphdef, _ = step.abstract_model(config)
  params = step.init_state(config, mesh).params
  batch = spread(make_batch(), sharding.batch_spec(1), mesh)
  program = jax.jit(step.make_gradient(graphdef, config, mesh)).lower(params, batch).compile()
  found, expected = program(params, batch), alone()[0]
  np.testing.assert_array_equal(found.load, expected.load)
  for a, b in zip(found.sums, expected.sums):
    np.testing.assert_allclose(a, b, rtol=1e-5)
  whole = names_of(expected.grads)
  for name, value in names_of(found.grads).items():
    scale = np.abs(whole[name]).max() + 1e-3
    assert np.abs(np.asarray(value) - whole[name]).max() <= 2e-5 * scale, name

  gathered = shapes_of_collectives(program.as_text())
  e, f, d = MODEL.n_routed_experts, MODEL.moe_intermediate_size, MODEL.hidden_size
  share = e // (sizes[2] * sizes[3])
  assert sizes[1] == 1 or {(share, f, d), (share, d, f)} & gathered  # over fsdp alone
  whole_banks_and_table = {(e, f, d), (e, d, f), (allocated_rows(348), MODEL.engram_head_dim)}
  assert not whole_banks_and_table & gathered


def shapes_of_collectives(text):
  """Of what devices gather or add up, without leading axes of 1."""
  found = set()
  for types in re.findall(r" = (.*?) all-(?:gather|reduce)(?:-start)?\(", text):
    for dims in re.findall(r"\w+\[([\d,]+)\]", types):
      sizes = [int(n) for n in dims.split(",")]
      found.add(tuple(itertools.dropwhile(lambda n: n == 1, sizes)))
  return found


@pytest.mark.slow
@meshes()
def test_losses_of_20_steps(sizes):
  config = experiment(sizes)
  mesh = sharding.make_mesh(config.mesh)
  graphdef, _ = step.abstract_model(config)
  state = step.init_state(config, mesh)
  where = jax.tree.map(lambda a: a.sharding, state)
  train, losses = step.make_step(graphdef, config, mesh), alone()[1]
  for seed in range(20):
    batch = spread(make_batch(seed), sharding.batch_spec(1), mesh)
    state, metrics = train(state, batch)
    assert abs(float(metrics.loss) - losses[seed]) <= 1e-5, seed
  # What a step returns lies where its argument lay: it is donated.
  same = lambda a, s: a.sharding.is_equivalent_to(s, a.ndim)
  assert jax.tree.all(jax.tree.map(same, state, where))


@functools.cache
def traced(sizes):
  """Logits and the Top-K slots of every selecting layer, on a mesh."""
  config = experiment(sizes)
  graphdef, _ = step.abstract_model(config)
  params, batch = step.init_state(config).params, jax.tree.map(lambda a: a[0], make_batch(3))

  def forward(params, batch):
    model = nnx.merge(graphdef, params).with_whole_ends()
    out = model(batch.tokens, batch.rows, batch.ngrams, trace=True)
    slots = [layer["topk"] for layer in out.trace if "topk" in layer]
    return model.logits(out.hidden), slots

  if config.mesh.devices == 1:
    return jax.device_get(jax.jit(forward)(params, batch))
  mesh, spec = sharding.make_mesh(config.mesh), sharding.batch_spec()
  specs = sharding.parameter_specs(params, mesh)
  params = jax.device_put(params, sharding.placed(specs, mesh))
  fn = jax.shard_map(forward, mesh=mesh, in_specs=(specs, spec), out_specs=spec, check_vma=False)
  return jax.device_get(jax.jit(fn)(params, spread(batch, spec, mesh)))


@pytest.mark.slow
@meshes((1, 1, 1, 8))
def test_logits_and_selections(sizes):
  logits, slots = traced(sizes)
  expected, chosen = traced((1, 1, 1, 1))
  valid = make_batch(3).rows.segments[0] > 0
  assert np.abs(logits - expected)[valid].max() <= 1e-5
  assert len(slots) == 4
  for a, b in zip(slots, chosen):
    np.testing.assert_array_equal(np.sort(a)[valid], np.sort(b)[valid])


@pytest.mark.parametrize(
    ("sizes", "length", "told"),
    [
        ((1, 1, 32, 1), T, r"mesh.expert × mesh.seq is 32; it must be a divisor of .* \(16\)"),
        ((1, 1, 1, 16), T + 16, r"train.seq_len is 80; .* mesh.seq × the largest ratio \(32\)"),
        ((3, 1, 1, 1), T, r"train.batch_size is 8; it must be a multiple of .* \(3\)"),
        ((0, 1, 1, 1), T, "mesh.data is 0; it must be at least 1"),
    ],
)
def test_meshes_that_do_not_divide_are_refused_by_name(sizes, length, told):
  train = dataclasses.replace(TRAIN, seq_len=length)
  with pytest.raises(ValueError, match=told):
    Config(model=MODEL, train=train, mesh=MeshConfig(*sizes))


def test_a_mesh_needs_its_devices():
  with pytest.raises(ValueError, match="mesh is data 2 × fsdp 1 × expert 2 × seq 1 = 4; .* 8"):
    sharding.make_mesh(MeshConfig(2, 1, 2, 1))


def test_a_weight_that_the_mesh_does_not_divide_is_named():
  mesh = sharding.make_mesh(MeshConfig(1, 8, 1, 1))
  shapes = {"embed": {"weight": jax.ShapeDtypeStruct((40, 12), jnp.float32)}}
  with pytest.raises(ValueError, match="embed.weight has shape .40, 12.; axis -1 .* = 8"):
    sharding.parameter_specs(shapes, mesh)


def test_every_matrix_of_the_model_is_spread():
  """No matrix falls through to the last rule, which repeats what it finds."""
  _, shapes = step.abstract_model(experiment())
  mesh = sharding.make_mesh(MeshConfig(1, 2, 4, 1))
  placed = names_of(sharding.placed(sharding.parameter_specs(shapes, mesh), mesh))
  for name, leaf in names_of(shapes).items():
    vectors = leaf.ndim < 3 and name.startswith("runs") or "norm" in name or "_weight" in name
    assert vectors == placed[name].is_fully_replicated, name
