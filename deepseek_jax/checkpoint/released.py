"""Released tensor names ↔ the parameters of `Transformer` (spec 13).

Weights keep their released orientation [out, in], so a name maps to one slice of one parameter:
`layers.{l}.` picks a run and a place in its stack, `experts.{e}.` a place on the expert axis. Only
Engram tables are larger here than there: by rows at their end that nothing reads (`tensor_shape`).
"""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deepseek_jax.config import ModelConfig
from deepseek_jax.nn.adapters import is_adapter
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.parameter_paths import path_names
from deepseek_jax.schedule import Schedule

# Of the released tensors, those outside the text backbone.
SKIPPED = ("mtp.", "vision.", "aligner.", "image_start", "image_end", "image_newline")


def slices(
    path: tuple[str, ...], shape: tuple[int, ...], schedule: Schedule
) -> Iterator[tuple[str, tuple[int, ...]]]:
  """(released name, leading index) of every tensor that the parameter at `path` holds.

  Raises:
    ValueError: an adapter, which has no released name.
  """
  if is_adapter(path):
    raise ValueError(
        f"parameter {'.'.join(path)} is an adapter, which no released checkpoint holds; load the"
        " base before `adapters.adapt`, and save after `adapters.merge_adapters`"
    )
  if path[0] != "runs":
    yield ".".join(path), ()
    return
  rest = path[2:]
  for k, spec in enumerate(schedule.runs[int(path[1])]):
    prefix = f"layers.{spec.layer}."
    if rest[:2] == ("ffn", "experts"):
      for e in range(shape[1]):
        yield f"{prefix}ffn.experts.{e}.{'.'.join(rest[2:])}", (k, e)
    else:
      yield prefix + ".".join(rest), (k,)


def tensor_shape(
    path: tuple[str, ...], shape: tuple[int, ...], config: ModelConfig
) -> tuple[int, ...]:
  """Shape of the released tensors, decoded, of the parameter at `path`.

  It is that of one slice of the parameter, but for the rows that `nn.engram.allocated_rows` adds.

  Args:
    path: of the parameter.
    shape: of the parameter, leading axes included.
    config: of the model.
  """
  if path[0] != "runs":
    return shape
  rest = path[2:]
  if rest[:2] == ("engram", "embed"):
    ordinal = Schedule.from_config(config).runs[int(path[1])][0].engram
    return config.engram_num_embeddings[ordinal], *shape[2:]
  return shape[2:] if rest[:2] == ("ffn", "experts") else shape[1:]


def to_released(state: nnx.State, config: ModelConfig) -> dict[str, np.ndarray]:
  """Every parameter (or gradient) of a model under its released name, as numpy."""
  named, schedule = {}, Schedule.from_config(config)
  for key_path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
    path, value = path_names(key_path), np.asarray(leaf)
    held = tuple(map(slice, tensor_shape(path, value.shape, config)))
    for name, index in slices(path, value.shape, schedule):
      named[name] = value[index][held]
  return named


def load(model: Transformer, tensors: Mapping[str, np.ndarray]) -> Transformer:
  """The model with every parameter taken from `tensors`, values under released names.

  Quantised tensors must be decoded, except Engram tables, whose `embed.scale` (one per 32 channels)
  is multiplied in. `gate.bias_vl` may be absent: text never reads it. It is then zero, and so are
  the rows of a table that no tensor has.

  Raises:
    ValueError: a tensor is missing, has another shape, or has no place in the model.
  """
  graph, state = nnx.split(model)
  used: set[str] = set()

  def fill(key_path, leaf):
    path, value = path_names(key_path), np.zeros(leaf.shape, np.float32)
    shape = tensor_shape(path, leaf.shape, model.config)
    for name, index in slices(path, leaf.shape, model.schedule):
      if name not in tensors:
        if name.endswith("gate.bias_vl"):
          continue
        raise ValueError(f"tensor {name} is missing; the model needs it with shape {shape}")
      used.add(name)
      tensor = np.asarray(tensors[name], np.float32)
      scale = name.removesuffix("weight") + "scale"
      if name.endswith("engram.embed.weight") and scale in tensors:
        used.add(scale)
        tensor = tensor * np.repeat(np.asarray(tensors[scale], np.float32), 32, axis=-1)
      if tensor.shape != shape:
        raise ValueError(f"tensor {name} has shape {tensor.shape}; the model needs {shape}")
      value[index][tuple(map(slice, shape))] = tensor
    return jnp.asarray(value, leaf.dtype)

  state = jax.tree_util.tree_map_with_path(fill, state)
  unknown = sorted(n for n in set(tensors) - used if not n.startswith(SKIPPED))
  if unknown:
    raise ValueError(f"tensor {unknown[0]} has no place in the model ({len(unknown)} such)")
  return nnx.merge(graph, state)
