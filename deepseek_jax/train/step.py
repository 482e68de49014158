"""One training step: gradient over micro-batches, update, router biases; compiled once."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from deepseek_jax import quantised, sharding
from deepseek_jax.checkpoint.stored_checkpoint import read_base
from deepseek_jax.config import Config
from deepseek_jax.fields import require
from deepseek_jax.nn.adapters import adapt, is_adapter
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.parameter_paths import path_names
from deepseek_jax.schedule import Schedule
from deepseek_jax.train import loss, optimizer
from deepseek_jax.train.data import Batch, batch_specs
from deepseek_jax.train.learning_rate import learning_rate_schedule

INDEXER = r"attn\.indexer\."
_ALL_BUT_INDEXER = rf"^(?!.*{INDEXER})"


class TrainState(NamedTuple):
  """All that a step changes.

  Attributes:
    params: `nnx.State` of a `Transformer`, in `compute.param_dtype`.
    opt_state: of `make_optimizer`, f32.
    step: finished steps, int32.
  """

  params: nnx.State
  opt_state: optax.OptState
  step: Int[Array, ""]


class Metrics(NamedTuple):
  """Of one step, f32 scalars, before its update.

  Attributes:
    loss: nats per target token.
    balance: Σ over layers of the sequence balance loss, per token, without its weight.
    index: Σ over layers of the index divergence in nats, per token; 0 where the indexer is frozen.
    grad_norm: global norm over the trained parameters, before clipping.
    learning_rate: of this step.
    max_load: tokens of the fullest expert over those of the mean one, in the worst layer.
    tokens: rows that are no padding.
    targets: tokens that carry loss.
  """

  loss: Float[Array, ""]
  balance: Float[Array, ""]
  index: Float[Array, ""]
  grad_norm: Float[Array, ""]
  learning_rate: Float[Array, ""]
  max_load: Float[Array, ""]
  tokens: Float[Array, ""]
  targets: Float[Array, ""]


class Gradient(NamedTuple):
  """Of a whole step.

  Attributes:
    grads: mean gradient of the trained parameters, f32.
    sums: of the step.
    counts: of the step.
    load: tokens of every expert.
  """

  grads: nnx.State
  sums: loss.Sums
  counts: loss.Counts
  load: Float[Array, "layers E"]


def _model(config: Config) -> Transformer:
  """Drawn from `train.seed`, with adapters if there are to be."""
  seed = config.train.seed if config.train else 0
  model = Transformer(config.model, config.compute, rngs=nnx.Rngs(seed))
  return adapt(model, config.lora, rngs=nnx.Rngs(seed + 1))


@functools.lru_cache(maxsize=8)
def abstract_model(config: Config) -> tuple[nnx.GraphDef, nnx.State]:
  """Graph and parameter shapes of the experiment's model; allocates nothing."""
  graphdef, params = nnx.split(nnx.eval_shape(lambda: _model(config)))
  if config.compute.stored_base:
    groups, _ = _groups(config, params)
    params = quantised.abstract(params, lambda path: groups[path] == "frozen")
    leaves = jax.tree.leaves(params, is_leaf=quantised.is_quantised)
    stored = any(map(quantised.is_quantised, leaves))
    require(stored, "compute.stored_base", True, "False where no weight of FP8 or FP4 is frozen")
  return graphdef, params


def _groups(config: Config, params: nnx.State) -> tuple[dict, tuple[str, ...]]:
  """Optimiser groups, and the patterns of what index loss, adapters and configuration freeze."""
  frozen = config.train.frozen
  if config.train.index_loss == "warmup":
    frozen += (_ALL_BUT_INDEXER,)
  elif config.train.index_loss == "frozen" and Schedule.from_config(config.model).index_sources:
    frozen += (INDEXER,)
  trainable = config.train.trainable
  if config.lora is not None:
    also = "".join(f"|.*(?:{pattern})" for pattern in trainable)
    frozen += (rf"^(?!.*\.lora\.lora_[ab]$|.*ffn\.gate\.bias{also})",)
  groups = optimizer.parameter_groups(params, frozen)
  for pattern in trainable:
    require(
        any(re.search(pattern, ".".join(path)) for path in groups), "train.trainable", pattern,
        "a regular expression that finds a parameter",
    )  # fmt: skip
  return groups, frozen


def _schedule(config: Config) -> optax.Schedule:
  t = config.train
  return learning_rate_schedule(
      t.schedule, t.learning_rate, t.warmup_steps, t.steps, t.final_learning_rate
  )


def _optimizer(config: Config, params: nnx.State) -> optax.GradientTransformation:
  t = config.train
  return optimizer.make_optimizer(
      params,
      learning_rate=_schedule(config),
      clip_norm=t.clip_norm,
      weight_decay=t.weight_decay,
      frozen=_groups(config, params)[1],
      engram_lr_scale=t.engram_lr_scale,
  )


def trained(config: Config, params: nnx.State) -> nnx.State:
  """The parameters that have gradients and optimiser state, of a tree or of its shapes."""
  return _of_groups(config, params, ("router_bias", "frozen"))


def changing(config: Config, params: nnx.State) -> nnx.State:
  """The parameters that a run from `train.init` changes, and so saves; all without `init`."""
  return _of_groups(config, params, ("frozen",)) if config.train.init else params


def _of_groups(config: Config, params: nnx.State, without: tuple[str, ...]) -> nnx.State:
  """Parameters outside of some groups. The codes of stored weights have paths below a weight's."""
  groups, _ = _groups(config, params)
  chosen = lambda path, _: groups.get(tuple(map(str, path)), "frozen") not in without
  return nnx.filter_state(params, chosen)


def init_state(config: Config, mesh: Mesh | None = None) -> TrainState:
  """State before the first step: drawn from `train.seed`, the same numbers on every mesh.

  Every process draws all of it: a model larger than a host starts from `train.init`.

  Raises:
    ValueError: the optimiser refuses the configuration (see `make_optimizer`), or `train.init` is
      no checkpoint of this model.
  """
  if config.train.init:
    return _started(config, mesh)
  # Not jitted: one program with every draw compiles twice as long as its kernels one by one.
  params = nnx.state(_model(config))
  opt_state = _optimizer(config, params).init(trained(config, params))
  state = TrainState(params, opt_state, jnp.zeros((), jnp.int32))
  if mesh is None:
    return state
  return sharding.put(state, state_shardings(config, mesh))


def base_parameters(config: Config, mesh: Mesh | None = None) -> nnx.State:
  """The parameters of `train.init`: all but adapters, which it has none of.

  Raises:
    ValueError: see `read_base`.
  """
  wanted = abstract_state(config, mesh).params
  base = nnx.filter_state(wanted, lambda path, _: not is_adapter(tuple(map(str, path))))
  return read_base(config.train.init, config, base)


def _started(config: Config, mesh: Mesh | None) -> TrainState:
  """The parameters of `train.init` and a fresh rest."""
  wanted = abstract_state(config, mesh)
  low_rank = lambda path, _: is_adapter(tuple(map(str, path)))
  params = base_parameters(config, mesh)
  if config.lora is not None:
    shardings = jax.tree.map(lambda a: a.sharding, nnx.filter_state(wanted.params, low_rank))
    draw = lambda: nnx.filter_state(nnx.state(_model(config)), low_rank)
    drawn = jax.jit(draw, out_shardings=None if mesh is None else shardings)()
    params = nnx.merge_state(params, drawn)
  shardings = None
  if mesh is not None:
    shardings = jax.tree.map(lambda a: a.sharding, (wanted.opt_state, wanted.step))
  init = lambda params: _optimizer(config, params).init(trained(config, params))
  start = lambda params: (init(params), jnp.zeros((), jnp.int32))
  return TrainState(params, *jax.jit(start, out_shardings=shardings)(params))


def _specs(config: Config, params: nnx.State, mesh: Mesh) -> Any:
  return sharding.parameter_specs(params, mesh, dense=config.compute.spread_dense)


def abstract_state(config: Config, mesh: Mesh | None = None) -> TrainState:
  """Shapes of the state, with shardings if there is a mesh; allocates nothing."""
  _, params = abstract_model(config)
  opt_state = jax.eval_shape(_optimizer(config, params).init, trained(config, params))
  state = TrainState(params, opt_state, jax.ShapeDtypeStruct((), jnp.int32))
  if mesh is None:
    return state
  specs = TrainState(
      _specs(config, params, mesh),
      sharding.state_specs(
          opt_state, trained(config, params), mesh, dense=config.compute.spread_dense
      ),
      PartitionSpec(),
  )
  return sharding.shapes(state, specs, mesh)


def state_shardings(config: Config, mesh: Mesh) -> TrainState:
  """Where the state lies."""
  return jax.tree.map(lambda a: a.sharding, abstract_state(config, mesh))


def make_gradient(
    graphdef: nnx.GraphDef, config: Config, mesh: Mesh | None = None
) -> Callable[..., Gradient]:
  """Gradient of a step's loss over a batch [G, B, T], G micro-batches in turn.

  The loss is (Σ nll) / targets + (weighted Σ balance + weighted Σ index divergence) / tokens, with
  the counts of the whole step: accumulation equals one batch, whatever the micro-batches hold. A
  step without any target or token divides by 1 and has gradient zero. In the index warm-up the
  index divergence is the whole loss.

  Args:
    graphdef: of the model.
    config: its `train` section chooses the terms and the trained parameters.
    mesh: of the parameters and the batch; None for one device.

  Returns:
    A function of parameters, batch and, for distillation, the teacher.
  """
  t = config.train
  shapes = abstract_model(config)[1]

  def micro_loss(chosen, params, micro, counts, teacher):
    model = nnx.merge(graphdef, nnx.merge_state(params, chosen))
    sums, load = loss.sums(model, micro, index_loss=t.index_loss, how=t.rollout, teacher=teacher)
    targets, tokens = (jnp.maximum(n, 1.0) for n in counts)
    total = t.index_loss_weight * sums.index / tokens
    if t.index_loss != "warmup":
      total = total + sums.nll / targets + t.balance_loss * sums.balance / tokens
    return total, (sums, load)

  def gradient(params, batch, teacher=None):
    counts = everywhere(loss.Counts.of(batch))
    chosen = trained(config, params)

    def micro(one):
      grads, (sums, load) = jax.grad(micro_loss, has_aux=True)(chosen, params, one, counts, teacher)
      return jax.tree.map(lambda g: g.astype(jnp.float32), grads), sums, load

    first = jax.tree.map(lambda a: a[0], batch)
    if batch.tokens.shape[0] == 1:
      grads, sums, load = micro(first)
    else:
      zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(micro, first))
      add = lambda total, one: (jax.tree.map(jnp.add, total, micro(one)), None)
      (grads, sums, load), _ = jax.lax.scan(add, zeros, batch)
    if mesh is not None:
      grads = sharding.summed(grads, grad_specs)
    return Gradient(grads, everywhere(sums), counts, everywhere(load))

  if mesh is None:
    everywhere = lambda a: a
    return gradient
  # Inside, a device differentiates its share of the loss; collectives add up what others have.
  everywhere = lambda a: jax.lax.psum(a, sharding.AXES)
  grad_specs = _specs(config, trained(config, shapes), mesh)
  everyone = PartitionSpec()

  def split(params, batch, *teacher):
    theirs = (
        sharding.parameter_specs(one, mesh, dense=one.compute.spread_dense) for one in teacher
    )
    return jax.shard_map(
        gradient,
        mesh=mesh,
        in_specs=(_specs(config, shapes, mesh), batch_specs(batch, leading=1), *theirs),
        out_specs=Gradient(grad_specs, everyone, everyone, everyone),
        check_vma=False,
    )(params, batch, *teacher)

  return split


def _moved_biases(
    params: nnx.State, load: Float[Array, "layers E"], config: Config, groups: dict
) -> nnx.State:
  """Router biases after the step's loads: a run of n layers takes its n rows of `load`."""
  lengths = [len(run) for run in Schedule.from_config(config.model).runs]

  def move(key, leaf):
    path = path_names(key)
    if groups[path] != "router_bias" or path[-1] != "bias":
      return leaf
    start = sum(lengths[: int(path[1])])
    rows = load[start : start + leaf.shape[0]]
    return optimizer.router_bias_update(leaf, rows, config.train.router_bias_speed)

  return jax.tree_util.tree_map_with_path(move, params)


def make_step(
    graphdef: nnx.GraphDef, config: Config, mesh: Mesh | None = None
) -> Callable[..., tuple[TrainState, Metrics]]:
  """The compiled step. It donates its state: the one passed in must not be used again.

  Updates are added in f32 and rounded to the parameters' dtype. Router biases move after it, by
  the loads of all micro-batches, unless they are frozen.

  Args:
    graphdef: of the model.
    config: the experiment.
    mesh: of the state and the batch; None for one device.

  Returns:
    A jitted function of state, batch [G, B, T] and, for distillation, the teacher's model.

  Raises:
    ValueError: the optimiser refuses the configuration.
  """
  shapes = abstract_model(config)[1]
  transform, schedule = _optimizer(config, shapes), _schedule(config)
  groups, _ = _groups(config, shapes)
  gradient = make_gradient(graphdef, config, mesh)
  f32 = jnp.float32

  def apply(param, update):
    return (param.astype(f32) + update.astype(f32)).astype(param.dtype)

  def step(state, batch, *teacher):
    grads, sums, counts, load = gradient(state.params, batch, *teacher)
    chosen = trained(config, state.params)
    updates, opt_state = transform.update(grads, state.opt_state, chosen)
    params = nnx.merge_state(state.params, jax.tree.map(apply, chosen, updates))
    if config.train.router_bias_speed:
      params = _moved_biases(params, load, config, groups)
    targets, tokens = (jnp.maximum(n, 1.0) for n in counts)
    mean_load = jnp.maximum(load.mean(axis=-1), 1 / load.shape[-1])
    metrics = Metrics(
        loss=sums.nll / targets,
        balance=sums.balance / tokens,
        index=sums.index / tokens,
        grad_norm=optax.tree.norm(grads),
        learning_rate=jnp.asarray(schedule(state.step), f32),
        max_load=jnp.max(load.max(axis=-1) / mean_load),
        tokens=counts.tokens,
        targets=counts.targets,
    )
    return TrainState(params, opt_state, state.step + 1), metrics

  if mesh is None:
    return jax.jit(step, donate_argnums=0)
  everyone = NamedSharding(mesh, PartitionSpec())
  return jax.jit(step, donate_argnums=0, out_shardings=(state_shardings(config, mesh), everyone))


def make_eval(
    graphdef: nnx.GraphDef, config: Config, mesh: Mesh | None = None
) -> Callable[[nnx.State, Batch], tuple[Float[Array, ""], Float[Array, ""]]]:
  """The compiled evaluation of a batch [B, T]: Σ nll in nats, and the number of targets."""

  def evaluate(params, batch):
    sums, _ = loss.sums(nnx.merge(graphdef, params), batch, index_loss="frozen")
    found = sums.nll, jnp.sum(batch.weights)
    return found if mesh is None else jax.lax.psum(found, sharding.AXES)

  if mesh is None:
    return jax.jit(evaluate)
  specs = _specs(config, abstract_model(config)[1], mesh), sharding.batch_spec()
  return jax.jit(
      jax.shard_map(evaluate, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
  )
