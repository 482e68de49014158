"""What several processes of a run do together: real processes with four CPU devices each."""

import concurrent.futures
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from typing import NamedTuple

import jax
import pytest

from deepseek_jax import distributed

WORKER = pathlib.Path(__file__).with_name("distributed_worker.py")
# Part of the worker, counts that the processes are started with, ids, argument of the part.
RUNS = {
    "killed peer": ("killed", (2, 2), (0, 1), "1"),
    "killed coordinator": ("killed_in_step", (2, 2), (0, 1), "0"),
    "late": ("late", (2, 2), (0, 1)),
    "peer alone": ("join_alone", (2,), (1,)),
    "coordinator alone": ("join_alone", (2,), (0,)),
    "failing coordinator": ("fail", (2, 2), (0, 1), "0"),
    "failing peer": ("fail", (2, 2), (0, 1), "1"),
    "healthy": ("healthy", (2, 2), (0, 1)),
    "differ": ("differ", (2, 2), (0, 1)),
    "counts": ("join", (2, 3), (0, 1)),
}


class Ended(NamedTuple):
  """A process that has ended: status, output, and seconds since the first of its run ended."""

  status: int
  out: str
  err: str
  seconds: float


def start(part, counts, ids, *arguments):
  """Runs the processes of a run to their end."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(WORKER.parents[1])}
  environment.pop("XLA_FLAGS", None)
  processes = [
      subprocess.Popen(
          [sys.executable, str(WORKER), part, address, str(count), str(process), *arguments],
          env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
      )
      for count, process in zip(counts, ids)
  ]  # fmt: skip

  def wait(process):
    try:
      out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
      process.kill()
      out, err = process.communicate()
    return process.returncode, out, err, time.monotonic()

  with concurrent.futures.ThreadPoolExecutor(len(processes)) as waiting:
    ends = list(waiting.map(wait, processes))
  first = min(when for *_, when in ends)
  return [Ended(*end, when - first) for *end, when in ends]


@pytest.fixture(scope="module")
def runs():
  """Ends of the processes of each run; most of the time is waiting, so three runs share it."""
  with concurrent.futures.ThreadPoolExecutor(3) as executor:
    yield {name: executor.submit(start, *run) for name, run in RUNS.items()}


@pytest.mark.slow
def test_processes_join_and_stop_after_the_same_step(runs):
  ends = runs["healthy"].result()
  assert [end.status for end in ends] == [0, 0], ends
  assert all("8 × cpu, 4 of them here, process count 2" in end.out for end in ends)
  assert all("sum 8.0" in end.out for end in ends)
  assert all("refused: distributed.initialize was called before" in end.out for end in ends)
  # SIGTERM reached process 1 alone.
  stopped = {re.search(r"stopped at (\d+) True", end.out).group(1) for end in ends}
  assert len(stopped) == 1
  assert 5 <= int(stopped.pop()) < 3999


@pytest.mark.slow
def test_a_process_with_fewer_batches_ends_all_before_the_loop(runs):
  ends = runs["differ"].result()
  differ = "number of batches 11 on process 1; number of batches 12 on process 0"
  told = f"error: the processes differ: {differ}"
  for end in ends:
    assert (end.status, end.err.splitlines()[-1]) == (2, told), ends
    assert end.seconds < 5


@pytest.mark.slow
def test_processes_started_with_different_counts_say_so(runs):
  told = "number of processes 2 on process 0; number of processes 3 on process 1"
  for end in runs["counts"].result():
    assert end.status == 2
    assert told in end.err
    assert "joined" not in end.out


@pytest.mark.slow
def test_a_process_that_does_not_come_to_agree_is_named(runs):
  ends = runs["late"].result()
  told = "process 1 did not give the number of batches within 2 s"
  assert [end.status for end in ends] == [1, 1]
  assert f"error: {told}" in ends[0].err
  assert f"error: process 0 of 2 failed, so all end: {told}" in ends[1].err


@pytest.mark.slow
@pytest.mark.parametrize(("process", "why"), [(0, "it answers"), (1, "it does not answer")])
def test_missing_processes_are_a_sentence_with_address_and_seconds(runs, process, why):
  (end,) = runs["peer alone" if process else "coordinator alone"].result()
  assert end.status == 1
  assert re.search(
      rf"error: not all processes joined at localhost:\d+ within 3 s, and {why}", end.err
  )
  assert "Check failure stack trace" not in end.err


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_process_raises_ends_all_with_its_sentence(runs, failing):
  ends = runs["failing peer" if failing else "failing coordinator"].result()
  assert [end.status for end in ends] == [1, 1], ends
  told = f"error: process {failing} of 2 failed, so all end: ValueError: line 7 is no JSON"
  assert told in ends[1 - failing].err
  assert "error: line 7\nis no JSON" in ends[failing].err
  assert max(end.seconds for end in ends) < 15


@pytest.mark.slow
def test_a_killed_peer_ends_all(runs):
  survivor, killed = runs["killed peer"].result()
  assert killed.status == -signal.SIGKILL
  assert survivor.status not in (0, -signal.SIGKILL)
  assert survivor.seconds < 30
  assert re.search(
      r"error: process 1 of 2 was last heard \d+ s ago; JAX aborts all after 10 s", survivor.err
  )
  assert "JAX distributed service detected fatal errors" in survivor.err


@pytest.mark.slow
def test_a_killed_coordinator_ends_all(runs):
  killed, survivor = runs["killed coordinator"].result()
  assert killed.status == -signal.SIGKILL
  assert survivor.status not in (0, -signal.SIGKILL)
  assert survivor.seconds < 30
  # A collective may notice before the connection to the coordinator does.
  assert re.search("JAX distributed service detected fatal errors|JaxRuntimeError", survivor.err)


@pytest.fixture
def not_joined(monkeypatch):
  monkeypatch.setattr(distributed, "_group", None)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"address": "host:8476"}, "processes is missing; address, processes and process_id go"),
        ({"processes": 2, "process_id": 0}, "address is missing"),
        (
            {"address": "host", "processes": 2, "process_id": 0},
            "address is 'host'; it must be",
        ),
        ({"address": "host:0", "processes": 2, "process_id": 0}, "address is 'host:0'"),
        ({"address": ":8476", "processes": 2, "process_id": 0}, "address is ':8476'"),
        ({"address": "host:1", "processes": 0, "process_id": 0}, "processes is 0; it must be pos"),
        (
            {"address": "host:1", "processes": 2, "process_id": 2},
            "process_id is 2; it must",
        ),
        ({"timeout_seconds": 0}, "timeout_seconds is 0"),
        ({"heartbeat_seconds": -1}, "heartbeat_seconds is -1"),
    ],
)
@pytest.mark.usefixtures("not_joined")
def test_unfit_arguments(given, told):
  with pytest.raises(ValueError, match=re.escape(told)):
    distributed.initialize(**given)


@pytest.mark.usefixtures("not_joined")
def test_a_machine_of_its_own_is_a_run_of_one_process():
  distributed.initialize()
  assert distributed.is_main()
  assert not jax.distributed.is_initialized()
  distributed.agree("steps", 3)
  with pytest.raises(KeyError), distributed.together():
    raise KeyError
  with pytest.raises(RuntimeError, match="was called before"):
    distributed.initialize()


@pytest.mark.usefixtures("not_joined")
def test_a_tpu_machine_without_others_is_a_run_of_one_process(monkeypatch):
  def refuse(*_, **__):
    raise ValueError("coordinator_address should be defined.")

  monkeypatch.setattr(distributed.cloud_tpu_init, "running_in_cloud_tpu_vm", True)
  monkeypatch.setattr(jax.distributed, "initialize", refuse)
  distributed.initialize()
  assert distributed.is_main()


@pytest.mark.usefixtures("not_joined")
def test_devices_of_fewer_processes_than_joined_are_an_error(monkeypatch):
  joined = types.SimpleNamespace(process_id=0, num_processes=2, coordinator_address="host:1")
  watch = types.SimpleNamespace(start=lambda: None)
  for name, value in {
      "_state": joined, "_join": lambda *_: True, "_Watch": lambda *_: watch,
      "agree": lambda *_, **__: None, "atexit": types.SimpleNamespace(register=lambda *_: None),
  }.items():  # fmt: skip
    monkeypatch.setattr(distributed, name, value)
  with pytest.raises(ValueError, match="2 processes joined at host:1, but JAX counts 1"):
    distributed.initialize("host:1", 2, 0)


def test_agreement_is_on_integers_and_strings():
  with pytest.raises(ValueError, match=r"loss is 0.5; it must be an integer or a string"):
    distributed.agree("loss", 0.5)


def test_sigterm_asks_a_single_process_once():
  before = signal.getsignal(signal.SIGTERM)
  with distributed.Terminations() as stop:
    assert not stop.agreed()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.agreed()
    assert stop.agreed()
    assert stop.asked
  assert signal.getsignal(signal.SIGTERM) == before


def test_signals_are_left_alone_outside_the_main_thread():
  before = signal.getsignal(signal.SIGTERM)
  seen = []

  def other():
    with distributed.Terminations() as stop:
      seen.append((stop.agreed(), signal.getsignal(signal.SIGTERM)))

  thread = threading.Thread(target=other)
  thread.start()
  thread.join()
  assert seen == [(False, before)]


def test_environment_is_one_line_and_a_missing_tpu_is_an_error():
  line = distributed.environment_check()
  assert f"jax {jax.__version__}" in line
  assert "8 × cpu, 8 of them here, process count 1" in line
  with pytest.raises(RuntimeError, match="a TPU was asked for and JAX found Python"):
    distributed.environment_check(expect_tpu=True)
