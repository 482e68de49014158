"""Visits: rows go to the devices that hold what they need, and their results come back.

Sizes are static and nothing is dropped: a round carries at most C rows from each device to each
other, and there are as many rounds as the fullest pair needs, one where loads are even. Routed
experts and the rows of Engram tables are visited.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from deepseek_jax.sharding import AXES, axis_size

# Rows that a round has room for, in multiples of an even load. More is sent in vain (the room is
# sent, used or not), less takes a second round sooner; the network carries a round's room whole.
ROOM = 1.5

# Of (weights, payload [S, ...], valid [S]): results [S, ...].
Host = Callable[[Any, Any, Array], Any]


class _Plan(NamedTuple):
  """Order of the rows by destination: row `order[i]` is the i-th of all."""

  order: Int[Array, " R"]
  destination: Int[Array, " R"]
  rank: Int[Array, " R"]
  first: Int[Array, " P"]
  load: Int[Array, " P"]


def _plan(destination: Int[Array, " R"], devices: int) -> _Plan:
  rows = destination.shape[0]
  order = jnp.argsort(destination, stable=True)
  place = jnp.zeros(rows, jnp.int32).at[order].set(jnp.arange(rows, dtype=jnp.int32))
  load = jnp.sum(destination[:, None] == jnp.arange(devices), axis=0, dtype=jnp.int32)
  first = jnp.cumsum(load) - load
  rank = place - first[jnp.minimum(destination, devices - 1)]
  return _Plan(order, destination, rank, first, load)


def _round(host: Host, room: int, axes: tuple[str, ...], number, weights, payload, plan: _Plan):
  """Results of the rows that round `number` carries, zeros for all others."""
  devices, rows = plan.load.shape[0], plan.order.shape[0]
  rank = number * room + jnp.arange(room)
  sent = rank < plan.load[:, None]
  at = plan.order[jnp.clip(plan.first[:, None] + rank, 0, rows - 1)]
  swap = functools.partial(lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True)
  flat = lambda a: a.reshape(devices * room, *a.shape[2:])
  received = jax.tree.map(lambda a: flat(swap(a[at // (rows // a.shape[0])])), payload)
  results = host(weights, received, flat(swap(sent)))
  home = jax.tree.map(lambda a: flat(swap(a.reshape(devices, room, *a.shape[1:]))), results)
  mine = (plan.rank // room == number) & (plan.destination < devices)
  back = jnp.where(mine, plan.destination * room + plan.rank % room, 0)
  put = lambda a: jnp.where(mine.reshape(-1, *(1,) * (a.ndim - 1)), a[back], jnp.zeros((), a.dtype))
  return jax.tree.map(put, home)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rounds(host, room, axes, weights, payload, plan, rounds):
  """All rounds, in a loop: one is compiled, and none runs that is not needed."""
  run = functools.partial(_round, host, room, axes)
  like = jax.eval_shape(run, jnp.int32(0), weights, payload, plan)
  zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)

  def body(state):
    number, total = state
    return number + 1, jax.tree.map(jnp.add, total, run(number, weights, payload, plan))

  return lax.while_loop(lambda s: s[0] < rounds, body, (jnp.int32(0), zeros))[1]


def _forward(host, room, axes, weights, payload, plan, rounds):
  out = _rounds(host, room, axes, weights, payload, plan, rounds)
  return out, (weights, payload, plan, rounds)


def _backward(host, room, axes, saved, d):
  weights, payload, plan, rounds = saved
  # Integers have no gradient: they are set aside.
  floats = lambda a: jnp.issubdtype(a.dtype, jnp.inexact)
  leaves, treedef = jax.tree.flatten((weights, payload))
  moving = [a for a in leaves if floats(a)]

  def run(number, moving):
    it = iter(moving)
    weights, payload = treedef.unflatten([next(it) if floats(a) else a for a in leaves])
    return _round(host, room, axes, number, weights, payload, plan)

  def body(state):
    number, total = state
    (new,) = jax.vjp(functools.partial(run, number), moving)[1](d)
    return number + 1, [a + b for a, b in zip(total, new)]

  start = jnp.int32(0), [jnp.zeros_like(a) for a in moving]
  found = iter(lax.while_loop(lambda s: s[0] < rounds, body, start)[1])
  weights, payload = treedef.unflatten([next(found) if floats(a) else None for a in leaves])
  return weights, payload, None, None


_rounds.defvjp(_forward, _backward)


def room(rows: int, devices: int) -> int:
  """Rows of a round from one device to another."""
  even = -(-rows * ROOM // devices)
  return min(rows, -(-int(even) // 8) * 8)


def visit(
    host: Host, weights: Any, payload: Any, destination: Int[Array, " R"], axes: tuple[str, ...]
) -> Any:
  """Results of every row from the device it names, in the rows' order; differentiable.

  Args:
    host: function of (weights, rows [S, ...], valid [S]) that gives results [S, ...]; what it makes
      of invalid rows is not read. It must not close over traced arrays.
    weights: of this device, for its `host`.
    payload: tree of arrays [R, ...] to send. An array of R / k rows has one for k rows in turn.
    destination: number of the device along `axes`; the number of devices for a row that stays
      home, whose result is zero.
    axes: mesh axes of the `shard_map` that is being traced.
  """
  devices, rows = axis_size(axes), destination.shape[0]
  if devices == 1:
    return _at_home(host, weights, payload, destination)
  plan, size = _plan(destination, devices), room(rows, devices)
  # The same number everywhere, also where other devices are visited: loops stay in step.
  rounds = lax.pmax(-(-jnp.max(plan.load) // size), AXES)
  return _rounds(host, size, axes, weights, payload, plan, rounds)


def _at_home(host, weights, payload, destination):
  valid, rows = destination == 0, destination.shape[0]
  payload = jax.tree.map(lambda a: jnp.repeat(a, rows // a.shape[0], axis=0), payload)
  keep = lambda a: jnp.where(valid.reshape(-1, *(1,) * (a.ndim - 1)), a, jnp.zeros((), a.dtype))
  return jax.tree.map(keep, host(weights, payload, valid))
