"""The report's optimisers (training, optimisers): one rule per parameter, one transformation."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from deepseek_jax.parameter_paths import path_names
from deepseek_jax.train import updates

Group = Literal["muon", "sinkhorn", "adamw", "adamw_no_decay", "router_bias", "frozen"]
Split = Literal["", "heads", "index heads", "output groups"]
# Any pytree of arrays whose key paths spell the parameter names.
Params = Any

MOMENTUM = 0.95
UPDATE_RMS = 0.18


class Rule(NamedTuple):
  """One row of the table below.

  Attributes:
    pattern: regular expression that the whole dotted path, without `runs.{r}.`, must match.
    group: the optimiser of the parameter.
    split: what the rows of each matrix are cut into before Muon sees it; "" leaves it whole.
  """

  pattern: str
  group: Group
  split: Split = ""


# hc_*_fn are the one open choice. V4's list (AdamW for embedding, head, norms, static biases and
# gating factors; Muon for the rest) would put them under Muon. Their 24 rows are logits of three
# kinds (collapse, expand, mixing) with norm weights folded into the columns; orthogonalising would
# force one update size on all rows, so they stay with AdamW until a run shows otherwise.
RULES = (
    Rule(r"attn\.wq_b\.weight", "muon", "heads"),
    Rule(r"attn\.indexer\.wq_b\.weight", "muon", "index heads"),
    Rule(r"attn\.wo_a\.weight", "muon", "output groups"),
    Rule(r"attn\.(wq_a|wkv|wo_b)\.weight", "muon"),
    Rule(r"attn\.compressor\.(wkv|wgate)\.weight", "muon"),
    Rule(r"attn\.indexer\.(weights_proj|wk)\.weight", "muon"),
    Rule(r"ffn\.gate\.weight", "muon"),
    Rule(r"ffn\.(experts|shared_experts)\.w[123]\.weight", "muon"),
    Rule(r"engram\.wkv\.weight", "muon"),
    Rule(r"(embed|head|engram\.embed)\.weight", "sinkhorn"),
    Rule(r"(norm|attn_norm|ffn_norm)\.weight", "adamw"),
    Rule(r"attn\.(q_norm|kv_norm|compressor\.norm|indexer\.k_norm)\.weight", "adamw"),
    Rule(r"engram\.(q_weight|k_weight)", "adamw"),
    Rule(r"hc_(attn|ffn)_fn", "adamw"),
    Rule(r"hc_(attn|ffn)_(base|scale)", "adamw_no_decay"),
    Rule(r"attn\.attn_sink", "adamw_no_decay"),
    Rule(r"ffn\.gate\.(bias|bias_vl)", "router_bias"),
    # Of rank r by construction: Muon would force one size on all r directions from the first step.
    Rule(r".*\.lora\.lora_[ab]", "adamw"),
    # Codes of weights that stay as released: no number that a step could move.
    Rule(r".*\.weight\.value\.(codes|scales)", "frozen"),
)
_UNTRAINED = ("router_bias", "frozen")


def _rule(path: tuple[str, ...]) -> Rule:
  dotted = ".".join(path)
  name = re.sub(r"^runs\.\d+\.", "", dotted)
  for rule in RULES:
    if re.fullmatch(rule.pattern, name):
      return rule
  raise ValueError(f"parameter {dotted!r} has no optimiser group: no pattern of RULES matches it")


def label(path: tuple[str, ...], leaf: Any) -> Group:
  """Optimiser group of a parameter: the first row of `RULES` that matches its path.

  Args:
    path: names from the root of the tree, for example `("runs", "0", "ffn", "gate", "bias")`.
    leaf: anything with a `shape`.

  Returns:
    The group, never "frozen", which is a choice of the run and not of the parameter.

  Raises:
    ValueError: no row matches, or the group works on matrices and the leaf is none.
  """
  group = _rule(path).group
  if group in ("muon", "sinkhorn") and len(leaf.shape) < 2:
    raise ValueError(
        f"parameter {'.'.join(path)!r} has shape {tuple(leaf.shape)}; group {group!r} needs at"
        " least two axes"
    )
  return group


def parameter_groups(params: Params, frozen: Sequence[str] = ()) -> dict[tuple[str, ...], Group]:
  """Group of every parameter of a tree.

  Args:
    params: tree of arrays or of `jax.ShapeDtypeStruct`.
    frozen: regular expressions, searched in the dotted path (`runs.0.attn.wq_a.weight`).

  Returns:
    Path to group; "frozen" where a pattern of `frozen` matches.

  Raises:
    ValueError: an unknown parameter, an invalid pattern, or a pattern that matches nothing.
  """
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  groups = {(path := path_names(key)): label(path, leaf) for key, leaf in leaves}
  for pattern in frozen:
    try:
      matches = [path for path in groups if re.search(pattern, ".".join(path))]
    except re.error as error:
      raise ValueError(f"frozen pattern {pattern!r} is no regular expression: {error}") from error
    if not matches:
      raise ValueError(f"frozen pattern {pattern!r} matches no parameter")
    groups |= dict.fromkeys(matches, "frozen")
  return groups


def _split_count(path: tuple[str, ...], shapes: dict[tuple[str, ...], tuple[int, ...]]) -> int:
  # Head counts are read from the layer's other parameters, so they cannot disagree with the model.
  split = _rule(path).split
  if not split:
    return 1
  root = path[: path.index("attn") + 1]
  sibling, axis = {
      "heads": (("attn_sink",), -1),
      "index heads": (("indexer", "weights_proj", "weight"), -2),
      "output groups": (("wq_b", "weight"), -2),
  }[split]
  if root + sibling not in shapes:
    raise ValueError(
        f"parameter {'.'.join(path)!r} is split by {split}, which needs"
        f" {'.'.join(root + sibling)!r}; the tree has none"
    )
  rows, columns = shapes[path][-2:]
  count = shapes[root + sibling][axis]
  if split == "output groups":
    count = count // columns
  if count == 0 or rows % count:
    raise ValueError(
        f"parameter {'.'.join(path)!r} has {rows} rows; they do not divide into {count} {split}"
    )
  return count


def _muon_update(x: jax.Array, count: int) -> jax.Array:
  rows, columns = x.shape[-2:]
  heads = x.reshape(*x.shape[:-2], count, rows // count, columns)
  scale = UPDATE_RMS * math.sqrt(max(heads.shape[-2:]))
  return (updates.orthogonalize(heads) * scale).reshape(x.shape)


def _stateless_with_names(
    f: Callable[[tuple[str, ...], jax.Array], jax.Array],
) -> optax.GradientTransformation:
  def update(tree, params):
    del params
    return jax.tree_util.tree_map_with_path(lambda key, x: f(path_names(key), x), tree)

  return optax.stateless(update)


def make_optimizer(
    params: Params,
    *,
    learning_rate: float | optax.Schedule,
    clip_norm: float | None,
    weight_decay: float = 0.1,
    frozen: Sequence[str] = (),
    engram_lr_scale: float = 5.0,
) -> optax.GradientTransformation:
  """Optimiser of a whole model (report: training, optimisers; Muon's details are V4's).

  | group | update before -η |
  | --- | --- |
  | muon | M <- 0.95 M + G; `orthogonalize(0.95 M + G)` × √max(n, m) × 0.18; + λW |
  | sinkhorn | the same M; `balance(0.95 M + G)` × 0.18; no decay |
  | adamw | β 0.9, 0.95, ε 1e-20; + λW |
  | adamw_no_decay | the same without λW |
  | router_bias, frozen | nothing, no state; see `router_bias_update` |

  Muon's n × m matrices are those of one layer, expert, head of a query weight or output group.

  The momentum is the plain sum. An average, 0.05 M with 0.05 G, would give the same updates because
  both uses are free of scale. `optax.contrib.muon` is not the same: it corrects M and G for bias by
  different factors, which changes their mix for about fifty steps, and it cannot cut rows into
  heads.

  The gradient is first clipped to a global norm over the trained parameters. Everything below
  `engram` is updated at `engram_lr_scale` times the learning rate, decay included.

  Args:
    params: any pytree of arrays (or `jax.ShapeDtypeStruct`) whose key paths give the parameter
      names: nested dictionaries, `nnx.state(model, nnx.Param)`, `nnx.split` results, or a module
      that holds nothing but parameters. Weights are [..., out, in]; leading axes are never mixed.
      Only names and shapes are read. `init` and `update` take trees with these names.
    learning_rate: η, a number or a schedule of the step count.
    clip_norm: largest global gradient norm; None does not clip.
    weight_decay: λ, decoupled: W <- W - ηλW.
    frozen: regular expressions, searched in the dotted path.
    engram_lr_scale: factor on η for Engram tables, projections and gate weights.

  Returns:
    An optax transformation whose `update` needs `params`. State and arithmetic are f32 whatever the
    dtype of parameters and gradients; updates have the parameters' dtype. It works under strict
    dtype promotion.

  Raises:
    ValueError: an unknown parameter, an invalid pattern or one that matches nothing, rows that do
      not divide into heads, or a number out of range.
  """
  if not callable(learning_rate) and not 0 <= learning_rate < math.inf:
    raise ValueError(f"learning_rate is {learning_rate}; allowed: a schedule or finite and >= 0")
  if clip_norm is not None and not clip_norm > 0:
    raise ValueError(f"clip_norm is {clip_norm}; allowed: > 0, or None for no clipping")
  if not 0 <= weight_decay < math.inf:
    raise ValueError(f"weight_decay is {weight_decay}; allowed: finite and >= 0")
  if not 0 < engram_lr_scale < math.inf:
    raise ValueError(f"engram_lr_scale is {engram_lr_scale}; allowed: finite and > 0")

  groups = parameter_groups(params, frozen)
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  shapes = {path_names(key): tuple(leaf.shape) for key, leaf in leaves}
  counts = {path: _split_count(path, shapes) for path, group in groups.items() if group == "muon"}

  def by_name(f):
    return lambda tree: jax.tree_util.tree_map_with_path(lambda key, _: f(path_names(key)), tree)

  momentum = optax.trace(MOMENTUM, nesterov=True)
  # With this ε a lone gradient near 1e-19, whose square is 0 in f32, moves by up to about 20 η.
  adam = optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-20)
  decay = optax.add_decayed_weights(weight_decay)
  transform = optax.chain(
      optax.masked(optax.set_to_zero(), by_name(lambda path: groups[path] in _UNTRAINED)),
      optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm),
      optax.partition(
          {
              "muon": optax.chain(
                  momentum,
                  _stateless_with_names(lambda path, x: _muon_update(x, counts[path])),
                  decay,
              ),
              "sinkhorn": optax.chain(
                  momentum, _stateless_with_names(lambda _, x: updates.balance(x) * UPDATE_RMS)
              ),
              "adamw": optax.chain(adam, decay),
              "adamw_no_decay": adam,
              "router_bias": optax.set_to_zero(),
              "frozen": optax.set_to_zero(),
          },
          by_name(groups.__getitem__),
      ),
      optax.masked(optax.scale(engram_lr_scale), by_name(lambda path: "engram" in path)),
      optax.scale_by_learning_rate(learning_rate),
  )

  def f32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

  # optax multiplies integer step counts into floats, which strict promotion refuses.
  def init(params):
    with jax.numpy_dtype_promotion("standard"):
      return transform.init(f32(params))

  def update(grads, state, params=None):
    if params is None:
      raise ValueError("update needs params: decoupled decay reads them")
    with jax.numpy_dtype_promotion("standard"):
      steps, state = transform.update(f32(grads), state, f32(params))
    return jax.tree.map(lambda u, p: u.astype(p.dtype), steps, params), state

  return optax.GradientTransformation(init, update)


def router_bias_update(bias: jax.Array, load: jax.Array, speed: float) -> jax.Array:
  """Aux-loss-free balancing (report: load balance; V3's formula): b += speed · sign(mean - load).

  It runs after the optimiser and outside the gradient. `bias` and `bias_vl` are each updated from
  the load of their own tokens; a layer without any such token keeps its bias.

  Args:
    bias: [..., E] f32.
    load: [..., E], tokens that chose each expert in this step, integers or floats.
    speed: size of one change (report: 0.001).

  Returns:
    The new bias, [..., E], in the dtype of `bias`.

  Raises:
    ValueError: shapes differ or `speed` is not positive.
  """
  if bias.shape != load.shape:
    raise ValueError(f"load has shape {load.shape}; allowed: the shape of bias, {bias.shape}")
  if not speed > 0:
    raise ValueError(f"speed is {speed}; allowed: > 0")
  load = load.astype(jnp.float32)
  direction = jnp.sign(load.mean(axis=-1, keepdims=True) - load)
  return bias + (speed * direction).astype(bias.dtype)
