"""Whether a program fits a TPU slice, by the TPU compiler's own account; nothing is run.

The compiler is told one kind of chip per process, before JAX is imported:

  python -m deepseek_jax.eval.fit '{"topology": "v5p:4x4x8", "mode": "train", ...}'

prints one JSON object; `compile_for` starts such a process. This module imports JAX only there.
"""

import dataclasses
import json
import re
import sys
import time
from typing import Any

from deepseek_jax.config import Config
from deepseek_jax.eval import hlo
from deepseek_jax.eval.topologies import Topology, mesh_for, topology
from deepseek_jax.fields import build, require
from pallas_kernels import aot
from pallas_kernels.chips import CHIPS

MODES = ("train", "prefill", "decode")


def compile_for(
    at: Topology, config: Config, mode: str, *, context: int = 1 << 20, lines: int = 1,
    rows: int = 4096, timeout: float = 3600,
) -> dict[str, Any]:  # fmt: skip
  """Compiles a step for a slice.

  Args:
    at: the slice.
    config: the experiment; see `topologies.mesh_for` for its mesh.
    mode: "train": a training step, whose `batch_size` becomes `lines` for every device that has
      lines; "prefill": a chunk of `rows` rows through the encoder; "decode": one token.
    context: tokens that a line of the cache holds, in serving.
    lines: of a device; lines of training, requests of serving.
    rows: of a prefill chunk.
    timeout: seconds.

  Returns:
    See `scripts/compile_tpu.py`.

  Raises:
    ValueError: an unknown mode, or a mesh that fits neither slice nor model.
    aot.CompilationError: the compiler refuses for another reason than memory, or is too slow.
  """
  require(mode in MODES, "mode", mode, f"one of {MODES}")
  for name, value in (("context", context), ("lines", lines), ("rows", rows)):
    require(value >= 1, name, value, "at least 1")
  config = _placed(config, at, mode, lines)
  asked = dict(
      topology=at.name, mode=mode, context=context, lines=lines, rows=rows,
      config=dataclasses.asdict(config),
  )  # fmt: skip
  command = ["deepseek_jax.eval.fit", json.dumps(asked)]
  lines = aot.in_subprocess(at.generation, command, f"{mode} for {at.name}", timeout)
  return json.loads(lines[-1])


def _placed(config: Config, at: Topology, mode: str, lines: int) -> Config:
  """The experiment on the mesh of a slice."""
  mesh = mesh_for(config, at.devices, mode)
  compute, train = config.compute, config.train
  if mode == "train":
    train = dataclasses.replace(train, batch_size=mesh.data * mesh.fsdp * mesh.expert * lines)
  else:
    compute, train = dataclasses.replace(compute, spread_dense=False), None
    require(mesh.seq == 1, "mesh.seq", mesh.seq, "1 in serving: a cache holds whole lines")
  return dataclasses.replace(config, mesh=mesh, compute=compute, train=train)


def _kinds(args: tuple) -> dict[str, int]:
  """Bytes of arguments on one device by kind, before the compiler's padding."""
  import jax

  from deepseek_jax.parameter_paths import path_names

  found: dict[str, int] = {}
  for key, leaf in jax.tree_util.tree_flatten_with_path(args)[0]:
    names = path_names(key)
    if "opt_state" in names:
      kind = "optimiser"
    elif "engram" in names and "embed" in names:
      kind = "engram_tables"
    elif {"params", "runs", "head", "embed", "norm"} & set(names):
      kind = "parameters"
    elif {"main_kv", "index_keys", "encoder_window", "decoder_window", "tails"} & set(names):
      kind = "cache"
    else:
      kind = "batch"
    size = leaf.dtype.itemsize
    for n in leaf.sharding.shard_shape(leaf.shape):
      size *= n
    found[kind] = found.get(kind, 0) + size
  return found


def _model_flops(config: Config, asked: dict[str, Any]) -> float:
  """FLOPs of the model's products on one device, by the ledger: at least what the step computes.

  The compiler counts a loop's body once, and nothing of a kernel that says nothing of itself.
  """
  from deepseek_jax.eval import programs
  from deepseek_jax.ledger import Ledger

  ledger = Ledger.of(config.model, programs.parameter_shapes(config))
  total = lambda parts: sum(parts.values())
  if asked["mode"] == "decode":
    return asked["lines"] * total(ledger.decode_flops(asked["context"]))
  if asked["mode"] == "prefill":
    each = total(ledger.prefill_flops(asked["context"])) / asked["context"]
    return asked["lines"] * asked["rows"] * each
  rows, model = config.train.seq_len, config.model
  head = 2 * (rows - 1) * model.vocab_size * model.hidden_size
  forward = total(ledger.prefill_flops(rows, "A")) + head
  # Gradients of rows and of weights cost as much as the forward pass each; remat runs it again.
  passes = (2 if config.lora else 3) + (config.compute.remat == "layer")
  lines = config.train.batch_size * config.train.accumulation
  return passes * forward * lines / config.mesh.devices


def _compile(asked: dict[str, Any]) -> dict[str, Any]:
  """Compiles in this process, which has the compiler's variables."""
  import jax
  from jax.experimental import topologies as described

  from deepseek_jax import sharding
  from deepseek_jax.eval import programs

  at, mode = topology(asked["topology"]), asked["mode"]
  config = build(Config, asked["config"])
  devices = described.get_topology_desc(platform="tpu", topology_name=at.name).devices
  mesh = sharding.make_mesh(config.mesh, devices)
  batch = asked["lines"] * config.mesh.data * config.mesh.fsdp * config.mesh.expert
  began = time.perf_counter()
  with jax.set_mesh(mesh):
    if mode == "train":
      fn, args, donate = programs.train_step(config, mesh=mesh)
    else:
      capacity = asked["context"]
      more = {"rows": asked["rows"]} if mode == "prefill" else {}
      make = programs.prefill_chunk if mode == "prefill" else programs.decode_step
      fn, args, donate = make(config, batch=batch, capacity=capacity, mesh=mesh, **more)
      fn = jax.jit(fn, donate_argnums=donate)
    lowered = fn.lower(*args)
    lowering = time.perf_counter() - began
    began = time.perf_counter()
    try:
      compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
      compiled, refusal = None, str(error)
      if "RESOURCE_EXHAUSTED" not in refusal:
        raise
  chip = CHIPS[at.generation]
  found = {
      "topology": at.name,
      "mode": mode,
      "mesh": dataclasses.asdict(config.mesh),
      "chips": at.chips,
      "devices_per_chip": at.devices_per_chip,
      "bytes_by_kind_per_chip": {
          kind: size * at.devices_per_chip for kind, size in _kinds(args).items()
      },
      "chip_hbm_bytes": chip.hbm_bytes * at.devices_per_chip,
      "lower_seconds": round(lowering, 1),
      "compile_seconds": round(time.perf_counter() - began, 1),
  }
  if compiled is None:
    return found | {"fits": False} | _exhausted(refusal, at)
  return found | _account(compiled, at, _model_flops(config, asked))


def _exhausted(refusal: str, at: Topology) -> dict[str, Any]:
  """What the compiler says of a program that is too large."""
  # The second where arguments alone are too many.
  used = re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", refusal)
  used = used or re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM", refusal)
  unit = dict(K=1 << 10, M=1 << 20, G=1 << 30, T=1 << 40)
  keys = "argument_bytes_per_chip temp_bytes_per_chip flops_per_chip bytes_accessed_per_chip"
  found = dict.fromkeys([*keys.split(), "kernels_per_layer", "collectives"])
  size = None if used is None else int(float(used[1]) * unit[used[2]]) * at.devices_per_chip
  return found | {"hbm_bytes_per_chip": size, "refusal": refusal.split("\n")[0][:400]}


def _account(compiled: Any, at: Topology, model_flops: float) -> dict[str, Any]:
  """Memory, work and traffic of a compiled program."""
  from deepseek_jax.eval import programs

  memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
  per_chip, chip = at.devices_per_chip, CHIPS[at.generation]
  arguments, temp = memory.argument_size_in_bytes, memory.temp_size_in_bytes
  total = arguments + temp + memory.output_size_in_bytes - memory.alias_size_in_bytes
  moved = hlo.collectives(text)
  # An all-reduce sends everything twice.
  network = sum(each.bytes * (1 + (kind == "all-reduce")) for kind, each in moved.items())
  seconds = {
      "compute": max(model_flops, cost.get("flops", 0.0)) / chip.bf16_flops,
      "memory": cost.get("bytes accessed", 0.0) / chip.hbm_bandwidth,
      "network": network / chip.network_bandwidth,
  }
  kernels = [sum(body.values()) for body in programs.loops(text)]
  return {
      "argument_bytes_per_chip": arguments * per_chip,
      "temp_bytes_per_chip": temp * per_chip,
      "hbm_bytes_per_chip": total * per_chip,
      "fits": total <= chip.hbm_bytes,
      "flops_per_chip": cost.get("flops", 0.0) * per_chip,
      "model_flops_per_chip": model_flops * per_chip,
      "bytes_accessed_per_chip": cost.get("bytes accessed", 0.0) * per_chip,
      "collectives": {
          kind: {**each._asdict(), "bytes": each.bytes * per_chip} for kind, each in moved.items()
      },
      "modelled_seconds": seconds,
      "modelled_step_seconds": max(seconds.values()),
      "kernels_per_layer": max(kernels, default=None),
  }


if __name__ == "__main__":
  sys.stdout.write(json.dumps(_compile(json.loads(sys.argv[1]))) + "\n")
