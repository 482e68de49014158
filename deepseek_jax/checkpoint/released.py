"""Released tensor names ↔ the parameters of `Transformer` (spec 13).

Weights keep their released orientation [out, in], so a name maps to one slice of one parameter:
`layers.{l}.` picks a run and a place in its stack, `experts.{e}.` a place on the expert axis.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.schedule import Schedule

# Of the released tensors, those outside the text backbone.
SKIPPED = ("mtp.", "vision.", "aligner.", "image_start", "image_end", "image_newline")


def path_names(key_path: Sequence[Any]) -> tuple[str, ...]:
  """Names along a JAX key path, without the `.value` that an `nnx.Variable` adds at its end.

  Dictionaries, `nnx.State`, `nnx.split` results and the module itself give the same names:
  `("runs", "0", "attn", "wq_a", "weight")`.

  Args:
    key_path: as `jax.tree_util.tree_flatten_with_path` gives it.

  Returns:
    One string a level.
  """
  names = []
  for key in key_path:
    part = next(getattr(key, field) for field in ("key", "name", "idx") if hasattr(key, field))
    names.append(str(part))
  if names and isinstance(key_path[-1], jax.tree_util.GetAttrKey) and names[-1] == "value":
    names.pop()
  return tuple(names)


def slices(
    path: tuple[str, ...], shape: tuple[int, ...], schedule: Schedule
) -> Iterator[tuple[str, tuple[int, ...]]]:
  """(released name, leading index) of every tensor that the parameter at `path` holds."""
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


def to_released(state: nnx.State, schedule: Schedule) -> dict[str, np.ndarray]:
  """Every parameter (or gradient) under its released name, as numpy."""
  named = {}
  for key_path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
    value = np.asarray(leaf)
    for name, index in slices(path_names(key_path), value.shape, schedule):
      named[name] = value[index]
  return named


def load(model: Transformer, tensors: Mapping[str, np.ndarray]) -> Transformer:
  """The model with every parameter taken from `tensors`, values under released names.

  Quantised tensors must be decoded, except Engram tables, whose `embed.scale` (one per 32 channels)
  is multiplied in. `gate.bias_vl` may be absent: text never reads it.

  Raises:
    ValueError: a tensor is missing, has another shape, or has no place in the model.
  """
  graph, state = nnx.split(model)
  used: set[str] = set()

  def fill(key_path, leaf):
    value = np.empty(leaf.shape, np.float32)
    for name, index in slices(path_names(key_path), leaf.shape, model.schedule):
      if name not in tensors:
        if name.endswith("gate.bias_vl"):
          value[index] = 0
          continue
        raise ValueError(
            f"tensor {name} is missing; the model needs it with shape {leaf.shape[len(index):]}"
        )
      used.add(name)
      tensor = np.asarray(tensors[name], np.float32)
      scale = name.removesuffix("weight") + "scale"
      if name.endswith("engram.embed.weight") and scale in tensors:
        used.add(scale)
        tensor = tensor * np.repeat(np.asarray(tensors[scale], np.float32), 32, axis=-1)
      if tensor.shape != leaf.shape[len(index) :]:
        raise ValueError(
            f"tensor {name} has shape {tensor.shape}; the model needs {leaf.shape[len(index):]}"
        )
      value[index] = tensor
    return jnp.asarray(value, leaf.dtype)

  state = jax.tree_util.tree_map_with_path(fill, state)
  unknown = sorted(n for n in set(tensors) - used if not n.startswith(SKIPPED))
  if unknown:
    raise ValueError(f"tensor {unknown[0]} has no place in the model ({len(unknown)} such)")
  return nnx.merge(graph, state)
