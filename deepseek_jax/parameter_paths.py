"""Names of parameters, the same for every tree that holds them."""

from collections.abc import Sequence
from typing import Any

import jax


def path_names(key_path: Sequence[Any]) -> tuple[str, ...]:
  """Names along a JAX key path, without the `.value` that an `nnx.Variable` adds at its end.

  Dictionaries, `nnx.State`, `nnx.split` results and the module itself give the same names:
  `("runs", "0", "attn", "wq_a", "weight")`.

  Args:
    key_path: as `jax.tree_util.tree_flatten_with_path` gives it.

  Returns:
    One string a level.
  """
  names = []
  for key in key_path:
    part = next(getattr(key, field) for field in ("key", "name", "idx") if hasattr(key, field))
    names.append(str(part))
  if names and isinstance(key_path[-1], jax.tree_util.GetAttrKey) and names[-1] == "value":
    names.pop()
  return tuple(names)
