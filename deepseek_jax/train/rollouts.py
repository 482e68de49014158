"""Responses of the model in training, written as they are served, in one compiled program.

A prompt is read by the plan of its serving arm: cold, or a bounded replay behind global entries
that an earlier turn left. Tokens are then written one row at a time over the same packed caches.
The experts of every row come back with the tokens: training sends the rows to the same ones.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from deepseek_jax import sharding
from deepseek_jax import tokenizer as tok
from deepseek_jax.cache import Cache
from deepseek_jax.config import CacheFormats
from deepseek_jax.nn.attention import Pass
from deepseek_jax.nn.rows import Rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.serve import decode, prefill, replay
from deepseek_jax.serve.replay import Plan

_RECORDED = Pass(routes=True)


class Part(NamedTuple):
  """Rows of all lines that are read together, padded on the right."""

  tokens: Int[np.ndarray, "B T"]
  rows: Rows
  ngrams: Int[np.ndarray, "B T n"] | None


class Written(NamedTuple):
  """Responses [B, n] and the experts of all rows that were read, layer by layer, −1 for padding.

  Attributes:
    tokens: sampled ids, the stop token included.
    live: where a token was written.
    logprobs: of the tokens, in nats, at the temperature they were drawn with.
    read: experts of the encoder's rows of each part.
    answered: experts of the decoder's rows of the last part.
    encoder, decoder: of the rows of the written tokens; behind the end of a line they mean nothing.
  """

  tokens: Int[Array, "B n"]
  live: Bool[Array, "B n"]
  logprobs: Float[Array, "B n"]
  read: tuple[Int[Array, "layers B T X"], ...]
  answered: Int[Array, "layers B T X"]
  encoder: Int[Array, "layers B n X"]
  decoder: Int[Array, "layers B n X"]


def parts_of(
    prompts: Sequence[np.ndarray], plans: Sequence[Plan], *, longest: int, window: int,
    classes: np.ndarray | None, pad_class: int, order: int, replays: bool,
) -> tuple[list[Part], np.ndarray]:  # fmt: skip
  """The rows of prompts in the order in which they are read, and the decoder's floors.

  First what made the entries that a replay finds, or all that the encoder reads alone; then the
  replay's rows before the decoder begins; at last the rows of both stacks. With `replays` there are
  always three parts, so that one program is compiled.
  """
  lines: list[list] = [[], [], []]
  for text, plan in zip(prompts, plans, strict=True):
    known = None if classes is None else tok.classes_of(text, classes)
    ngrams = None if known is None else tok.ngrams(known, pad_class, order)
    earlier = Rows.of_segments(np.ones(plan.cached, np.int32))
    own, cut = plan.encoder_rows(), plan.decoder_start - plan.encoder_start
    first = plan.cached > 0
    for target, rows in zip(
        lines,
        (
            earlier if first else jax.tree.map(lambda a, n=cut: a[:n], own),
            jax.tree.map(lambda a, n=cut if first else 0: a[:n], own),
            jax.tree.map(lambda a, n=cut: a[n:], own),
        ),
    ):
      at = rows.positions
      target.append((rows, text[at], None if ngrams is None else ngrams[at]))
  exact = all(plan.arm == "A" for plan in plans)
  lengths = longest, longest if replays else 0, window
  if exact:
    lengths = 0, 0, longest
  chunks = [prefill.Chunk(line, 0, n) for line, n in zip(lines, lengths) if n]
  floors = np.array([plan.decoder_floor for plan in plans], np.int32)
  return [Part(c.tokens, c.rows, c.ngrams) for c in chunks], floors


def _routes(outs, rows: Rows) -> Int[Array, "layers B T X"]:
  return jnp.where((rows.segments > 0)[..., None], jnp.stack([o.routes for o in outs]), -1)


def write(
    model: Transformer, cache: Cache, parts: list[Part], floors: Int[np.ndarray, " B"],
    classes: Int[np.ndarray, " V"] | None, seed: tuple[int, int], *, new: int, temperature: float,
    stop: int, mesh: Mesh | None = None,
) -> Written:  # fmt: skip
  """Reads prompts and writes up to `new` tokens behind each.

  Args:
    model: the policy; on a mesh where it lies there.
    cache: empty.
    parts: from `parts_of`.
    floors: of the decoder.
    classes: Engram class of every id, or None.
    seed: of the run and of the rollout; a line's draws depend on it, on the line and on the step
      alone.
    new: tokens of a response at most.
    temperature: of the draws; 0 takes the likeliest token.
    stop: id that ends a response.
    mesh: whose devices write a share of the lines each; every process has them all afterwards.
  """
  lines = np.arange(len(floors), dtype=np.int32)
  rest = cache, parts, floors.astype(np.int32), lines, classes, np.array(seed, np.int32)
  if mesh is not None:
    rest = sharding.put(rest, sharding.placed(_specs(*rest), mesh))
  return program(model, *rest, new=new, temperature=temperature, stop=stop, mesh=mesh)


def _specs(cache: Cache, *rest: Any) -> tuple:
  """PartitionSpecs of `program`'s arguments behind the model."""
  line, everyone = PartitionSpec(sharding.LINES), PartitionSpec()
  of = lambda tree, spec: jax.tree.map(lambda _: spec, tree)
  specs = map(of, rest, (line, line, line, everyone, everyone))
  return sharding.cache_specs(cache), *specs


@functools.partial(jax.jit, static_argnames=("new", "temperature", "stop", "mesh"))
def program(model: Transformer, *rest: Any, mesh: Mesh | None, **how: Any) -> Written:
  """`write`, compiled; on a mesh in one `shard_map`."""
  if mesh is None:
    return _written(model, *rest, **how)
  line, by_layer = PartitionSpec(sharding.LINES), PartitionSpec(None, sharding.LINES)
  weights = sharding.parameter_specs(model, mesh, dense=model.compute.spread_dense)
  found = jax.shard_map(
      lambda model, *rest: _written(model.with_whole_ends(), *rest, **how),
      mesh=mesh, in_specs=(weights, *_specs(*rest)),
      out_specs=Written(line, line, line, by_layer, by_layer, by_layer, by_layer), check_vma=False,
  )(model, *rest)  # fmt: skip
  everyone = NamedSharding(mesh, PartitionSpec())
  return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, everyone), found)


def _written(
    model: Transformer, cache: Cache, parts: list[Part], floors: Int[Array, " B"],
    lines: Int[Array, " B"], classes: Int[Array, " V"] | None, seed: Int[Array, "2"], *, new: int,
    temperature: float, stop: int,
) -> Written:  # fmt: skip
  key, read = jax.random.fold_in(jax.random.key(seed[0]), seed[1]), []
  for part in parts[:-1]:
    encoded = model.encode(part.tokens, part.rows, part.ngrams, cache, how=_RECORDED)
    cache = prefill.advance(encoded.cache, part.rows, part.ngrams, None)
    read.append(_routes(encoded.outs, part.rows))
  last = parts[-1]
  below = jnp.broadcast_to(floors[:, None], last.tokens.shape)
  out = prefill.extend_rows(model, cache, last.tokens, last.rows, last.ngrams, below, how=_RECORDED)
  read.append(_routes(out.encoder, last.rows))
  newest = jnp.sum(last.rows.segments > 0, axis=1)[:, None, None] - 1
  logits = model.logits(jnp.take_along_axis(out.hidden, newest, axis=1))[:, 0]
  one = lambda a: a[:, None]

  def body(state, number):
    cache, logits, live = state
    logp = jax.nn.log_softmax(logits / (temperature or 1.0))
    keys = jax.vmap(lambda line: jax.random.fold_in(jax.random.fold_in(key, line), number))(lines)
    drawn = jax.vmap(jax.random.categorical)(keys, logp)
    tokens = (drawn if temperature else jnp.argmax(logits, axis=-1)).astype(jnp.int32)
    chosen = jnp.take_along_axis(logp, one(tokens), axis=-1)[:, 0]
    written = live
    live = live & (tokens != stop)
    out = decode.advance_row(model, cache, tokens, live, classes, _RECORDED)
    experts = (jnp.stack([o.routes[:, 0] for o in outs]) for outs in (out.encoder, out.decoder))
    return (out.cache, model.logits(out.hidden)[:, 0], live), (tokens, written, chosen, *experts)

  answered = _routes(out.decoder, last.rows)
  start = out.cache, logits, jnp.ones(floors.shape, bool)
  _, (tokens, live, logprobs, encoder, decoder) = jax.lax.scan(body, start, jnp.arange(new))
  across = lambda a: jnp.moveaxis(a, 0, 1)
  return Written(
      across(tokens), across(live), across(logprobs), tuple(read), answered,
      jnp.moveaxis(encoder, 0, 2), jnp.moveaxis(decoder, 0, 2),
  )  # fmt: skip


def empty_cache(model: Transformer, lines: int, tokens: int, pad_class: int) -> Cache:
  """For `tokens` tokens a line, in the formats that the model rounds to."""
  storage = CacheFormats.of(model.compute)
  return Cache.init(model.config, storage, batch=lines, capacity=tokens, pad_class=pad_class)


def plan_of(length: int, hit: int, window: int, *, narrowed: bool) -> Plan:
  """Arm A where no replay is trained, else B, or D behind a hit."""
  if not narrowed:
    return replay.exact(length)
  return replay.replayed(length, hit, window) if hit else replay.cold(length, window)
