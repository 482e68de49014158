"""The door of every script: configuration flag, errors in one sentence, results as JSON."""

import ctypes
import dataclasses
import importlib.util
import json
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags, logging
from ml_collections import config_dict, config_flags

from deepseek_jax.config import Config

_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_JSON = flags.DEFINE_bool("json", False, "Print the result as one JSON object on the last line.")

_SECTIONS = {
    name: kind if dataclasses.is_dataclass(kind) else typing.get_args(kind)[0]
    for name, kind in typing.get_type_hints(Config).items()
}
# Sections without which a configuration does something else; they are never filled in.
_OPTIONAL = tuple(field.name for field in dataclasses.fields(Config) if field.default is None)


class ConfigFlag:
  """`--config` with its `--config.section.field=value`; `value` is there once `run` has parsed."""

  def __init__(self, default: str | None = None):
    self._path = flags.DEFINE_string(
        "config", default and str(_CONFIGS / default),
        "configs/NAME.py, configs/NAME.py:ARGUMENT or a released config.json;"
        " --config.section.field=value overrides a field.",
    )  # fmt: skip
    self.overrides: list[str] = []

  @property
  def value(self) -> Config:
    """The experiment.

    Raises:
      ValueError: no --config, an unknown field, a wrong type or a value outside what is allowed.
      OSError: the file cannot be read.
    """
    if self._path.value is None:
      raise ValueError("--config is missing; give a file such as --config=configs/tiny.py")
    return Config.from_config_dict(override(load(self._path.value), self.overrides))


_config_flag: ConfigFlag | None = None


def config_flag(default: str | None = None) -> ConfigFlag:
  """Defines `--config` for this program; `default` is a file in configs/."""
  global _config_flag
  if _config_flag is None:
    _config_flag = ConfigFlag(default)
  return _config_flag


def load(path: str) -> ml_collections.ConfigDict:
  """The ConfigDict of a config file, every field that has a default filled in.

  Args:
    path: `FILE.py`, `FILE.py:ARGUMENT` (passed to its `get_config`) or a released `config.json`.

  Raises:
    OSError: no such file.
    ValueError: not a config file.
  """
  file, colon, argument = path.partition(".py:")
  file += ".py" if colon else ""
  if file.endswith(".json"):
    file, colon, argument = str(_CONFIGS / "from_json.py"), ":", path
  if not file.endswith(".py"):
    raise ValueError(f"--config is {path!r}; it must be a .py file with get_config, or .json")
  if not pathlib.Path(file).is_file():
    raise FileNotFoundError(f"--config is {path!r}; there is no file {file}")
  spec = importlib.util.spec_from_file_location("config_file", file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if not hasattr(module, "get_config"):
    raise ValueError(f"--config is {path!r}; {file} has no function get_config")
  config = module.get_config(argument) if colon else module.get_config()
  for name, kind in _SECTIONS.items():
    if isinstance(config.get(name), ml_collections.ConfigDict):
      _fill(config[name], kind)
    elif name not in config and name not in _OPTIONAL:
      config[name] = {}
      _fill(config[name], kind)
  return config


def _fill(section: ml_collections.ConfigDict, kind: type) -> None:
  """Puts defaults where the config file says nothing, so that they can be overridden."""
  hints = typing.get_type_hints(kind)
  for field in dataclasses.fields(kind):
    if field.default is dataclasses.MISSING:
      continue
    default = field.default
    if dataclasses.is_dataclass(default):
      if field.name not in section:
        section[field.name] = {}
      _fill(section[field.name], type(default))
    elif field.name not in section or section[field.name] is None:
      optional = isinstance(hints[field.name], types.UnionType)
      some = typing.get_args(hints[field.name])[0] if optional else None
      section[field.name] = config_dict.placeholder(some) if default is None else default


def override(
    config: ml_collections.ConfigDict, arguments: Sequence[str]
) -> ml_collections.ConfigDict:
  """`config` with `--config.section.field=value` arguments, parsed by ml_collections.

  Raises:
    ValueError: an unknown field, or a value of another type.
  """
  for argument in arguments:
    path = argument.partition("=")[0].partition(".")[2]
    node: Any = config
    names = path.split(".")
    for i, name in enumerate(names):
      if not isinstance(node, ml_collections.ConfigDict) or name not in node:
        where = "config" + "".join(f".{n}" for n in names[:i])
        known = ", ".join(node) if isinstance(node, ml_collections.ConfigDict) else "no fields"
        raise ValueError(f"unknown key config.{path}; {where} has {known}")
      node = node[name]
    values = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=["", argument])
    try:
      values(["", argument])
    except (flags.Error, TypeError) as error:
      value, kind = argument.partition("=")[2], type(node).__name__
      raise ValueError(f"config.{path} is {value!r}; it must be {kind} ({error})") from error
    config = values.config
  return config


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """Arguments that override a field of the configuration, as `--config.a.b=c`, and the others."""
  overrides, others = [], []
  rest = list(arguments)
  while rest:
    argument = rest.pop(0)
    name, equals, _ = argument.lstrip("-").partition("=")
    if not argument.startswith("-") or not name.startswith(("config.", "noconfig.")):
      others.append(argument)
      continue
    if not equals and rest and not rest[0].startswith("--") and not name.startswith("no"):
      argument += f"={rest.pop(0)}"
    overrides.append(argument)
  return overrides, others


def run(main: Callable[[], Mapping[str, Any] | None]) -> None:
  """Parses the command line, calls `main` and ends the process.

  Exit status 0 on success. Bad input (ValueError, OSError, a missing optional package, a flag
  error) is one sentence on standard error and status 2, a loss that is not finite one and status 1;
  `--verbosity=1` adds the traceback. With `--json` the last line of standard output is what `main`
  returned; else it is shown as lines.

  Args:
    main: reads its flags; returns JSON-able values, or None.
  """
  overrides, others = _split(sys.argv[1:])
  try:
    if overrides and _config_flag is None:
      raise flags.UnrecognizedFlagError(overrides[0].partition("=")[0])
    if _config_flag is not None:
      _config_flag.overrides = overrides
    rest = flags.FLAGS([sys.argv[0], *others])
    if len(rest) > 1:
      raise flags.Error(f"unknown argument {rest[1]!r}; flags begin with --")
    result = main()
  except (ValueError, OSError, ImportError, FloatingPointError, flags.Error) as error:
    logging.debug("traceback", exc_info=True)
    sentence = " ".join(str(error).split()) or type(error).__name__
    sys.stderr.write(f"error: {sentence}\n")
    sys.exit(1 if isinstance(error, FloatingPointError) else 2)
  if result is not None and _JSON.value:
    sys.stdout.write(json.dumps(result) + "\n")
  elif result is not None:
    sys.stdout.writelines(f"{name}: {value}\n" for name, value in result.items())
  sys.exit(0)


def keep_heap() -> None:
  """Lets glibc keep the memory that XLA's CPU programs free after every step.

  Their scratch arena, gigabytes, is otherwise mapped, faulted in page by page and unmapped again:
  2.65 s against 2.36 s a step, 0.62 s against 0.47 s a forward pass (12 layers, hidden 512, two
  cores). Call it before JAX runs. Does nothing without glibc.
  """
  if not sys.platform.startswith("linux"):
    return
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is not None:
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, -1)
