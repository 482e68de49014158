"""Low-rank adapters on frozen weights: which ones get one, and how they come back off.

An adapter is a child of the `Linear` whose product it corrects: `runs.0.attn.wq_a.lora.lora_a`
[n, in, r] and `.lora_b` [n, r, out], of experts [n, E, in, r] and [n, E, r, out]. The paths of the
base stay what they are.
"""

import functools
import re

import jax
import jax.numpy as jnp
from flax import nnx

from deepseek_jax.lora import LoraConfig
from deepseek_jax.nn.layers import Adapter, Linear
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.quantised import is_quantised

_LEAF = re.compile(r"\.lora\.lora_[ab]$")


def is_adapter(path: tuple[str, ...]) -> bool:
  """Whether the parameter at a path belongs to an adapter and not to the base."""
  return _LEAF.search(".".join(path)) is not None


def adapt(model: Transformer, lora: LoraConfig | None, *, rngs: nnx.Rngs) -> Transformer:
  """The model with new adapters on the weights that `lora` names; its outputs are the same.

  Args:
    model: of arrays, of what `jax.jit` or `nnx.eval_shape` trace, or of `jax.ShapeDtypeStruct`:
      adapters are then shapes too. It is left as it is; the result shares its arrays. Weights may
      be `Quantised`.
    lora: None adds nothing.
    rngs: for A; B is zero.

  Raises:
    ValueError: a pattern that is none or matches nothing, a matching parameter that is no weight of
      a linear layer or expert, or a model that has adapters.
  """
  if lora is None:
    return model
  model = nnx.merge(*nnx.split(model), copy=True)
  abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model))
  for linear in _targets(model, lora):
    *stack, d_out, d_in = linear.weight.get_value().shape
    make = functools.partial(_stacked, tuple(stack), d_in, d_out, lora)
    linear.lora = nnx.eval_shape(make, rngs) if abstract else make(rngs)
  return model


def merge_adapters(model: Transformer) -> Transformer:
  """The model without adapters: each is added to its weight in f32, then rounded to its dtype.

  A weight that was `Quantised` becomes `compute.param_dtype`: the sum is no released code. The
  given model is left as it is.
  """
  model = nnx.merge(*nnx.split(model), copy=True)
  dtype = jnp.dtype(model.compute.param_dtype)
  for linear in _linears(model).values():
    if linear.lora is not None:
      weight = linear.weight.get_value()
      linear.weight.set_value(_merged(linear, dtype if is_quantised(weight) else weight.dtype))
      del linear.lora
  return model


@functools.partial(jax.jit, static_argnums=1)
def _merged(linear: Linear, dtype) -> jax.Array:
  delta = linear.lora.delta(jnp.float32, jax.lax.Precision.HIGHEST)
  return (linear.values(jnp.float32) + delta).astype(dtype)


def _linears(model: Transformer) -> dict[str, Linear]:
  """By the dotted path of their weight."""
  return {
      ".".join(map(str, (*path, "weight"))): module
      for path, module in nnx.iter_modules(model)
      if isinstance(module, Linear)
  }


def _targets(model: Transformer, lora: LoraConfig) -> list[Linear]:
  paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))]
  found: dict[str, Linear] = {}
  linears = _linears(model)
  if any(map(_LEAF.search, paths)):
    raise ValueError("lora: the model has adapters; merge them before it gets new ones")
  for pattern in lora.patterns:
    matches = [path for path in paths if re.search(pattern, path)]
    if not matches:
      raise ValueError(
          f"lora.patterns: {pattern!r} matches no parameter; a path is, for example, {paths[-1]}"
      )
    for path in matches:
      if path not in linears:
        raise ValueError(
            f"lora.patterns: {pattern!r} matches {path}, which cannot carry an adapter; weights of"
            " linear layers and experts can"
        )
      found[path] = linears[path]
  return list(found.values())


def _stacked(
    stack: tuple[int, ...], d_in: int, d_out: int, lora: LoraConfig, rngs: nnx.Rngs
) -> Adapter:
  make = lambda rngs: Adapter(d_in, lora.rank, d_out, lora.alpha / lora.rank, rngs=rngs)
  for size in reversed(stack):
    make = nnx.split_rngs(splits=size)(nnx.vmap(make))
  return make(rngs)
