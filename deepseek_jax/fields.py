"""Typed dataclasses from mappings: the checks behind every configuration."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any


def _coerce(name: str, value: Any, kind: Any) -> Any:
  """`value` as the annotated type; lists become tuples, ints may stand for floats."""
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin in (types.UnionType, typing.Union):
    if value is None:
      return None
    (kind,) = [a for a in args if a is not type(None)]
    return _coerce(name, value, kind)
  if dataclasses.is_dataclass(kind):
    if isinstance(value, kind):
      return value
    if not isinstance(value, Mapping):
      raise ValueError(
          f"{name} must be a mapping with the fields of {kind.__name__}, got {value!r}"
      )
    return build(kind, value, prefix=f"{name}.")
  if origin is tuple:
    if not isinstance(value, (list, tuple)):
      raise ValueError(f"{name} must be a list of {args[0].__name__}, got {value!r}")
    return tuple(_coerce(f"{name}[{i}]", v, args[0]) for i, v in enumerate(value))
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
    raise ValueError(f"{name} must be {kind.__name__}, got {value!r}")
  return value


def build(cls: type, values: Mapping[str, Any], *, prefix: str = "") -> Any:
  """A config dataclass from a mapping.

  Raises:
    ValueError: a key that the class does not have, a required key that is absent, a wrong type.
  """
  fields = {f.name: f for f in dataclasses.fields(cls)}
  unknown = sorted(set(values) - set(fields))
  if unknown:
    raise ValueError(f"unknown key {prefix}{unknown[0]}; {cls.__name__} has {', '.join(fields)}")
  required = (dataclasses.MISSING, dataclasses.MISSING)
  for name, field in fields.items():
    if name not in values and (field.default, field.default_factory) == required:
      raise ValueError(f"{prefix}{name} is missing; {cls.__name__} needs it")
  hints = typing.get_type_hints(cls)
  return cls(**{k: _coerce(prefix + k, v, hints[k]) for k, v in values.items()})


def require(condition: object, field: str, value: Any, allowed: str) -> None:
  """Raises ValueError naming the field, its value and what is allowed."""
  if not condition:
    raise ValueError(f"{field} is {value!r}; it must be {allowed}")
