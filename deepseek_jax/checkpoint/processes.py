"""Agreement of the processes of a run: what one of them reads or fails to read, all know."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

# No fault of a checkpoint: memory, devices, the network between processes.
FATAL = (MemoryError, jax.errors.JaxRuntimeError)


class ElsewhereError(RuntimeError):
  """Another process cannot go on."""


def from_first(make: Callable[[], Any]) -> Any:
  """What `make` returns in process 0, in every process; `make` is called there alone.

  No process returns before `make` has ended. Its result must be one that JSON keeps.

  Raises:
    Exception: that of `make`, in process 0.
    OSError: `make` has raised, in the other processes.
  """
  if jax.process_count() == 1:
    return make()
  error, text = None, b""
  if jax.process_index() == 0:
    try:
      text = json.dumps([None, make()]).encode()
    except Exception as raised:  # The other processes wait; this one raises it again below.
      error, text = raised, json.dumps([f"{type(raised).__name__}: {raised}", None]).encode()
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
  # A program for each power of two, not for each length.
  buffer = np.zeros(1 << max(8, (size - 1).bit_length()), np.uint8)
  buffer[: len(text)] = np.frombuffer(text, np.uint8)
  text = np.asarray(multihost_utils.broadcast_one_to_all(buffer))[:size].tobytes()
  if error is not None:
    raise error
  told, value = json.loads(text)
  if told is not None:
    raise OSError(f"process 0: {told}")
  return value


def together(act: Callable[[], Any]) -> Any:
  """`act()`, if no process raises in it.

  Where `act` waits for other processes, as a program over their devices does, it must not raise
  before that in some of them alone.

  Raises:
    Exception: that of `act`.
    ElsewhereError: another process has raised one of `FATAL`.
    OSError: another process has raised another exception.
  """
  if jax.process_count() == 1:
    return act()
  error = value = None
  try:
    value = act()
  except Exception as raised:  # Raised again once the other processes know.
    error = raised
  failure = 0 if error is None else 2 if isinstance(error, FATAL) else 1
  failures = np.asarray(multihost_utils.process_allgather(np.int32(failure)))
  if error is not None:
    raise error
  if failures.any():
    process = int(failures.argmax())
    kind = ElsewhereError if failures[process] == 2 else OSError
    raise kind(f"process {process} has failed; its own log says why")
  return value
