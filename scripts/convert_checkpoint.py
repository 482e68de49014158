"""Released safetensors to a training checkpoint and back, a block at a time.

  python scripts/convert_checkpoint.py --source=RELEASED --target=WORKDIR [--config=FILE]
  python scripts/convert_checkpoint.py --to=released --source=WORKDIR --target=NEW \
      [--original=RELEASED]

FP8 and FP4 weights stay as they are stored, unless `--dequantise` names them. Without `--config`
the model is that of SOURCE/config.json. Back, untouched weights keep their bytes: those that
stayed as stored always, decoded ones where `--original` (by default the checkpoint they came from)
is there to compare. Killed, it leaves TARGET.partial alone; run again, it continues.
"""

import pathlib
import re
import resource
import sys
import time

from absl import flags

from deepseek_jax import cli

_CONFIG = cli.config_flag()
_SOURCE = flags.DEFINE_string("source", None, "Folder to read.")
_TARGET = flags.DEFINE_string("target", None, "Folder to create.")
_TO = flags.DEFINE_string("to", "training", "What to make: training or released.")
_ORIGINAL = flags.DEFINE_string(
    "original", None, "Released checkpoint that the training began with, for --to=released."
)
_DEQUANTISE = flags.DEFINE_multi_string(
    "dequantise",
    [],
    "Decode parameters in whose dotted path this regular expression is found ('.' is all of them),"
    " for --to=training; repeat for more.",
)
_SHARD_BYTES = flags.DEFINE_integer(
    "shard_bytes", 10 << 30, "Largest shard where no released checkpoint has set them.", 1
)


class _Bar:
  """Progress in bytes on standard error: a bar on a terminal, else nothing."""

  def __init__(self):
    import rich.console
    import rich.progress

    console = rich.console.Console(stderr=True)
    self._bar = rich.progress.Progress(
        rich.progress.BarColumn(), rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(), rich.progress.TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip
    self._task = self._bar.add_task("", total=None)

  def __enter__(self):
    self._bar.start()
    return lambda done, total: self._bar.update(self._task, completed=done, total=total)

  def __exit__(self, *_):
    self._bar.stop()


def decoded(patterns: list[str], paths: list[str]) -> set[str]:
  """Those of `paths` in which a pattern is found.

  Raises:
    ValueError: a pattern that is none, or is found in no path.
  """
  found = set()
  for pattern in patterns:
    try:
      matches = {path for path in paths if re.search(pattern, path)}
    except re.error as error:
      raise ValueError(f"--dequantise {pattern!r} is no regular expression: {error}") from error
    if not matches:
      raise ValueError(
          f"--dequantise {pattern!r} matches no parameter in FP8 or FP4, such as {paths[0]}"
      )
    found |= matches
  return found


def _to_training(progress):
  from deepseek_jax.checkpoint import conversion, parts, released_import

  if _ORIGINAL.value is not None:
    raise ValueError("--original is for --to=released alone")
  if flags.FLAGS.config is None:
    file = pathlib.Path(_SOURCE.value) / "config.json"
    if not file.is_file():
      raise ValueError(f"--config is missing, and there is no {file}")
    flags.FLAGS.config = str(file)
  config = _CONFIG.value
  planned = parts.leaves(parts.plan(conversion.abstract_model(config)))
  stored = [".".join(part.path) for part in planned if part.stored]
  freed = decoded(_DEQUANTISE.value, stored)
  return released_import.to_training(
      _SOURCE.value, _TARGET.value, config,
      keep=lambda path: ".".join(path) not in freed, progress=progress,
  )  # fmt: skip


def _to_released(progress):
  from deepseek_jax.checkpoint import released_export

  if flags.FLAGS.config is not None or _CONFIG.overrides:
    raise ValueError("--config is for --to=training alone; a training checkpoint has its own")
  if _DEQUANTISE.value:
    raise ValueError("--dequantise is for --to=training alone")
  return released_export.to_released(
      _SOURCE.value, _TARGET.value, original=_ORIGINAL.value, shard_bytes=_SHARD_BYTES.value,
      progress=progress,
  )  # fmt: skip


def _peak_rss() -> int:
  """Largest resident memory of this program, bytes.

  Linux hands `ru_maxrss` on to a child: it would be that of the shell or test that started us.
  """
  status = pathlib.Path("/proc/self/status")
  if status.exists() and (peak := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
    return int(peak[1]) * 1024
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> dict:
  """Converts, and says how much."""
  convert = {"training": _to_training, "released": _to_released}.get(_TO.value)
  if convert is None:
    raise ValueError(f"--to is {_TO.value!r}; it must be training or released")
  for name, value in (("source", _SOURCE.value), ("target", _TARGET.value)):
    if value is None:
      raise ValueError(f"--{name} is missing; give a folder")
  if not pathlib.Path(_SOURCE.value).is_dir():
    raise ValueError(f"--source is {_SOURCE.value!r}; there is no such folder")
  cli.keep_heap()
  begin = time.monotonic()
  with _Bar() as progress:
    report = convert(progress)
  return {
      "tensors": report.tensors,
      "bytes": report.num_bytes,
      "skipped": report.skipped,
      "original": report.original,
      "peak_rss_bytes": _peak_rss(),
      "seconds": time.monotonic() - begin,
  }


if __name__ == "__main__":
  cli.run(main)
