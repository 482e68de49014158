"""Training checkpoints: Orbax for the arrays, and a record that proves what came back."""

import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging
from flax import nnx
from jax.sharding import Mesh

from deepseek_jax import sharding
from deepseek_jax.checkpoint import checksum, processes
from deepseek_jax.checkpoint import record as records
from deepseek_jax.checkpoint.record import DamagedError, FormatError
from deepseek_jax.config import Config
from deepseek_jax.fields import build
from deepseek_jax.nn.adapters import adapt
from deepseek_jax.nn.transformer import Transformer

# What may differ between the run that saved and the run that resumes: nothing here enters a step.
MAY_CHANGE = frozenset({
    "train.checkpoint_every", "train.keep_checkpoints", "train.eval_every",
    "train.sample_prompt", "train.sample_tokens",
})  # fmt: skip


_PARTS = ("state", "record")


class Restored(NamedTuple):
  """A checkpoint whose every array has the checksum it was saved with.

  Attributes:
    step: finished steps.
    state: in the structure of the template.
    iterator: state of the data iterator.
    damaged: newer steps that did not pass, newest first.
  """

  step: int
  state: Any
  iterator: dict[str, Any]
  damaged: tuple[int, ...]


def names_of(tree: Any) -> dict[str, Any]:
  """Leaves by dotted path, without the `.value` that nnx puts at its ends."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  spell = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
  return {spell(path).removesuffix(".value"): leaf for path, leaf in leaves}


def check_config(saved: str, config: Config) -> None:
  """Refuses to resume another experiment.

  The fields of `MAY_CHANGE`, of `serve` and of `mesh` may differ. `train.steps` may differ under
  the constant schedule alone: the others place their decay by it, so that the finished steps would
  have had other rates.

  Args:
    saved: `Config.to_json` of the checkpoint.
    config: of this run.

  Raises:
    ValueError: fields differ; the message names the first ones.
  """
  flat = lambda text: {
      k: v for k, v in _fields(json.loads(text)) if not k.startswith(("serve.", "mesh."))
  }
  before, now = flat(saved), flat(config.to_json())
  free = MAY_CHANGE | ({"train.steps"} if config.train.schedule == "constant" else set())
  keys = sorted(before.keys() | now.keys())
  other = [k for k in keys if k not in free and before.get(k) != now.get(k)]
  if other:
    told = ", ".join(f"{k} was {before.get(k)!r} and is {now.get(k)!r}" for k in other[:3])
    more = f" and {len(other) - 3} more" if len(other) > 3 else ""
    raise ValueError(
        f"the checkpoint is of another configuration: {told}{more}; use its values or another"
        " workdir"
    )


def _fields(tree: Any, prefix: str = ""):
  if not isinstance(tree, dict):
    yield prefix.removesuffix("."), tree
    return
  for key, value in tree.items():
    yield from _fields(value, f"{prefix}{key}.")


class Checkpoints:
  """The checkpoints of one run, one folder a finished step.

  A save returns when the checkpoint is complete, because the next step donates the arrays; a
  checkpoint that was cut short is never listed. Orbax alone restores a flipped byte or another
  dtype without a word, so each checkpoint also holds a record with shape, dtype and checksum of
  every array, and its own digest.

  With several processes, each calls every method but `close` at the same point, and all must see
  the same folder. Process 0 lists, moves, removes and writes the record; each process writes and
  reads its own shards. A checkpoint that one process cannot read is damaged for all.

  Args:
    directory: created by the first save.
    keep: number of checkpoints kept, the newest ones.
  """

  def __init__(self, directory: str | pathlib.Path, *, keep: int = 2):
    self.directory = pathlib.Path(directory).absolute()
    self._keep = keep
    self._open: ocp.CheckpointManager | None = None

  @property
  def _manager(self) -> ocp.CheckpointManager:
    if self._open is None:
      self._open = ocp.CheckpointManager(
          self.directory,
          options=ocp.CheckpointManagerOptions(
              max_to_keep=self._keep, enable_async_checkpointing=False, create=True
          ),
      )
    return self._open

  def steps(self) -> list[int]:
    """Finished checkpoints, ascending; reads only. One whose deletion was cut short is none."""
    whole = lambda path: all((path / part).is_dir() for part in _PARTS)
    numbered = lambda: (p for p in self.directory.glob("*") if p.name.isdecimal())
    return processes.from_first(lambda: sorted(int(p.name) for p in numbered() if whole(p)))

  def save(self, step: int, state: Any, iterator: Mapping[str, Any], config: Config) -> None:
    """Saves `state`, any tree of arrays, as `step` unless that step is there.

    Args:
      step: finished steps.
      state: with several processes, of arrays over the devices of all.
      iterator: of process 0.
      config: of the run.

    Raises:
      ValueError: an array of one process among several, or one whose copies differ.
    """
    if step in self.steps():
      return
    arrays = names_of(state)
    for name, a in arrays.items():
      if jax.process_count() > 1 and getattr(a, "is_fully_addressable", True):
        raise ValueError(
            f"array {name} is on process {jax.process_index()} alone; it must be over the devices"
            f" of all {jax.process_count()} processes"
        )
    checksums = processes.together(lambda: checksum.of_arrays(arrays))
    entry = lambda name, a: records.entry(a.shape, a.dtype, checksums[name])
    body = {
        "step": step,
        "config": config.to_json(),
        "iterator": dict(iterator),
        "arrays": {name: entry(name, a) for name, a in arrays.items()},
    }
    self._manager.save(
        step,
        args=ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays), record=ocp.args.JsonSave(records.seal(body))
        ),
    )

  def _record(self, step: int) -> dict[str, Any]:
    body = records.parse(
        processes.from_first(lambda: records.read(self.directory / str(step))), step
    )
    if body["step"] != step:
      raise DamagedError(f"checkpoint {step}: its record is of step {body['step']}")
    return body

  def _arrays(self, step: int, record: dict[str, Any], template: Any) -> Any:
    wanted = names_of(template)
    home = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=getattr(a, "sharding", None) or home)
        for name, a in wanted.items()
    }
    args = ocp.args.PyTreeRestore(
        item=target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
    )
    # Without the manager, in which a process that can read waits for one that cannot.
    handler = ocp.PyTreeCheckpointHandler()
    path = self.directory / str(step) / "state"
    found = processes.together(lambda: handler.restore(path, args=args))
    found = {name: found[name] for name in wanted}

    def check():
      checksums = checksum.of_arrays(found)
      for name, a in found.items():
        if records.entry(a.shape, a.dtype, checksums[name]) != record["arrays"][name]:
          raise DamagedError(f"checkpoint {step}: array {name} is not what was saved")

    processes.together(check)
    return jax.tree.unflatten(jax.tree.structure(template), list(found.values()))

  def _newest(self, read, kind: str) -> tuple[Any, tuple[int, ...]]:
    """What `read(step)` gives for the newest step that is no damaged one, and the damaged steps."""
    damaged: list[int] = []
    for step in reversed(self.steps()):
      try:
        return read(step), tuple(damaged)
      except (TemplateError, FormatError, processes.ElsewhereError, *processes.FATAL):
        raise
      except Exception as error:  # Orbax and TensorStore raise many types for damaged files.
        reason = str(error).split("\n")[0][:200] or type(error).__name__
        logging.warning("checkpoint %d in %s is damaged: %s", step, self.directory, reason)
        damaged.append(step)
    if damaged:
      raise ValueError(f"{kind} {self.directory}: every checkpoint is damaged ({damaged})")
    raise ValueError(f"{kind} {self.directory}: no checkpoint")

  def config(self) -> str:
    """`Config.to_json` of the newest checkpoint with a whole record.

    Raises:
      ValueError: there is none.
    """
    return self._newest(self._record, "configuration in")[0]["config"]

  def restore(self, template: Any) -> Restored:
    """The newest checkpoint that is whole; damaged ones are logged and passed over.

    Args:
      template: tree of arrays or `jax.ShapeDtypeStruct` with the saved names, or some of them. A
        sharding in it is the sharding of the result.

    Raises:
      ValueError: no checkpoint, none that is whole, or a template whose array is not in the
        checkpoint or has another shape or dtype there.
    """

    def read(step):
      record = self._record(step)
      for name, leaf in names_of(template).items():
        saved = record["arrays"].get(name)
        wanted = {"shape": list(leaf.shape), "dtype": str(jnp.dtype(leaf.dtype))}
        if saved is None or any(saved[key] != value for key, value in wanted.items()):
          told = "nothing" if saved is None else f"{saved['dtype']}{saved['shape']}"
          raise TemplateError(
              f"array {name}: checkpoint {step} holds {told}, asked for is"
              f" {wanted['dtype']}{wanted['shape']}"
          )
      return step, self._arrays(step, record, template), record["iterator"]

    (step, state, iterator), damaged = self._newest(read, "restore from")
    return Restored(step, state, iterator, damaged)

  def set_aside(self, steps: tuple[int, ...]) -> None:
    """Moves damaged steps into the folder `damaged` beside the checkpoints; deletes nothing."""
    aside = self.directory.parent / "damaged"

    def move():
      for step in steps:
        target = next(
            path
            for n in range(1 << 16)
            if not (path := aside / (f"{step}" if n == 0 else f"{step}-{n}")).exists()
        )
        aside.mkdir(exist_ok=True)
        (self.directory / str(step)).rename(target)

    if steps:
      processes.from_first(move)
      self.close()

  def sweep(self) -> None:
    """Removes what saves that were cut short have left; for the run that owns the folder alone."""

    def remove():
      for path in self.directory.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path)

    processes.from_first(remove)

  def close(self) -> None:
    if self._open is not None:
      self._open.close()
      self._open = None


class TemplateError(ValueError):
  """The asked for arrays are not those of the checkpoint, whole as it may be."""


def open_workdir(directory: str | pathlib.Path, *, keep: int = 2) -> Checkpoints:
  """Checkpoints of a training run.

  Args:
    directory: its workdir, or the folder `checkpoints` in it.
    keep: see `Checkpoints`.
  """
  directory = pathlib.Path(directory)
  inside = directory / "checkpoints"
  return Checkpoints(inside if inside.is_dir() else directory, keep=keep)


def load_model(
    directory: str | pathlib.Path, mesh: Mesh | None = None
) -> tuple[Config, Transformer, int]:
  """Configuration, model and step of the newest whole checkpoint; reads the parameters alone.

  Args:
    directory: workdir of a training run, or its folder `checkpoints`.
    mesh: whose devices read their parts; None for one device.

  Raises:
    ValueError: no checkpoint, or none that is whole.
  """
  checkpoints = open_workdir(directory)
  config = build(Config, json.loads(checkpoints.config()))
  model = nnx.eval_shape(lambda: Transformer(config.model, config.compute, rngs=nnx.Rngs(0)))
  graphdef, shapes = nnx.split(adapt(model, config.lora, rngs=nnx.Rngs(0)))
  shapes = sharding.spread(shapes, mesh, dense=config.compute.spread_dense)
  restored = checkpoints.restore({"params": shapes})
  checkpoints.close()
  return config, nnx.merge(graphdef, restored.state["params"]), restored.step
