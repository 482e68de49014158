"""Models from converted checkpoints, whose frozen weights are still in FP8 or FP4."""

import json
import pathlib
from typing import Any

import jax.numpy as jnp
from flax import nnx

from deepseek_jax.checkpoint import conversion, released_export, training
from deepseek_jax.checkpoint.array_store import ArrayReader
from deepseek_jax.checkpoint.quantised import dequantised
from deepseek_jax.config import Config
from deepseek_jax.fields import build
from deepseek_jax.nn.transformer import Transformer


def load_model(
    directory: str | pathlib.Path, *, dequantise: bool = True
) -> tuple[Config, Transformer, int]:
  """As `training.load_model`, for checkpoints of `released_import.to_training` as well.

  Args:
    directory: the workdir, or its folder `checkpoints`.
    dequantise: decode weights to `compute.param_dtype`; else they are `Quantised` in the model.

  Raises:
    ValueError: no checkpoint, or none that is whole.
  """
  checkpoints = training.open_workdir(directory)
  record = _record(checkpoints)
  if record is None or not any(name.endswith(".codes") for name in record["arrays"]):
    checkpoints.close()
    return training.load_model(directory)
  config = build(Config, json.loads(checkpoints.config()))
  planned = released_export.saved_plan(config, record)
  restored = checkpoints.restore({"params": planned})
  checkpoints.close()
  state = restored.state["params"]
  if dequantise:
    state = dequantised(state, jnp.dtype(config.compute.param_dtype))
  graph = nnx.split(conversion.abstract_model(config))[0]
  return config, nnx.merge(graph, state), restored.step


def _record(checkpoints: training.Checkpoints) -> dict[str, Any] | None:
  """Of the newest step, if it is whole."""
  steps = checkpoints.steps()
  try:
    return ArrayReader(checkpoints.directory / str(steps[-1])).record if steps else None
  except training.DamagedError:
    return None
