"""Mixture of experts with auxiliary-free balancing and the sequence balance loss (spec 10)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from deepseek_jax import sharding
from deepseek_jax.config import ModelConfig
from deepseek_jax.nn import experts
from deepseek_jax.nn.layers import Linear, constant, normal, plain
from pallas_kernels import dispatch
from pallas_kernels.decode_layer import op as layer_op
from pallas_kernels.grouped_experts import op as grouped_experts


class Routing(NamedTuple):
  """f32 weights and ids of the chosen experts, and every expert's affinity."""

  weights: Float[Array, "B T X"]
  ids: Int[Array, "B T X"]
  affinities: Float[Array, "B T E"]


class Balance(NamedTuple):
  """What balancing needs of one layer.

  On a mesh both are this device's share.

  Attributes:
    load: tokens each expert received, padding left out.
    loss: Σ over lines of (tokens · Σ_e f_e P_e); divide by the number of tokens.
  """

  load: Float[Array, " E"]
  loss: Float[Array, ""]


class Bank(NamedTuple):
  """Weights of all layers of a run that kernels read in place, and the number of the one at hand.

  Vectors have an axis of 1 where a block of a layer needs it.
  """

  norm: Float[Array, "n 1 D"]
  gate: Float[Array, "n E D"]
  bias: Float[Array, "n E 1"]
  experts: experts.ExpertWeights
  layer: Int[Array, ""] | int


class Gate(nnx.Module):
  """Router. `bias` steers the choice alone and is moved by the load, never by a gradient.

  `bias_vl` serves tokens inside image spans; text leaves it untouched.
  """

  def __init__(self, stack: tuple[int, ...], config: ModelConfig, *, rngs: nnx.Rngs, dtype):
    e = config.n_routed_experts
    self.weight = normal(rngs, (*stack, e, config.hidden_size), config.hidden_size**-0.5, dtype)
    self.bias = constant((*stack, e), 0.0)
    self.bias_vl = constant((*stack, e), 0.0)
    self.active, self.scale = config.num_experts_per_tok, config.routed_scaling_factor

  def __call__(
      self, x: Float[Array, "B T D"], routes: Int[Array, "B T X"] | None = None
  ) -> Routing:
    """Of normed rows. `routes` are experts chosen before, −1 where the router is to choose."""
    z = jnp.einsum("btd,ed->bte", x.astype(jnp.float32), self.weight[...].astype(jnp.float32))
    # softplus underflows below z = −87, where the slope of the root is infinite.
    s = jnp.sqrt(jnp.maximum(jax.nn.softplus(z), jnp.finfo(jnp.float32).tiny))
    ids = jax.lax.top_k(jax.lax.stop_gradient(s + self.bias[...]), self.active)[1]
    if routes is not None:
      ids = jnp.where(routes < 0, ids, routes)
    weights = jnp.take_along_axis(s, ids, axis=-1)
    if self.active > 1:
      weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return Routing(weights * self.scale, ids, s)


def balance(routing: Routing, valid: Bool[Array, "B T"]) -> Balance:
  """Load and sequence balance loss over valid rows; a line of the batch is one sequence.

  f_e is the share of the line's assignments at expert e times E, P_e the mean normalised affinity
  (the report names the loss; the formula is the one of DeepSeek-V3).
  """
  lines, _, count_experts = routing.affinities.shape
  active = routing.ids.shape[-1]
  mask = valid.astype(jnp.float32)
  line = jnp.arange(lines)[:, None, None]
  own_load = jnp.zeros((lines, count_experts)).at[line, routing.ids].add(mask[..., None])
  load, count = sharding.rows_summed(own_load), sharding.rows_summed(mask.sum(-1, keepdims=True))
  share = load * count_experts / (active * jnp.maximum(count, 1))
  p = routing.affinities / routing.affinities.sum(-1, keepdims=True)
  mean_p = sharding.rows_summed(jnp.einsum("bte,bt->be", p, mask)) / jnp.maximum(count, 1)
  # Devices that share a line share its loss.
  loss = jnp.sum(count * share * mean_p) / sharding.axis_size(sharding.SEQ)
  return Balance(own_load.sum(0), loss)


class Experts(nnx.Module):
  """The routed bank: w1, w3 [E, F, D] and w2 [E, D, F]."""

  def __init__(self, stack: tuple[int, ...], config: ModelConfig, *, rngs: nnx.Rngs, dtype):
    stack = (*stack, config.n_routed_experts)
    d, f = config.hidden_size, config.moe_intermediate_size
    self.w1 = Linear(stack, d, f, rngs=rngs, dtype=dtype)
    self.w2 = Linear(stack, f, d, rngs=rngs, dtype=dtype)
    self.w3 = Linear(stack, d, f, rngs=rngs, dtype=dtype)

  def weights(self, dtype) -> experts.ExpertWeights:
    return experts.ExpertWeights(*(w.dense(dtype) for w in (self.w1, self.w2, self.w3)))


class SharedExpert(nnx.Module):
  """One expert that every token visits with weight 1."""

  def __init__(self, stack: tuple[int, ...], config: ModelConfig, *, rngs: nnx.Rngs, dtype):
    d, f = config.hidden_size, config.moe_intermediate_size
    self.w1 = Linear(stack, d, f, rngs=rngs, dtype=dtype)
    self.w2 = Linear(stack, f, d, rngs=rngs, dtype=dtype)
    self.w3 = Linear(stack, d, f, rngs=rngs, dtype=dtype)
    self.limit = config.swiglu_limit

  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    return self.w2(experts.swiglu(self.w1(x), self.w3(x), self.limit).astype(x.dtype))


class MoE(nnx.Module):
  """Routed sum plus shared expert, in f32, then the input's dtype."""

  def __init__(
      self, stack: tuple[int, ...], config: ModelConfig, implementation: str | None = None, *,
      rngs: nnx.Rngs, dtype,
  ):  # fmt: skip
    self.implementation = implementation
    self.gate = Gate(stack, config, rngs=rngs, dtype=dtype)
    self.experts = Experts(stack, config, rngs=rngs, dtype=dtype)
    self.shared_experts = SharedExpert(stack, config, rngs=rngs, dtype=dtype)
    self.limit = config.swiglu_limit

  def __call__(
      self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"],
      routes: Int[Array, "B T X"] | None = None,
  ) -> tuple[Float[Array, "B T D"], Balance, Int[Array, "B T X"]]:  # fmt: skip
    """Of normed rows, where `valid`, and the experts that they visit (see `Gate`)."""
    routing = self.gate(x, routes)
    count = routing.affinities.shape[-1]
    ids = jnp.where(valid[..., None], routing.ids, count)  # padding visits no expert
    flat = lambda a: a.reshape(-1, a.shape[-1])
    args = flat(x), flat(routing.weights), flat(ids), self.experts.weights(x.dtype)
    kernels = dispatch.resolve(self.implementation, ("pallas", "reference")) == "pallas"
    way = experts.Way(self.limit, kernels)
    visits = sharding.axis_size(sharding.EXPERTS) > 1
    routed = experts.visited_sum(way, *args) if visits else experts.routed_sum(way, *args)
    out = routed.reshape(x.shape) + self.shared_experts(x).astype(jnp.float32)
    return checkpoint_name(out.astype(x.dtype), "mixture"), balance(routing, valid), routing.ids

  def bank(self, norm: Float[Array, "n D"], u: Float[Array, "B T D"]) -> Bank | None:
    """Of a stacked run at its first layer, if `in_place` takes rows like u; see `one_row`."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
      return None
    (b, t, d), w1, gate = u.shape, self.experts.w1.weight, self.gate.weight
    refusal = layer_op.route_refusal((b * t, d), u.dtype, gate.shape[1], self.gate.active)
    refusal = refusal or grouped_experts.refusal(u.dtype, w1.shape[2], d)
    refusal = refusal or (f"experts are {w1.dtype}" if w1.dtype != u.dtype else None)
    refusal = refusal or (None if plain(self) else "weights are decoded or have adapters")
    asked = None if refusal else self.implementation
    if dispatch.resolve(asked, grouped_experts.AVAILABLE, refusal) != "pallas":
      return None
    bias = self.gate.bias[...][..., None]
    return Bank(norm[:, None], gate[...], bias, self.experts.weights(u.dtype), 0)

  def in_place(
      self, u: Float[Array, "B T D"], valid: Bool[Array, "B T"], bank: Bank, eps: float
  ) -> Float[Array, "B T D"]:
    """The same of rows before their norm, by kernels that read a `bank`, without a gradient."""
    live = valid.reshape(-1).astype(jnp.int32)
    route = layer_op.route(
        u.reshape(live.size, -1), live, bank.layer, *bank[:3], active=self.gate.active,
        scale=self.gate.scale, eps=eps, implementation="pallas",
    )  # fmt: skip
    routed = experts.stacked_sum(self.limit, *route, bank.experts, bank.layer)
    return (
        (routed + self.shared_experts(route.x).astype(jnp.float32)).astype(u.dtype).reshape(u.shape)
    )
