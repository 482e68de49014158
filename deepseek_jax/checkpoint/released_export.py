"""Training checkpoint → released shards, streaming."""

import json
import pathlib
from typing import Any

from deepseek_jax.checkpoint import conversion, parts, released_writer, side_files, training
from deepseek_jax.checkpoint.array_store import ArrayReader
from deepseek_jax.checkpoint.conversion import BLOCK_BYTES, Progress, Report
from deepseek_jax.checkpoint.partial_folder import open_partial
from deepseek_jax.checkpoint.shards import INDEX, SINGLE, Shards
from deepseek_jax.config import Config
from deepseek_jax.fields import build


def to_released(
    source: str | pathlib.Path,
    target: str | pathlib.Path,
    *,
    original: str | pathlib.Path | None = None,
    shard_bytes: int = 10 << 30,
    progress: Progress = lambda done, total: None,
) -> Report:
  """Released shards of the newest checkpoint of a workdir.

  Memory holds blocks of 32 MiB, and the chunks that the checkpoint was saved in. Every array is
  read once more, first, and compared with its checksum.

  Args:
    source: workdir of a training run or of `released_import.to_training`.
    target: folder of the shards; new or empty.
    original: the released checkpoint that the training began with. Blocks of weights that have not
      changed keep its bytes, tensors outside the text backbone are copied from it, and names,
      order and sizes of shards are its own: with nothing changed, so is every byte. Default: what
      `to_training` has read, if it is still there and the same.
    shard_bytes: largest shard where neither an original nor `to_training` has set them.
    progress: see `Progress`.

  Raises:
    ValueError: no checkpoint, a damaged one, an original of another model, values that are not
      finite, or a target that is in use.
  """
  checkpoints = training.open_workdir(source)
  steps = checkpoints.steps()
  checkpoints.close()
  if not steps:
    raise ValueError(f"source {source} holds no checkpoint; it must be the workdir of a run")
  reader = ArrayReader(checkpoints.directory / str(steps[-1]))
  config = build(Config, json.loads(reader.record["config"]))
  adapter = next((name for name in reader.record["arrays"] if ".lora." in name), None)
  if adapter is not None:
    raise ValueError(
        f"source {source} holds adapters ({adapter}); released shards hold none: merge them into"
        " the weights first, see docs/finetuning.md"
    )
  planned = saved_plan(config, reader.record)
  arrays = conversion.arrays_of(planned)
  aside = checkpoints.directory.parent / side_files.ASIDE
  kept = side_files.read_layout(aside)
  first = Shards(original) if original is not None else side_files.unchanged(kept)
  if first is not None:
    parts.check(first.tensors, planned)
    side_files.check_same_model(config.model, first.directory / "config.json")
    aside = first.directory
  weights = released_writer.Weights(reader, arrays, first)
  if first is not None:
    layout = released_writer.original_layout(first)
  elif kept is not None:
    layout = released_writer.kept_layout(kept.headers, weights.tensors)
  else:
    layout = released_writer.fresh_layout(weights.tensors, shard_bytes)

  def blocks(name):
    if name in weights.tensors:
      return weights.blocks(name)
    return first.blocks(name, BLOCK_BYTES)

  sizes = {name: shard.num_bytes for name, shard in layout.items()}
  total = sum(sizes.values()) + sum(map(conversion.num_bytes, arrays.values()))
  meter = conversion.Meter(progress, total)
  marks = reader.record["arrays"], first and first.fingerprint(), sizes
  with open_partial(target, conversion.fingerprint(config.to_json(), *marks)) as folder:
    for name, part in arrays.items():
      reader.verify(name, parts.blocks(part, BLOCK_BYTES))
      meter.add(conversion.num_bytes(part))
    for name, shard in layout.items():
      if name in folder.done:
        meter.add(sizes[name])
      else:
        released_writer.write_shard(folder.path / name, shard, blocks, meter.add)
        folder.finish(name, sizes[name])
    _write_side_files(folder.path, aside, config, layout, first)
    folder.commit()
  written = {name for shard in layout.values() for name in shard.tensors}
  known = released_writer.tensors_of(kept.headers) if kept and first is None else set()
  return Report(
      len(written), sum(sizes.values()), sorted(known - written), first and str(first.directory)
  )


def saved_plan(config: Config, record: dict[str, Any]) -> Any:
  """The plan (`parts.plan`) of the parameters in a checkpoint, kept ones and decoded ones.

  Raises:
    ValueError: its arrays are not those of the configured model.
  """
  saved = record["arrays"]
  keep = lambda path: f"params.{'.'.join(path)}.value.codes" in saved
  planned = parts.plan(conversion.abstract_model(config), keep)
  for name, part in conversion.arrays_of(planned).items():
    found = saved.get(name, {"shape": None, "dtype": None})
    if (found["shape"], found["dtype"]) != (list(part.shape), str(part.dtype)):
      told = f"{found['dtype']}{found['shape']}" if name in saved else "nothing"
      raise ValueError(
          f"array {name}: the checkpoint holds {told}, its configuration needs"
          f" {part.dtype}{list(part.shape)}"
      )
  return planned


def _write_side_files(
    target: pathlib.Path, source: pathlib.Path, config: Config,
    layout: dict[str, released_writer.Shard], first: Shards | None,
) -> None:  # fmt: skip
  side_files.copy(source, target)
  if not (target / "config.json").is_file():
    text = json.dumps(side_files.released_config(config.model), indent=2)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")
  index = first.directory / INDEX if first is not None else None
  if index is not None and index.is_file():
    (target / INDEX).write_bytes(index.read_bytes())
  elif index is None and list(layout) != [SINGLE]:
    (target / INDEX).write_text(released_writer.make_index(layout), encoding="utf-8")
