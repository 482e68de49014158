"""Kernels whose loops are known, for the tests of compilation and schedules."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK = (64, 512)


def fori(trips: int):
  """One loop."""

  def kernel(x, out):
    body = lambda i, c: c * 1.5 + x[pl.ds((i & 7) * 8, 8), :]
    out[...] = jax.lax.fori_loop(0, trips, body, jnp.zeros((8, 128), jnp.float32))

  return _program(kernel, f"fori{trips}")


def nested(outer: int, inner: int):
  """A loop in a loop."""

  def kernel(x, out):
    add = lambda i, c: c * 1.5 + x[pl.ds((i & 7) * 8, 8), :]
    both = lambda i, c: jax.lax.fori_loop(0, inner, add, c) + x[pl.ds((i & 7) * 8, 8), :]
    out[...] = jax.lax.fori_loop(0, outer, both, jnp.zeros((8, 128), jnp.float32))

  return _program(kernel, f"nested{outer}x{inner}")


def grid(steps: int, semantics: str = "arbitrary"):
  """A grid over blocks of 128 KiB, read and written."""

  def kernel(x, out):
    out[...] = x[...] * 2 + 1

  spec = pl.BlockSpec(BLOCK, lambda i: (i, 0))
  shape = jax.ShapeDtypeStruct((BLOCK[0] * steps, BLOCK[1]), jnp.float32)
  call = pl.pallas_call(
      kernel, grid=(steps,), in_specs=[spec], out_specs=spec, out_shape=shape,
      compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics,)), name="grid",
  )  # fmt: skip
  return call, (shape,)


def rows(steps: int, most: int = 512):
  """Copies as many single rows as its first operand says, in every step of a grid."""

  def kernel(count, index, x, out, arrived):
    copy = lambda source, i: pltpu.make_async_copy(
        x.at[pl.ds(source, 1)], out.at[pl.ds(i, 1)], arrived
    )

    @pl.loop(0, count[0])
    def _(i):
      copy(index[i], i).start()

    @pl.loop(0, count[0])
    def _(i):
      copy(0, 0).wait()

  call = pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=2,
          grid=(steps,),
          in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
          out_specs=pl.BlockSpec((most, 128), lambda i, count, index: (i, 0)),
          scratch_shapes=[pltpu.SemaphoreType.DMA],
      ),
      out_shape=jax.ShapeDtypeStruct((steps * most, 128), jnp.float32),
      name="rows",
  )
  struct = jax.ShapeDtypeStruct
  return call, (
      struct((1,), jnp.int32), struct((most,), jnp.int32), struct((1 << 16, 128), jnp.float32)
  )  # fmt: skip


def scanned(turns: int):
  """An XLA program that calls a kernel in a loop of its own."""
  kernel, (struct,) = fori(10)

  def fn(x):
    add = lambda c, _: (c.at[:8].add(kernel(c)), None)
    return jax.lax.scan(add, x, None, length=turns)[0]

  return fn, (struct,)


def twice():
  """Without a kernel, with a donated argument."""
  return (lambda x: x * 2), (jax.ShapeDtypeStruct((256, 128), jnp.float32),), (0,)


def wrong():
  """Cannot be traced."""
  raise ValueError("rows is 3; it must be 4")


def make(kind: str, sizes: list):
  """One of the programs above."""
  return globals()[kind](*sizes)


def _program(kernel, name):
  call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32), name=name)
  return call, (jax.ShapeDtypeStruct((64, 128), jnp.float32),)
