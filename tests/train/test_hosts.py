"""A run of two processes: the losses of one, one end for all, and a restart on other hosts."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 8
CONFIG = """
import ml_collections

def get_config():
  config = ml_collections.ConfigDict()
  config.model = dict(
      vocab_size=264, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=3,
      num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_lora_rank=32,
      o_groups=1, n_routed_experts=8, num_experts_per_tok=2, sliding_window=8,
      compress_ratios=(0, 2, 1), kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2),
      index_n_heads=8, index_head_dim=32, index_topk=4, hc_mult=2, hc_sinkhorn_iters=2,
      max_position_embeddings=64,
  )
  config.train = dict(
      steps=8, batch_size=8, seq_len=32, learning_rate=1e-4, schedule="constant", warmup_steps=0,
      checkpoint_every=100, eval_every=4, sample_tokens=2, sample_prompt="Hi",
  )
  config.data = dict(source=SOURCE)
  return config
"""


@pytest.fixture(scope="module")
def folder(talk, tmp_path_factory):
  folder = tmp_path_factory.mktemp("hosts")
  (folder / "config.py").write_text(f"SOURCE = {str(talk)!r}\n{CONFIG}")
  return folder


DISTILL = """
import runpy

def get_config():
  config = runpy.run_path(BASE)["get_config"]()
  config.train.update(steps=2, seq_len=32, eval_every=2, balance_loss=0.0)
  config.train.replay = dict(decoder_len=30)
  config.train.rollout = dict(
      objective="distill", prompts="data", prompt_len=22, max_new_tokens=6, group=1, updates=1,
      teacher=TEACHER,
  )
  return config
"""


def start(folder, name, count, mesh, *more, hosts=(None, None), config="config.py"):
  """The processes of a run, in folders of their own; CPU devices stand for the chips of a host."""
  with socket.create_server(("localhost", 0)) as server:
    port = server.getsockname()[1]
  command = [sys.executable, str(ROOT / "scripts" / "finetune.py"), "--json", *more]
  command += [f"--config={folder / config}", f"--workdir={folder / name}"]
  command += [f"--config.mesh.{axis}={size}" for axis, size in mesh.items()]
  devices = int(np.prod(list(mesh.values()), dtype=int)) // count
  variables = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT)}
  variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of LLVM: compilation takes most of a run
  several = [f"--address=localhost:{port}", f"--processes={count}", "--join_seconds=120"]
  return [
      subprocess.Popen(
          command + (several + [f"--process_id={process}"] if count > 1 else []),
          env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
          cwd=hosts[process],
      )
      for process in range(count)
  ]  # fmt: skip


def ended(processes, seconds=400):
  """Exit statuses, and what each wrote."""
  told = [process.communicate(timeout=seconds) for process in processes]
  return [process.returncode for process in processes], told


def losses(workdir):
  return [json.loads(line)["loss"] for line in (workdir / "metrics.jsonl").open()]


def wait_for_step(workdir, step, processes):
  """Until a step is written down, or a process has ended."""
  metrics = workdir / "metrics.jsonl"
  while all(process.poll() is None for process in processes):
    if metrics.exists() and metrics.read_text().count("\n") >= step:
      return
    time.sleep(0.05)


@pytest.fixture(scope="module")
def whole(folder):
  """The losses of one process with one device."""
  statuses, told = ended(start(folder, "one", 1, {"data": 1}))
  assert statuses == [0], told
  return losses(folder / "one")


def test_two_processes_have_the_losses_of_one_and_one_writes(folder, whole):
  statuses, told = ended(start(folder, "two", 2, {"fsdp": 2, "expert": 4}))
  assert statuses == [0, 0], told
  found = losses(folder / "two")
  assert len(found) == STEPS
  np.testing.assert_allclose(found, whole, atol=1e-5)
  summaries = [out.splitlines() for out, _ in told]
  assert json.loads(summaries[0][-1])["steps"] == STEPS
  assert not any(line.startswith("{") for line in summaries[1])  # process 0 alone reports


def test_two_processes_distil_what_one_does(folder, whole):
  """Each writes its share of the responses and reads its share of the teacher."""
  given = f"BASE, TEACHER = {str(folder / 'config.py')!r}, {str(folder / 'one')!r}\n"
  (folder / "distill.py").write_text(given + DISTILL)
  found = []
  for name, count, mesh in (("alone", 1, {"data": 1}), ("pair", 2, {"fsdp": 4, "expert": 2})):
    statuses, told = ended(start(folder, name, count, mesh, config="distill.py"))
    assert statuses == [0] * count, told
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]
    found.append([(r["loss"], r["response_tokens"]) for r in lines])
  assert len(found[0]) == 2
  assert min(loss for loss, *_ in found[0]) > 1e-3
  np.testing.assert_allclose(found[1], found[0], atol=1e-5)


def test_sigterm_to_one_ends_all_with_a_checkpoint_that_other_hosts_continue(folder, whole):
  run = ["--config.train.steps=100000"]
  processes = start(folder, "stopped", 2, {"expert": 2, "seq": 4}, *run)
  wait_for_step(folder / "stopped", 2, processes)
  processes[1].send_signal(signal.SIGTERM)
  statuses, told = ended(processes)
  assert statuses == [0, 0], told
  assert "continue with --resume" in told[0][1]
  before = losses(folder / "stopped")
  more = ["--resume", f"--config.train.steps={len(before) + 2}"]
  statuses, told = ended(start(folder, "stopped", 1, {"data": 2}, *more))
  assert statuses == [0], told
  after = losses(folder / "stopped")
  assert len(after) == len(before) + 2
  assert after[: len(before)] == before
  np.testing.assert_allclose(after[:STEPS], whole[: len(after)][:STEPS], atol=1e-5)


def test_a_killed_peer_ends_all_within_30_seconds_with_a_message(folder):
  processes = start(folder, "killed", 2, {"data": 8}, "--config.train.steps=100000")
  wait_for_step(folder / "killed", 2, processes)
  processes[1].kill()
  began = time.monotonic()
  statuses, told = ended(processes, 60)
  assert time.monotonic() - began < 30
  assert statuses[0] not in (0, None)
  assert "process 1 of 2" in told[0][1]


def test_hosts_with_other_data_end_before_the_first_step(folder, talk, tmp_path):
  """The same configuration on both, a file of that name with fewer conversations on one."""
  lines = talk.read_text().splitlines(keepends=True)
  hosts = []
  for kept in (lines, lines[: len(lines) // 2]):
    hosts.append(tmp_path / str(len(kept)))
    hosts[-1].mkdir()
    (hosts[-1] / talk.name).write_text("".join(kept))
  source = f"--config.data.source={talk.name}"
  statuses, told = ended(start(folder, "differ", 2, {"data": 8}, source, hosts=hosts), 90)
  assert statuses == [2, 2], told
  assert all("the processes differ: data" in error for _, error in told), told
  assert not (folder / "differ").exists()
