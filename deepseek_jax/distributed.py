"""Several processes as one run: they join, agree, stop and fail together.

JAX's coordination service, a small server in process 0, carries all of this; devices carry only
arrays. Whatever one process waits for has a timeout and ends in a sentence: JAX itself hangs, or
aborts the process, where a peer is missing or was started with other numbers.
"""

import atexit
import collections
import contextlib
import importlib.metadata
import itertools
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from absl import logging

# No public function hands out the key-value store; Orbax reads the same attribute. The public
# multihost_utils run collectives on the devices: without a timeout, a missing peer is a hang.
from jax._src import cloud_tpu_init
from jax._src.distributed import global_state as _state
from jax.experimental import multihost_utils

from deepseek_jax.fields import require

_POLL_SECONDS = 1.0
_ALIVE, _FAILED, _SILENT = (f"deepseek_jax/{name}" for name in ("alive", "failed", "silent"))


class Disagreement(ValueError):
  """Processes gave different values; all of them raise it."""


class _Group(NamedTuple):
  process: int
  count: int


_group: _Group | None = None
_watch: "_Watch | None" = None
# True once this process cannot take part in JAX's shutdown, which waits for all.
_broken = False
_agreements = itertools.count()
# Of the process, not of a `Terminations`: JAX compares it with the step it has fixed.
_steps = itertools.count(1)


def _put(folder: str, process: int, told: str) -> None:
  _state.client.key_value_set(f"{folder}/{process}", told, allow_overwrite=True)


def _read(folder: str) -> dict[int, str]:
  entries = _state.client.key_value_dir_get(folder)
  return {int(key.rpartition("/")[2]): told for key, told in entries}


def _named(processes: set[int]) -> str:
  return f"process{'es' * (len(processes) > 1)} {', '.join(map(str, sorted(processes)))}"


def initialize(
    address: str | None = None, processes: int | None = None, process_id: int | None = None, *,
    timeout_seconds: int = 300, heartbeat_seconds: int = 15,
) -> None:  # fmt: skip
  """Joins the other processes of the run. Called once, before any device is touched.

  Without the first three arguments, a Cloud TPU worker joins those of its slices (JAX reads their
  addresses from the machine's metadata or, on GKE, the environment); any other machine is a run of
  one process. From then on a peer that dies ends this process too: see `docs/pods.md`.

  Args:
    address: HOST:PORT of process 0, which opens that port.
    processes: number of processes.
    process_id: of this one, from 0.
    timeout_seconds: for all processes to have joined.
    heartbeat_seconds: a process not heard for as long is taken for dead.

  Raises:
    ValueError: unfit arguments; another number of processes joined than was said, or than the
      devices belong to.
    TimeoutError: no coordinator, or not all processes, within the timeout.
    RuntimeError: called twice, or after a device was touched.
  """
  global _group, _watch
  if _group is not None:
    raise RuntimeError("distributed.initialize was called before; a process joins a run once")
  given = {"address": address, "processes": processes, "process_id": process_id}
  absent = [name for name, value in given.items() if value is None]
  if 0 < len(absent) < len(given):
    raise ValueError(f"{absent[0]} is missing; address, processes and process_id go together")
  require(timeout_seconds > 0, "timeout_seconds", timeout_seconds, "positive")
  require(heartbeat_seconds > 0, "heartbeat_seconds", heartbeat_seconds, "positive")
  if address is not None:
    host, _, port = address.rpartition(":")
    fits = host and port.isdecimal() and 0 < int(port) < 65536
    require(fits, "address", address, "HOST:PORT with a port from 1 to 65535")
    require(processes > 0, "processes", processes, "positive")
    require(0 <= process_id < processes, "process_id", process_id, f"from 0 to {processes - 1}")
  several = address is not None or cloud_tpu_init.running_in_cloud_tpu_vm
  if not several or not _join(timeout_seconds, heartbeat_seconds, *given.values()):
    _group = _Group(0, 1)
    return
  _group = _Group(_state.process_id, _state.num_processes)
  _watch = _Watch(heartbeat_seconds)
  atexit.register(_leave, _watch)
  _watch.start()
  if _group.process > 0:
    logging.set_verbosity(logging.ERROR)
  # One that waits for more processes than there are would wait for their devices next.
  agree("number of processes", _group.count, timeout_seconds=timeout_seconds)
  if jax.process_count() != _group.count:
    raise ValueError(
        f"{_group.count} processes joined at {_state.coordinator_address}, but JAX counts"
        f" {jax.process_count()} with devices; all need the same platform and their own devices"
    )


def _join(seconds: int, heartbeat_seconds: int, *given: Any) -> bool:
  """Whether this process belongs to several; False on a TPU machine that knows of no others."""
  global _broken
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  raised: list[Exception] = []

  def join():
    try:
      jax.distributed.initialize(
          *given, initialization_timeout=2 * seconds, heartbeat_timeout_seconds=heartbeat_seconds
      )
    except Exception as error:
      raised.append(error)

  # In a thread, since JAX waits for the others in C++ and aborts when its own, longer time is over.
  thread = threading.Thread(target=join, daemon=True)
  thread.start()
  thread.join(seconds)
  if thread.is_alive():
    _broken = True
    atexit.register(_leave, None)
    address = given[0] or _state.coordinator_address or "an unknown address"
    raise TimeoutError(
        f"not all processes joined at {address} within {seconds} s, and {_answer(address)}; process"
        " 0 opens that port, all need the same address and count, each its own process_id"
    )
  if raised and (given[0] is not None or not isinstance(raised[0], ValueError)):
    raise raised[0]
  return not raised


def _answer(address: str) -> str:
  host, _, port = address.rpartition(":")
  try:
    socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
  except (OSError, ValueError) as error:
    return f"it does not answer ({error})"
  return "it answers"


class _Watch(threading.Thread):
  """Says what happened to a peer and ends the process if one has failed.

  Death is for JAX's own heartbeats to find: this thread stands still where Python does.
  """

  def __init__(self, heartbeat_seconds: int):
    super().__init__(name="deepseek_jax.distributed", daemon=True)
    self._heartbeat = heartbeat_seconds
    self._heard = {process: ("", time.monotonic()) for process in range(1, _group.count)}
    self._seen: set[tuple[str, int]] = set()
    self.over = threading.Event()

  def explain(self) -> None:
    """Waits until what happened to a peer was shown, or is not to come any more.

    A broken connection ends a collective seconds before its peer is known to be gone.
    """
    until = time.monotonic() + self._heartbeat
    while not self._seen and time.monotonic() < until:
      time.sleep(0.1)

  def run(self) -> None:
    for beat in itertools.count():
      if self.over.wait(_POLL_SECONDS):
        return
      try:
        _put(_ALIVE, _group.process, str(beat))
        if _group.process == 0:
          self._listen()
        self._show()
      except jax.errors.JaxRuntimeError:
        # The coordinator is gone; JAX aborts this process.
        continue

  def _listen(self) -> None:
    now, beats = time.monotonic(), _read(_ALIVE)
    for process, (beat, since) in self._heard.items():
      if beats.get(process, "") != beat:
        self._heard[process] = beats[process], now
      elif beat != "left" and now - since > max(0.6 * self._heartbeat, 2.5 * _POLL_SECONDS):
        told = f"was last heard {now - since:.0f} s ago; JAX aborts all after {self._heartbeat} s"
        _put(_SILENT, process, told)

  def _show(self) -> None:
    for folder in (_FAILED, _SILENT):
      for process, told in _read(folder).items():
        if process != _group.process and (folder, process) not in self._seen:
          self._seen.add((folder, process))
          sys.stderr.write(f"error: process {process} of {_group.count} {told}\n")
          if folder == _FAILED:
            _end()


def _end() -> None:
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(1)


def _leave(watch: _Watch | None) -> None:
  """At exit, before JAX's own part, in which every process waits for all others."""
  if _broken:
    # The coordinator lives here: without it the others are aborted before they have read why.
    if _group is not None and _group.process == 0:
      time.sleep(3 * _POLL_SECONDS)
    _end()
  watch.over.set()
  watch.join()
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    _put(_ALIVE, _group.process, "left")


def _give_up(told: str) -> None:
  global _broken
  _broken = True
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    _put(_FAILED, _group.process, f"failed, so all end: {' '.join(told.split())}")


@contextlib.contextmanager
def together() -> Iterator[None]:
  """What one process raises inside ends all within seconds, with its sentence and status 1.

  Cleanup that waits for the others belongs outside.
  """
  try:
    yield
  except BaseException as error:
    regular = isinstance(error, SystemExit) and not error.code
    if not (_group is None or _group.count == 1 or regular or isinstance(error, Disagreement)):
      if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
        _watch.explain()
      _give_up(f"{type(error).__name__}: {error}")
    raise


def agree(name: str, value: int | str, *, timeout_seconds: int = 60) -> None:
  """Returns when all processes have given the same value.

  Called by all of them in the same order, before a loop whose collectives would wait for a process
  that has, say, fewer batches.

  Args:
    name: of what is compared, such as "number of batches".
    value: an integer or a short string, such as a digest.
    timeout_seconds: for all to call it.

  Raises:
    Disagreement: values or names differ; says which process gave what.
    TimeoutError: says which processes did not call.
  """
  require(isinstance(value, int | str), name, value, "an integer or a string")
  if _group is None or _group.count == 1:
    return
  folder = f"deepseek_jax/agree/{next(_agreements)}"
  _put(folder, _group.process, f"{name} {value!r}")
  try:
    _state.client.wait_at_barrier(folder, timeout_in_ms=1000 * timeout_seconds)
  except jax.errors.JaxRuntimeError as error:
    missing = set(range(_group.count)) - set(_read(folder)) or {_group.process}
    told = f"{_named(missing)} did not give the {name} within {timeout_seconds} s of the others"
    _give_up(told)
    raise TimeoutError(told) from error
  by_value: dict[str, set[int]] = {}
  for process, text in _read(folder).items():
    by_value.setdefault(text, set()).add(process)
  if len(by_value) > 1:
    told = "; ".join(f"{text} on {_named(who)}" for text, who in sorted(by_value.items()))
    raise Disagreement(f"the processes differ: {told}")


def is_main() -> bool:
  """Whether this is process 0, the one that logs and writes what only one may write."""
  return _group is None or _group.process == 0


class Terminations:
  """SIGTERM as a question: all processes leave their loop after the same step.

  A context manager. Joined processes have it from JAX, which takes the signal from `initialize` on
  and fixes the step after that of the furthest process. A single one takes it inside of the `with`,
  in the main thread alone: Python delivers signals to no other.
  """

  def __init__(self):
    self.asked = False
    self._before: Any = None

  def __enter__(self) -> "Terminations":
    main = threading.current_thread() is threading.main_thread()
    if main and not jax.distributed.is_initialized():
      self._before = signal.signal(signal.SIGTERM, self._ask) or signal.SIG_DFL
    return self

  def __exit__(self, *_: Any) -> None:
    if self._before is not None:
      signal.signal(signal.SIGTERM, self._before)

  def _ask(self, *_: Any) -> None:
    self.asked = True

  def agreed(self) -> bool:
    """Whether this step is the last one, on all processes though SIGTERM reached but one.

    Called by every process once a step; costs microseconds. JAX notices a signal within a second.
    """
    if jax.distributed.is_initialized() and not self.asked:
      self.asked = multihost_utils.reached_preemption_sync_point(next(_steps))
    return self.asked


def environment_check(expect_tpu: bool = False) -> str:
  """One line of versions and devices, to log before a run. Touches the devices.

  Args:
    expect_tpu: anything else is an error, as it is to JAX itself if JAX_PLATFORMS is tpu.

  Raises:
    RuntimeError: a TPU was asked for and JAX found none.
  """
  found = [f"Python {platform.python_version()}"]
  for name in ("jax", "jaxlib", "libtpu"):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found.append(f"{name} {importlib.metadata.version(name)}")
  kinds = collections.Counter(device.device_kind for device in jax.devices())
  found += [f"{count} × {kind}" for kind, count in kinds.items()]
  found += [f"{jax.local_device_count()} of them here", f"process count {jax.process_count()}"]
  if expect_tpu and jax.default_backend() != "tpu":
    raise RuntimeError(
        f"a TPU was asked for and JAX found {', '.join(found)}; install jax[tpu] and make sure that"
        " no other process holds the chips"
    )
  return ", ".join(found)
