"""Runs that start from a checkpoint, on one device and on a mesh: what moves and what is saved."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deepseek_jax import sharding
from deepseek_jax.checkpoint import released_import
from deepseek_jax.checkpoint.stored_checkpoint import load_model
from deepseek_jax.checkpoint.training import Checkpoints, names_of
from deepseek_jax.config import (
    ComputeConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from deepseek_jax.lora import LoraConfig
from deepseek_jax.model_config import read_released
from deepseek_jax.nn.rows import Rows
from deepseek_jax.train import loop, step
from deepseek_jax.train.data import Batch

pytestmark = pytest.mark.slow

CHECKPOINT = pathlib.Path(__file__).parents[1] / "golden" / "checkpoint_tiny"
MODEL = ModelConfig(
    vocab_size=264, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=3,
    num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_lora_rank=16,
    o_groups=1, n_routed_experts=4, num_experts_per_tok=2, sliding_window=8,
    compress_ratios=(0, 0, 1), kv_source_layer_ids=(2,), index_source_layer_ids=(2,),
    index_n_heads=2, index_head_dim=32, index_topk=4, hc_mult=2, hc_sinkhorn_iters=2,
    max_position_embeddings=64,
)  # fmt: skip
TRAIN = TrainConfig(
    steps=4, batch_size=8, seq_len=32, learning_rate=1e-3, schedule="constant", warmup_steps=0,
    checkpoint_every=2, eval_every=4, sample_tokens=2, sample_prompt="Hi",
)  # fmt: skip


@pytest.fixture(scope="module")
def config(talk, tmp_path_factory):
  """A run with adapters that starts from the checkpoint of another."""
  folder = tmp_path_factory.mktemp("base")
  base = Config(model=MODEL, train=TRAIN, data=DataConfig(source=str(talk)))
  loop.run(dataclasses.replace(base, train=dataclasses.replace(TRAIN, steps=1)), folder / "run")
  train = dataclasses.replace(TRAIN, init=str(folder / "run"))
  return dataclasses.replace(base, train=train, lora=LoraConfig(rank=2))


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("lora") / "run"
  loop.run(config, workdir, profile=1)
  return workdir


def losses(workdir):
  return [json.loads(line)["loss"] for line in (workdir / "metrics.jsonl").open()]


def arrays(workdir):
  checkpoints = Checkpoints(workdir / "checkpoints")
  record = checkpoints._record(checkpoints.steps()[-1])
  checkpoints.close()
  return record["arrays"]


def test_a_checkpoint_holds_what_the_run_changed_and_nothing_of_the_base(trained):
  saved = {name for name in arrays(trained) if name.startswith("params.")}
  assert any(name.endswith("attn.wq_a.lora.lora_a") for name in saved)
  assert all(".lora." in name or ".ffn.gate.bias" in name for name in saved)


def test_a_trace_was_written_on_request(trained):
  assert list((trained / "profile").rglob("*.xplane.pb"))


def test_the_model_of_the_run_is_base_and_adapters(config, trained):
  _, model, done = load_model(trained)
  _, base, _ = load_model(config.train.init)
  assert done == 4
  state, before = names_of(nnx.state(model)), names_of(nnx.state(base))
  for name, value in before.items():
    if ".gate.bias" not in name:
      np.testing.assert_array_equal(value, state[name])
  tokens = jnp.arange(16)[None] + 3
  logits = lambda m: m.logits(m(tokens, Rows.single(1, 16)).hidden)
  assert np.abs(logits(model) - logits(base)).max() > 1e-4


def test_devices_of_a_mesh_read_the_model_of_the_run(trained):
  mesh = sharding.make_mesh(MeshConfig(fsdp=2, expert=2), jax.devices()[:4])
  expected, found = (
      names_of(nnx.state(model))
      for _, model, _ in (load_model(trained), load_model(trained, mesh=mesh))
  )
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert found[name].sharding.mesh == mesh, name
  assert any(not value.is_fully_replicated for value in found.values())


def test_a_resumed_run_reads_the_base_again(config, trained, tmp_path):
  half = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=2))
  loop.run(half, tmp_path / "run")
  loop.run(config, tmp_path / "run", resume=True)
  assert losses(tmp_path / "run") == losses(trained)
  assert arrays(tmp_path / "run") == arrays(trained)


def test_on_a_mesh_losses_are_the_same(config, trained, tmp_path):
  sharded = dataclasses.replace(config, mesh=MeshConfig(4, 1, 2, 1))
  loop.run(sharded, tmp_path / "run")
  np.testing.assert_allclose(losses(tmp_path / "run"), losses(trained), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(compute=ComputeConfig(stored_base=True)), "weight.value.codes.* --dequantise"),
        (dict(lora=LoraConfig(patterns=("nothing",))), "'nothing'"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(config, tmp_path, change, told):
  with pytest.raises(ValueError, match=told):
    loop.run(dataclasses.replace(config, **change), tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_a_base_of_another_model_and_a_pattern_that_finds_nothing(config, tmp_path):
  smaller = dataclasses.replace(config.model, swiglu_limit=5.0)
  with pytest.raises(ValueError, match="model.swiglu_limit is 5.0; train.init .* says"):
    loop.run(dataclasses.replace(config, model=smaller), tmp_path / "run")
  train = dataclasses.replace(config.train, trainable=("nowhere",))
  with pytest.raises(ValueError, match="train.trainable is 'nowhere'"):
    loop.run(dataclasses.replace(config, train=train), tmp_path / "run")


def codes(state):
  named = names_of(state.params)
  return {name: np.asarray(a) for name, a in named.items() if name.endswith(".codes")}


def test_adapters_learn_on_a_stored_base_on_a_mesh(tmp_path):
  """The golden checkpoint in FP8 and FP4: losses fall, codes stay, all as on one device."""
  released = Config(model=read_released(CHECKPOINT / "config.json"))
  released_import.to_training(CHECKPOINT, tmp_path / "run", released)
  train = dataclasses.replace(TRAIN, init=str(tmp_path / "run"), learning_rate=1e-2)
  compute = ComputeConfig(stored_base=True)
  config = dataclasses.replace(released, train=train, compute=compute, lora=LoraConfig(rank=2))
  rng = np.random.default_rng(0)
  tokens = rng.integers(3, 480, (1, 8, 32)).astype(np.int32)
  rows = Rows.of_segments(np.ones_like(tokens))
  ngrams = rng.integers(0, 413, (*tokens.shape, 4)).astype(np.int32)
  batch = Batch(tokens, rows, ngrams, np.roll(tokens, -1, -1), np.ones(tokens.shape, np.float32))
  found = []
  for mesh_config in (MeshConfig(), MeshConfig(4, 1, 2, 1)):
    config = dataclasses.replace(config, mesh=mesh_config)
    mesh = sharding.make_mesh(mesh_config) if mesh_config.devices > 1 else None
    state = step.init_state(config, mesh)
    codes = lambda state: {
        k: np.asarray(v) for k, v in names_of(state.params).items() if "code" in k
    }
    before = codes(state)
    assert len(before) > 10
    train_step = step.make_step(step.abstract_model(config)[0], config, mesh)
    losses = []
    for _ in range(4):
      placed = batch
      if mesh is not None:
        at = jax.NamedSharding(mesh, sharding.batch_spec(1))
        placed = jax.device_put(batch, at)
      state, metrics = train_step(state, placed)
      losses.append(float(metrics.loss))
    jax.tree.map(np.testing.assert_array_equal, codes(state), before)
    found.append(losses)
  assert found[0][-1] < found[0][0] - 0.1
  np.testing.assert_allclose(found[1], found[0], atol=2e-5)
