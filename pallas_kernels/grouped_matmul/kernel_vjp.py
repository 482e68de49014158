"""Gradient with respect to the rows, from the packed words; the weights are frozen."""

import functools

import jax

from pallas_kernels.grouped_matmul import kernel


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(sizes, transposed_sizes, x, weights, at, transposed_at):
  """Rows x [S, K] times the matrices of the groups, [S, N]."""
  return kernel.run(x, weights, at, sizes, transposed=False)


def _save(sizes, transposed_sizes, x, weights, at, transposed_at):
  return product(sizes, transposed_sizes, x, weights, at, transposed_at), (weights, transposed_at)


def _pull(sizes, transposed_sizes, saved, cotangent):
  weights, at = saved
  return kernel.run(cotangent, weights, at, transposed_sizes, transposed=True), None, None, None


product.defvjp(_save, _pull)
