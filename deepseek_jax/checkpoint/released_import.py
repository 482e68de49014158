"""Released shards → training checkpoint, streaming."""

import pathlib
from collections.abc import Iterator

import numpy as np

from deepseek_jax.checkpoint import conversion, parts, released_reader, side_files
from deepseek_jax.checkpoint.array_store import ArrayWriter, Index
from deepseek_jax.checkpoint.conversion import BLOCK_BYTES, Progress, Report
from deepseek_jax.checkpoint.partial_folder import open_partial
from deepseek_jax.checkpoint.parts import Part
from deepseek_jax.checkpoint.shards import Shards
from deepseek_jax.config import Config


def to_training(
    source: str | pathlib.Path,
    target: str | pathlib.Path,
    config: Config,
    *,
    keep: parts.Keep = lambda path: True,
    progress: Progress = lambda done, total: None,
) -> Report:
  """A workdir with one checkpoint, of step 0, that holds the parameters of released shards.

  Weights that stay as stored are the arrays `params.….value.codes` and `.scales` (see
  `quantised.Quantised`), which `stored_checkpoint.load_model` reads. All others are decoded to the
  model's dtype and are what a training run saves. Memory holds blocks of 32 MiB. A conversion that
  was killed leaves `TARGET.partial`; the same one continues it, another one begins anew.

  Args:
    source: folder of the shards. Its `config.json`, if any, must describe the same model; its
      `tokenizer.json`, if any, is the checkpoint's tokenizer.
    target: the workdir; new or empty.
    config: the experiment that the checkpoint records.
    keep: see `parts.plan`.
    progress: see `Progress`.

  Raises:
    ValueError: shards that are not whole, tensors that are not those of `config.model`, Engram
      constants that tokenizer and tables do not agree on, or a target that is in use.
  """
  source, target = pathlib.Path(source), pathlib.Path(target).absolute()
  shards = Shards(source)
  side_files.check_same_model(config.model, source / "config.json")
  planned = parts.plan(conversion.abstract_model(config), keep)
  skipped = parts.check(shards.tensors, planned)
  config = side_files.with_tokenizer(config, source, target / side_files.ASIDE)
  arrays, needs = conversion.arrays_of(planned), parts.wanted(planned)
  total = sum(shards.tensors[name].num_bytes for name in needs)
  meter = conversion.Meter(progress, total)
  forms = [(name, str(part.dtype)) for name, part in arrays.items()]
  mark = conversion.fingerprint(shards.fingerprint(), config.to_json(), forms)
  with open_partial(target, mark) as folder:
    side_files.keep(shards, folder.path / side_files.ASIDE)
    writer = ArrayWriter(
        folder.path / "checkpoints" / "0", {name: part.dtype for name, part in arrays.items()}
    )
    for name, part in arrays.items():
      if name not in folder.done:
        chunk = _chunk(part)
        entry = writer.write(name, part.shape, part.dtype, chunk, _blocks(shards, part))
        folder.finish(name, entry)
      meter.add(sum(shards.tensors[tensor].num_bytes for _, tensor, _, _ in part.tensors()))
    writer.close(
        {
            "step": 0,
            "config": config.to_json(),
            "iterator": {},
            "arrays": {name: folder.done[name] for name in arrays},
        }
    )
    folder.commit()
  return Report(len(needs), total, skipped, str(source.absolute()))


def _blocks(shards: Shards, part: Part) -> Iterator[tuple[Index, np.ndarray]]:
  for index in parts.blocks(part, BLOCK_BYTES):
    yield index, released_reader.read(shards, part, index)


def _chunk(part: Part) -> tuple[int, ...]:
  inner = part.shape[part.depth :]
  return (1,) * part.depth + (parts.block_rows(part, BLOCK_BYTES), *inner[1:])
