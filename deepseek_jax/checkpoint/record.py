"""The record of a training checkpoint: what every array must be, and a digest of itself."""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

# 1 was the SHA-256 of each array's bytes, which one host had to hold.
FORMAT = 2


class DamagedError(ValueError):
  """A checkpoint is not what was saved."""


class FormatError(ValueError):
  """A checkpoint is whole, but its record is of another format."""


def entry(shape: tuple[int, ...], dtype: Any, checksum: str) -> dict[str, Any]:
  """What a record says of an array."""
  return {"shape": list(shape), "dtype": str(jnp.dtype(dtype)), "checksum": checksum}


def seal(body: Mapping[str, Any]) -> dict[str, Any]:
  """The record with this body, as Orbax is to store it."""
  body = {"format": FORMAT, **body}
  return {"sha256": _digest(body), "body": body}


def read(step: pathlib.Path) -> str:
  """Text of the record in the folder of a step.

  Raises:
    OSError: there is none.
    ValueError: it is no text.
  """
  return (step / "record" / "metadata").read_text(encoding="utf-8")


def parse(text: str, step: Any) -> dict[str, Any]:
  """The body of a record.

  Args:
    text: as `read` gives it.
    step: for messages.

  Raises:
    DamagedError: it is not whole.
    FormatError: it is, and of another format.
  """
  try:
    found = json.loads(text)
    body, digest = found["body"], found["sha256"]
  except (ValueError, TypeError, KeyError) as error:
    raise DamagedError(f"checkpoint {step} has no whole record ({error!r})") from None
  if digest != _digest(body):
    raise DamagedError(f"checkpoint {step}: its record does not have its own digest")
  if (found := body.get("format", 1)) != FORMAT:
    raise FormatError(
        f"checkpoint {step} has a record of format {found}; this version reads format {FORMAT}"
        " alone, use the version that wrote it"
    )
  return body


def _digest(body: Any) -> str:
  return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
