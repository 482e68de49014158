"""Fine-tuning with adapters on a frozen base: what moves, what it saves, and what is exported."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from deepseek_jax.checkpoint import released_export, released_reader, stored_checkpoint, training
from deepseek_jax.checkpoint.shards import Shards
from deepseek_jax.config import ComputeConfig, Config, TrainConfig
from deepseek_jax.lora import LoraConfig
from deepseek_jax.model_config import read_released
from deepseek_jax.nn import adapters
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.parameter_paths import path_names
from deepseek_jax.quantised import is_quantised
from deepseek_jax.train import optimizer

CHECKPOINT = pathlib.Path(__file__).parents[1] / "golden" / "checkpoint_tiny"
LORA = LoraConfig(rank=2)
CONFIG = Config(
    model=read_released(CHECKPOINT / "config.json"),
    compute=ComputeConfig(),
    train=TrainConfig(steps=10, batch_size=1, seq_len=16),
    lora=LORA,
)


def shapes():
  return nnx.eval_shape(lambda: Transformer(CONFIG.model, CONFIG.compute, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def model():
  """The golden checkpoint with its weights as stored, and adapters."""
  base = released_reader.load(Shards(CHECKPOINT), shapes(), keep=lambda path: True).model
  return adapters.adapt(base, LORA, rngs=nnx.Rngs(0))


def groups_of(tree):
  return {".".join(path): group for path, group in optimizer.parameter_groups(tree).items()}


def test_every_adapter_and_every_code_has_its_optimiser(model):
  groups = groups_of(nnx.split(model)[1])
  of = lambda kind: {path for path, group in groups.items() if group == kind}
  low_rank = {path for path in groups if adapters.is_adapter(tuple(path.split(".")))}
  assert low_rank
  assert low_rank < of("adamw")
  stored = {path for path in groups if path.endswith((".codes", ".scales"))}
  assert stored == of("frozen") != set()
  whole = LoraConfig(rank=1, patterns=(r"ffn\.experts\.", r"indexer\.w", "^head"))
  other = adapters.adapt(shapes(), whole, rngs=nnx.Rngs(0))
  assert groups_of(nnx.split(other)[1])["runs.0.ffn.experts.w1.lora.lora_b"] == "adamw"


@pytest.mark.slow
def test_adapters_learn_and_the_stored_base_stays(model):
  graph, low_rank, rest = nnx.split(model, nnx.LoRAParam, ...)
  transform = optimizer.make_optimizer(low_rank, learning_rate=1e-2, clip_norm=1.0)
  tokens = jax.random.randint(jax.random.key(0), (1, 16), 3, CONFIG.model.vocab_size)
  ngrams = jnp.zeros((1, 16, CONFIG.model.engram_max_ngram_size), jnp.int32)

  def loss(low_rank, rest):
    model = nnx.merge(graph, low_rank, rest)
    logits = model.logits(model(tokens, Rows.single(1, 16), ngrams).hidden)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1)
    return -picked.mean()

  # Nothing here is timed: code that is not optimised compiles in half the time.
  @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
  def step(low_rank, state, rest):
    value, grads = jax.value_and_grad(loss)(low_rank, rest)
    updates, state = transform.update(grads, state, low_rank)
    return optax.apply_updates(low_rank, updates), state, value

  before = jax.tree.map(np.array, rest)
  first, state, losses = low_rank, transform.init(low_rank), []
  for _ in range(6):
    low_rank, state, value = step(low_rank, state, rest)
    losses.append(float(value))
  assert losses[-1] < losses[0] - 0.5
  assert np.isfinite(losses).all()
  for a, b in zip(jax.tree.leaves(low_rank), jax.tree.leaves(first)):
    assert not np.array_equal(a, b)
  for a, b in zip(jax.tree.leaves(rest), jax.tree.leaves(before)):
    np.testing.assert_array_equal(a, b)
  # The optimiser remembers adapters alone: two moments of each, and counts.
  held = sum(leaf.size for leaf in jax.tree.leaves(state))
  assert held <= 2 * sum(leaf.size for leaf in jax.tree.leaves(low_rank)) + 4


def saved(folder, model, config=CONFIG):
  checkpoints = training.open_workdir(folder)
  checkpoints.save(3, {"params": nnx.split(model)[1]}, {}, config)
  checkpoints.close()
  return folder


def leaves(model):
  found = jax.tree_util.tree_flatten_with_path(nnx.split(model)[1])[0]
  return {".".join(path_names(key)): leaf for key, leaf in found}


@pytest.mark.slow
def test_a_checkpoint_with_adapters_comes_back(model, tmp_path):
  folder = saved(tmp_path / "checkpoints", model)
  _, back, step = stored_checkpoint.load_model(folder, dequantise=False)
  assert step == 3
  assert nnx.split(back)[0] == nnx.split(model)[0]
  for path, leaf in leaves(model).items():
    np.testing.assert_array_equal(leaves(back)[path], leaf)
  decoded = stored_checkpoint.load_model(folder)[1]
  assert not any(map(is_quantised, jax.tree.leaves(nnx.split(decoded)[1], is_leaf=is_quantised)))
  assert leaves(decoded).keys() >= {p for p in leaves(model) if ".lora." in p}


def test_adapters_are_not_exported_until_they_are_merged(model, tmp_path):
  folder = saved(tmp_path / "adapted" / "checkpoints", model).parent
  with pytest.raises(ValueError, match=r"holds adapters \(params\..*lora_a\); .* merge them into"):
    released_export.to_released(folder, tmp_path / "out")
  assert not (tmp_path / "out").exists()
  plain = dataclasses.replace(CONFIG, lora=None)
  merged = saved(tmp_path / "merged" / "checkpoints", adapters.merge_adapters(model), plain).parent
  released_export.to_released(merged, tmp_path / "out", original=CHECKPOINT)
  # B is zero, so the merged values are those of the base and its bytes come back.
  name = "model-00001-of-00002.safetensors"
  assert (tmp_path / "out" / name).read_bytes() == (CHECKPOINT / name).read_bytes()
