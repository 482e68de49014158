"""One process of the runs of test_distributed.py: `distributed_worker.py PART ADDRESS COUNT ID`."""

import os
import signal
import sys
import time

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from deepseek_jax import distributed

HEARTBEAT_SECONDS = 10


def say(*words):
  sys.stdout.write(" ".join(map(str, words)) + "\n")
  sys.stdout.flush()


class Step:
  """A computation that ends when every process takes part in it."""

  def __init__(self):
    mesh = Mesh(jax.devices(), ("lines",), axis_types=(AxisType.Auto,))
    placed = NamedSharding(mesh, PartitionSpec("lines"))
    ones = np.ones(8, np.float32)
    self._ones = jax.make_array_from_callback(ones.shape, placed, lambda index: ones[index])
    self._sum = jax.jit(lambda a: a.sum())

  def __call__(self):
    return float(self._sum(self._ones))


def healthy():
  say("check:", distributed.environment_check())
  say("sum", Step()())
  try:
    distributed.initialize(ADDRESS, COUNT, ID)
  except RuntimeError as error:
    say("refused:", error)
  for number in range(12):
    distributed.agree("number", number)
  distributed.agree("digest", "5b1e")
  step = Step()
  with distributed.Terminations() as stop:
    for now in range(1, 4000):
      step()
      if now == 5 and not distributed.is_main():
        os.kill(os.getpid(), signal.SIGTERM)
      if stop.agreed():
        break
  say("stopped at", now, stop.asked)


def differ():
  distributed.agree("number of batches", 12 - ID)


def late():
  if ID == 0:
    distributed.agree("number of batches", 12, timeout_seconds=2)
  time.sleep(100)


def fail(failing):
  step = Step()
  with distributed.together():
    for now in range(4000):
      step()
      if now == 3 and ID == int(failing):
        raise ValueError("line 7\nis no JSON")


def killed(failing):
  step = Step()
  with distributed.together():
    for _ in range(3):
      step()
    if ID == int(failing):
      os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def killed_in_step(failing):
  step = Step()
  with distributed.together():
    for now in range(10**6):
      step()
      if now == 3 and ID == int(failing):
        os.kill(os.getpid(), signal.SIGKILL)


def join():
  say("joined")


join_alone = join


PART, ADDRESS, COUNT, ID = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
# Of two processes that start at the same time on a busy machine; or of one that waits in vain.
TIMEOUT_SECONDS = 3 if PART == "join_alone" else 60

if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", 4)
  try:
    distributed.initialize(
        ADDRESS, COUNT, ID, timeout_seconds=TIMEOUT_SECONDS, heartbeat_seconds=HEARTBEAT_SECONDS
    )
    globals()[PART](*sys.argv[5:])
  except (ValueError, OSError) as failure:
    sys.stderr.write(f"error: {failure}\n")
    sys.exit(2)
