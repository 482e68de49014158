"""Which implementation of an op runs."""

from collections.abc import Sequence

import jax


def resolve(implementation: str | None, available: Sequence[str]) -> str:
  """Returns the implementation to run: "pallas", "reference", or what the op names in `available`.

  `None` is the Pallas kernel on a TPU where the op has one, the reference everywhere else. A name
  is obeyed whatever the backend, so that a kernel can be compiled ahead of time or interpreted.

  Raises:
    ValueError: `implementation` is a name that the op does not offer.
  """
  if implementation is None:
    on_tpu = jax.default_backend() == "tpu"
    return "pallas" if on_tpu and "pallas" in available else "reference"
  if implementation not in available:
    allowed = ", ".join(repr(name) for name in available)
    raise ValueError(f"implementation={implementation!r}: allowed are None, {allowed}")
  return implementation
