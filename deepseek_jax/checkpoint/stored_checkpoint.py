"""Models from converted checkpoints, whose frozen weights are still in FP8 or FP4."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from deepseek_jax import sharding
from deepseek_jax.checkpoint import conversion, released_export, side_files, training
from deepseek_jax.checkpoint.array_store import ArrayReader
from deepseek_jax.config import Config
from deepseek_jax.fields import build
from deepseek_jax.nn.adapters import adapt
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.quantised import dequantised


def load_model(
    directory: str | pathlib.Path, *, dequantise: bool = True, mesh: Mesh | None = None
) -> tuple[Config, Transformer, int]:
  """As `training.load_model`, for checkpoints of `released_import.to_training` as well.

  Args:
    directory: the workdir, or its folder `checkpoints`.
    dequantise: decode weights to `compute.param_dtype`; else they are `Quantised` in the model.
    mesh: whose devices read their parts; None for one device.

  Raises:
    ValueError: no checkpoint, or none that is whole.
  """
  checkpoints = training.open_workdir(directory)
  record = _record(checkpoints)
  config = build(Config, json.loads(checkpoints.config()))
  if config.train is not None and config.train.init:
    checkpoints.close()
    return _on_base(checkpoints, config, dequantise, mesh)
  if record is None or not any(name.endswith(".codes") for name in record["arrays"]):
    checkpoints.close()
    return training.load_model(directory, mesh)
  planned = released_export.saved_plan(config, record)
  model = conversion.abstract_model(config)
  if any(".lora." in name for name in record["arrays"]):
    model = adapt(model, config.lora, rngs=nnx.Rngs(0))
  graph, low_rank, _ = nnx.split(model, nnx.LoRAParam, ...)
  dense = config.compute.spread_dense
  wanted = sharding.spread(nnx.merge_state(planned, low_rank), mesh, dense=dense)
  restored = checkpoints.restore({"params": wanted})
  checkpoints.close()
  state = restored.state["params"]
  if dequantise:
    decode = lambda state: dequantised(state, jnp.dtype(config.compute.param_dtype))
    if mesh is not None:
      shapes = sharding.spread(jax.eval_shape(decode, state), mesh, dense=dense)
      decode = jax.jit(decode, out_shardings=jax.tree.map(lambda a: a.sharding, shapes))
    state = decode(state)
  return config, nnx.merge(graph, state), restored.step


def _on_base(
    checkpoints: training.Checkpoints, config: Config, dequantise: bool, mesh: Mesh | None
) -> tuple[Config, Transformer, int]:
  """A run that started from a checkpoint: that one's model with what the run has changed."""
  saved = _record(checkpoints)
  if saved is None:
    raise ValueError(f"restore from {checkpoints.directory}: the newest checkpoint is damaged")
  _, model, _ = load_model(config.train.init, dequantise=dequantise, mesh=mesh)
  side_files.check_model(config.model, model.config, f"train.init {config.train.init}")
  graph, state = nnx.split(adapt(model, config.lora, rngs=nnx.Rngs(0)))
  there = lambda path, _: f"params.{'.'.join(map(str, path))}" in saved["arrays"]
  changed = nnx.filter_state(state, there)
  changed = sharding.spread(changed, mesh, dense=config.compute.spread_dense)
  restored = checkpoints.restore({"params": changed})
  checkpoints.close()
  return config, nnx.merge(graph, nnx.merge_state(state, restored.state["params"])), restored.step


def read_base(directory: str | pathlib.Path, config: Config, template: nnx.State) -> nnx.State:
  """The parameters that a run starts from.

  Args:
    directory: `train.init`, a workdir of any kind.
    config: of the run, whose model must be that of the checkpoint.
    template: shapes, with shardings on a mesh, of the parameters without adapters; weights may be
      `Quantised`, as the checkpoint has them.

  Raises:
    ValueError: no whole checkpoint, one of another model, or of weights that are stored otherwise.
  """
  checkpoints = training.open_workdir(directory)
  try:
    saved = build(Config, json.loads(checkpoints.config()))
    side_files.check_model(config.model, saved.model, f"train.init {directory}")
    return checkpoints.restore({"params": template}).state["params"]
  except training.TemplateError as error:
    raise ValueError(
        f"train.init {directory}: {error}. Weights in FP8 and FP4 need compute.stored_base=True and"
        " stay frozen; convert_checkpoint.py --dequantise=. decodes them"
    ) from None
  finally:
    checkpoints.close()


def _record(checkpoints: training.Checkpoints) -> dict[str, Any] | None:
  """Of the newest step, if it is whole."""
  steps = checkpoints.steps()
  try:
    return ArrayReader(checkpoints.directory / str(steps[-1])).record if steps else None
  except training.DamagedError:
    return None
