"""Laws of training checkpoints: what is restored is what was saved, bit for bit, or nothing is."""

import dataclasses
import logging
import shutil
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from deepseek_jax.checkpoint import training
from deepseek_jax.config import Config, ModelConfig, TrainConfig

CONFIG = Config(
    model=ModelConfig(
        vocab_size=40, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_lora_rank=16,
        o_groups=1, n_routed_experts=4, num_experts_per_tok=2, sliding_window=8,
        compress_ratios=(1,), kv_source_layer_ids=(0,), index_source_layer_ids=(0,),
        index_n_heads=2, index_head_dim=32, index_topk=4,
    ),
    train=TrainConfig(steps=10, batch_size=2, seq_len=32),
)  # fmt: skip


class State(NamedTuple):
  params: dict
  opt_state: tuple
  step: jax.Array


def make_state(step):
  f32 = jax.random.normal(jax.random.key(step), (16, 12))
  return State(
      {"a": {"weight": f32}, "b": jnp.astype(f32, jnp.bfloat16)},
      ({"trace": f32 * 2.0}, jnp.full((3,), step, jnp.int32)),
      jnp.int32(step),
  )


TEMPLATE = jax.eval_shape(lambda: make_state(0))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
  """Checkpoints of steps 3, 5 and 8, of which the first is forgotten."""
  directory = tmp_path_factory.mktemp("run") / "checkpoints"
  checkpoints = training.Checkpoints(directory, keep=2)
  for step in (3, 5, 8):
    checkpoints.save(step, make_state(step), {"row": step, "data": "x"}, CONFIG)
  checkpoints.close()
  return directory


@pytest.fixture
def copy(original, tmp_path):
  target = tmp_path / "checkpoints"
  shutil.copytree(original, target)
  return target


def restore(directory, template=TEMPLATE):
  checkpoints = training.Checkpoints(directory)
  try:
    return checkpoints.restore(template)
  finally:
    checkpoints.close()


def check_never_wrong(directory):
  """The damaged step 8 is passed over for step 5, or its state is right all the same."""
  found = restore(directory)
  chex.assert_trees_all_equal(found.state, make_state(found.step))
  assert found.iterator["row"] == found.step
  return found


def test_the_newest_checkpoint_comes_back_bit_for_bit(original):
  found = restore(original)
  assert (found.step, found.iterator, found.damaged) == (8, {"row": 8, "data": "x"}, ())
  chex.assert_trees_all_equal(found.state, make_state(8))
  chex.assert_trees_all_equal_dtypes(found.state, make_state(8))
  assert training.Checkpoints(original).steps() == [5, 8]


def test_a_part_can_be_restored_alone_into_the_sharding_asked_for(original):
  mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:1]), ("data",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  weight = jax.ShapeDtypeStruct((16, 12), jnp.float32, sharding=sharding)
  found = restore(original, {"params": {"a": {"weight": weight}}})
  restored = found.state["params"]["a"]["weight"]
  assert restored.sharding == sharding
  np.testing.assert_array_equal(restored, make_state(8).params["a"]["weight"])


def forge(directory, change):
  """Replaces the arrays of step 8 by a whole Orbax item with other arrays."""
  arrays = training.names_of(make_state(8))
  change(arrays)
  shutil.rmtree(directory / "8" / "state")
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    checkpointer.save(directory / "8" / "state", args=ocp.args.PyTreeSave(arrays))


NAME = "params.a.weight"


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays.update({NAME: arrays[NAME] + 1e-6}),
        lambda arrays: arrays.update({NAME: jnp.astype(arrays[NAME], jnp.bfloat16)}),
        lambda arrays: arrays.update({NAME: arrays[NAME].reshape(12, 16)}),
        lambda arrays: arrays.pop(NAME),
    ],
    ids=["value", "dtype", "shape", "missing"],
)
def test_arrays_of_another_hand_fall_back_with_a_warning(copy, change, caplog):
  """Orbax itself restores the first two without a word."""
  forge(copy, change)
  caplog.set_level(logging.WARNING)
  found = check_never_wrong(copy)
  assert (found.step, found.damaged) == (5, (8,))
  assert "checkpoint 8 in" in caplog.text
  assert "is damaged" in caplog.text


def test_a_record_without_its_digest_falls_back(copy):
  file = copy / "8" / "record" / "metadata"
  file.write_text(file.read_text().replace('"row": 8', '"row": 9'))
  assert check_never_wrong(copy).damaged == (8,)


def test_with_no_whole_checkpoint_left_nothing_is_restored(copy):
  for step in (5, 8):
    (copy / str(step) / "record" / "metadata").write_bytes(b"{}")
  with pytest.raises(ValueError, match=r"every checkpoint is damaged \(\[8, 5\]\)"):
    restore(copy)


def test_no_checkpoint_is_an_error_and_creates_nothing(tmp_path):
  with pytest.raises(ValueError, match="no checkpoint"):
    restore(tmp_path / "none")
  assert not list(tmp_path.iterdir())


def test_an_unfinished_checkpoint_is_not_listed(copy):
  (copy / "8").rename(copy / "8.orbax-checkpoint-tmp")
  checkpoints = training.Checkpoints(copy)
  assert checkpoints.steps() == [5]
  checkpoints.sweep()
  checkpoints.close()
  assert [path.name for path in copy.iterdir()] == ["5"]


@pytest.mark.parametrize(
    ("dtype", "shape", "told"),
    [
        (jnp.bfloat16, (16, 12), r"holds float32\[16, 12\], asked for is bfloat16"),
        (jnp.float32, (12, 16), r"holds float32\[16, 12\], asked for is float32\[12, 16\]"),
    ],
    ids=["dtype", "shape"],
)
def test_another_dtype_or_shape_is_refused(original, dtype, shape, told):
  with pytest.raises(ValueError, match=f"array params.a.weight: checkpoint 8 {told}"):
    restore(original, {"params": {"a": {"weight": jax.ShapeDtypeStruct(shape, dtype)}}})


def test_an_array_that_was_not_saved_is_refused(original):
  with pytest.raises(ValueError, match="array params.c: checkpoint 8 holds nothing"):
    restore(original, {"params": {"c": jax.ShapeDtypeStruct((1,), jnp.float32)}})


def test_damaged_steps_are_moved_and_can_be_saved_again(copy):
  checkpoints = training.Checkpoints(copy)
  for _ in range(2):
    checkpoints.set_aside((8,))
    assert checkpoints.steps() == [5]
    checkpoints.save(8, make_state(8), {"row": 8}, CONFIG)
  assert checkpoints.steps() == [5, 8]
  checkpoints.close()
  assert sorted(p.name for p in (copy.parent / "damaged").iterdir()) == ["8", "8-1"]


def changed(**train):
  return dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, **train))


def test_another_experiment_is_named_by_its_fields():
  saved = CONFIG.to_json()
  training.check_config(saved, CONFIG)
  training.check_config(saved, changed(checkpoint_every=7, eval_every=3, sample_prompt="Hi"))
  with pytest.raises(ValueError, match="train.seed was 0 and is 1"):
    training.check_config(saved, changed(seed=1))
  model = dataclasses.replace(CONFIG.model, hidden_size=64)
  with pytest.raises(ValueError, match="model.hidden_size was 32 and is 64"):
    training.check_config(saved, dataclasses.replace(CONFIG, model=model))


def test_steps_may_change_only_where_no_rate_depends_on_them():
  with pytest.raises(ValueError, match="train.steps was 10 and is 20"):
    training.check_config(CONFIG.to_json(), changed(steps=20))
  constant = changed(schedule="constant")
  training.check_config(constant.to_json(), changed(schedule="constant", steps=20))
