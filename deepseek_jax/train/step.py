"""One training step: gradient over micro-batches, update, router biases; compiled once."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from deepseek_jax.checkpoint import released
from deepseek_jax.config import Config
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.schedule import Schedule
from deepseek_jax.train import loss, optimizer
from deepseek_jax.train.data import Batch
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
  """Of a whole step: mean gradient (f32, the parameters' tree), sums, counts and expert loads."""

  grads: nnx.State
  sums: loss.Sums
  counts: loss.Counts
  load: Float[Array, "layers E"]


def abstract_model(config: Config) -> tuple[nnx.GraphDef, nnx.State]:
  """Graph and parameter shapes of the experiment's model; allocates nothing."""
  return nnx.split(
      nnx.eval_shape(lambda: Transformer(config.model, config.compute, rngs=nnx.Rngs(0)))
  )


def _groups(config: Config, params: nnx.State) -> tuple[dict, tuple[str, ...]]:
  """Optimiser groups, and the frozen patterns that index loss and configuration ask for."""
  frozen = config.train.frozen
  if config.train.index_loss == "warmup":
    frozen += (_ALL_BUT_INDEXER,)
  elif config.train.index_loss == "frozen" and Schedule.from_config(config.model).index_sources:
    frozen += (INDEXER,)
  return optimizer.parameter_groups(params, frozen), frozen


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


def init_state(config: Config) -> TrainState:
  """State before the first step, drawn from `train.seed`.

  Raises:
    ValueError: the optimiser refuses the configuration (see `make_optimizer`).
  """
  # Not jitted: one program with every draw compiles twice as long as its kernels one by one.
  model = Transformer(config.model, config.compute, rngs=nnx.Rngs(config.train.seed))
  params = nnx.state(model)
  opt_state = _optimizer(config, params).init(params)
  return TrainState(params, opt_state, jnp.zeros((), jnp.int32))


def make_gradient(graphdef: nnx.GraphDef, config: Config) -> Callable[[nnx.State, Batch], Gradient]:
  """Gradient of a step's loss over a batch [G, B, T], G micro-batches in turn.

  The loss is (Σ nll) / targets + (weighted Σ balance + weighted Σ index divergence) / tokens, with
  the counts of the whole step: accumulation equals one batch, whatever the micro-batches hold. A
  step without any target or token divides by 1 and has gradient zero. In the index warm-up the
  index divergence is the whole loss.

  Args:
    graphdef: of the model.
    config: its `train` section chooses the terms and the trained parameters.

  Returns:
    A function of parameters and batch; untrained parameters have gradient zero.
  """
  t = config.train
  groups, _ = _groups(config, abstract_model(config)[1])

  def trained(key, leaf):
    untrained = groups[released.path_names(key)] in ("router_bias", "frozen")
    return jax.lax.stop_gradient(leaf) if untrained else leaf

  def micro_loss(params, micro, counts):
    model = nnx.merge(graphdef, jax.tree_util.tree_map_with_path(trained, params))
    sums, load = loss.sums(model, micro, index_loss=t.index_loss)
    targets, tokens = (jnp.maximum(n, 1.0) for n in counts)
    total = t.index_loss_weight * sums.index / tokens
    if t.index_loss != "warmup":
      total = total + sums.nll / targets + t.balance_loss * sums.balance / tokens
    return total, (sums, load)

  def gradient(params, batch):
    counts = loss.Counts.of(batch)

    def micro(one):
      grads, (sums, load) = jax.grad(micro_loss, has_aux=True)(params, one, counts)
      return jax.tree.map(lambda g: g.astype(jnp.float32), grads), sums, load

    first = jax.tree.map(lambda a: a[0], batch)
    if batch.tokens.shape[0] == 1:
      grads, sums, load = micro(first)
    else:
      zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(micro, first))
      add = lambda total, one: (jax.tree.map(jnp.add, total, micro(one)), None)
      (grads, sums, load), _ = jax.lax.scan(add, zeros, batch)
    return Gradient(grads, sums, counts, load)

  return gradient


def _moved_biases(
    params: nnx.State, load: Float[Array, "layers E"], config: Config, groups: dict
) -> nnx.State:
  """Router biases after the step's loads: a run of n layers takes its n rows of `load`."""
  lengths = [len(run) for run in Schedule.from_config(config.model).runs]

  def move(key, leaf):
    path = released.path_names(key)
    if groups[path] != "router_bias" or path[-1] != "bias":
      return leaf
    start = sum(lengths[: int(path[1])])
    rows = load[start : start + leaf.shape[0]]
    return optimizer.router_bias_update(leaf, rows, config.train.router_bias_speed)

  return jax.tree_util.tree_map_with_path(move, params)


def make_step(
    graphdef: nnx.GraphDef, config: Config
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """The compiled step. It donates its state: the one passed in must not be used again.

  Updates are added in f32 and rounded to the parameters' dtype. Router biases move after it, by
  the loads of all micro-batches, unless they are frozen.

  Args:
    graphdef: of the model.
    config: the experiment.

  Returns:
    A jitted function of state and batch [G, B, T].

  Raises:
    ValueError: the optimiser refuses the configuration.
  """
  shapes = abstract_model(config)[1]
  transform, schedule = _optimizer(config, shapes), _schedule(config)
  groups, _ = _groups(config, shapes)
  gradient = make_gradient(graphdef, config)
  f32 = jnp.float32

  def apply(param, update):
    return (param.astype(f32) + update.astype(f32)).astype(param.dtype)

  def step(state, batch):
    grads, sums, counts, load = gradient(state.params, batch)
    updates, opt_state = transform.update(grads, state.opt_state, state.params)
    params = jax.tree.map(apply, state.params, updates)
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

  return jax.jit(step, donate_argnums=0)


def make_eval(
    graphdef: nnx.GraphDef, config: Config
) -> Callable[[nnx.State, Batch], tuple[Float[Array, ""], Float[Array, ""]]]:
  """The compiled evaluation of a batch [B, T]: Σ nll in nats, and the number of targets."""
  del config

  @jax.jit
  def evaluate(params, batch):
    sums, _ = loss.sums(nnx.merge(graphdef, params), batch, index_loss="frozen")
    return sums.nll, jnp.sum(batch.weights)

  return evaluate
