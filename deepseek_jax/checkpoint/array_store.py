"""Arrays of a training checkpoint, a block at a time: Orbax's files without its whole arrays."""

import contextlib
import json
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from absl import logging

from deepseek_jax.checkpoint import checksum
from deepseek_jax.checkpoint import record as records
from deepseek_jax.checkpoint.record import DamagedError

# Of decoded chunks; Orbax may have written an array as a single one.
_CACHE_BYTES = 512 << 20
Index = tuple[slice, ...]


class ArrayWriter:
  """A step that `training.Checkpoints` will list and restore, written array by array.

  It is listed from `close` on.

  Args:
    step: folder of the step; continued if it is there.
    arrays: numpy dtype of every array, by name.
  """

  def __init__(self, step: pathlib.Path, arrays: Mapping[str, Any]):
    self._step = step
    if not (step / "state").is_dir():
      self._sketch(arrays)

  def _sketch(self, arrays: Mapping[str, Any]) -> None:
    """Lets Orbax write the step with one element an array; each array is then replaced."""
    for left in self._step.parent.glob(f"{self._step.name}.orbax-checkpoint-tmp*"):
      shutil.rmtree(left)
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(use_ocdbt=False), record=ocp.JsonCheckpointHandler()
    )
    state = {name: np.zeros(1, dtype) for name, dtype in arrays.items()}
    args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), record=ocp.args.JsonSave({}))
    with _quiet(), ocp.Checkpointer(handler) as checkpointer:
      checkpointer.save(self._step, args=args, force=True)
    shutil.rmtree(self._step / "record")

  def write(
      self, name: str, shape: tuple[int, ...], dtype: Any, chunk: tuple[int, ...],
      blocks: Iterable[tuple[Index, np.ndarray]],
  ) -> dict[str, Any]:  # fmt: skip
    """Writes an array and returns its entry of the record: shape, dtype, checksum.

    Args:
      name: one of the step's arrays; what an earlier run has left of it goes.
      shape: of the array.
      dtype: of the array.
      chunk: shape of a block; one file each.
      blocks: index and value of every block.
    """
    folder = self._step / "state" / name
    shutil.rmtree(folder, ignore_errors=True)
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "metadata": {"compressor": {"id": "zstd", "level": 1}, "chunks": chunk},
        # `PartialFolder.commit` waits for the disk once, instead of 90,000 times.
        "context": {"file_io_sync": False},
        # Orbax takes a missing chunk for damage.
        "store_data_equal_to_fill_value": True,
    }
    store = ts.open(spec, create=True, dtype=str(np.dtype(dtype)), shape=shape).result()
    sums, pending = np.zeros(checksum.LANES, np.uint32), None
    for index, value in blocks:
      sums += checksum.of_block(value, index)
      if pending is not None:
        pending.result()
      pending = store[index].write(value)
    if pending is not None:
      pending.result()
    return records.entry(shape, dtype, checksum.spell(sums))

  def close(self, body: Mapping[str, Any]) -> None:
    """Writes the record; `body` is what `training.Checkpoints.save` puts there."""
    args = ocp.args.JsonSave(records.seal(body))
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
      checkpointer.save(self._step / "record", args=args, force=True)


class ArrayReader:
  """The arrays of one step of a training checkpoint, by whomever it was written.

  Args:
    step: folder of the step.

  Attributes:
    record: what was saved: "step", "config", "iterator" and "arrays".

  Raises:
    record.DamagedError: the record is not whole.
    record.FormatError: it is of another format.
  """

  def __init__(self, step: pathlib.Path):
    self.step = step
    try:
      text = records.read(step)
    except (OSError, ValueError) as error:
      raise DamagedError(f"checkpoint {step} has no whole record ({error!r})") from None
    self.record = records.parse(text, step)
    self._context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    self._open: dict[str, Any] = {}

  def read(self, name: str, index: Index) -> np.ndarray:
    """A block of an array.

    Raises:
      record.DamagedError: its files are not whole.
    """
    try:
      if name not in self._open:
        self._open[name] = ts.open(self._spec(name), context=self._context).result()
      return self._open[name][index].read().result()
    except (ValueError, OSError, KeyError) as error:
      told = str(error).split("\n")[0][:200]
      raise DamagedError(f"checkpoint {self.step}: array {name} cannot be read ({told})") from None

  def verify(self, name: str, indices: Iterable[Index]) -> None:
    """Reads an array in blocks that tile it.

    Raises:
      record.DamagedError: it is not what was saved.
    """
    sums = np.zeros(checksum.LANES, np.uint32)
    for index in indices:
      sums += checksum.of_block(self.read(name, index), index)
    store = self._open[name]
    found = records.entry(store.shape, store.dtype.numpy_dtype, checksum.spell(sums))
    if found != self.record["arrays"][name]:
      raise DamagedError(f"checkpoint {self.step}: array {name} is not what was saved")

  def _spec(self, name: str) -> dict[str, Any]:
    state = self.step / "state"
    metadata = json.loads((state / "_METADATA").read_text(encoding="utf-8"))
    if (state / "manifest.ocdbt").is_file():
      base = {"driver": "file", "path": f"{state}/"}
      store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    else:
      store = {"driver": "file", "path": f"{state / name}/"}
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    return {"driver": driver, "kvstore": store, "fill_missing_data_reads": False}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Without Orbax's warning that files which are to be no OCDBT database are none."""
  before = logging.get_verbosity()
  logging.set_verbosity(logging.ERROR)
  try:
    yield
  finally:
    logging.set_verbosity(before)
