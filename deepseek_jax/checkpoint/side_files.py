"""The small files of a checkpoint: configuration, tokenizer, index and headers of shards."""

import dataclasses
import json
import pathlib
import shutil
from typing import Any, NamedTuple

from deepseek_jax import tokenizer as tok
from deepseek_jax.checkpoint import engram_constants
from deepseek_jax.checkpoint.shards import INDEX, Shards
from deepseek_jax.config import Config, ModelConfig
from deepseek_jax.model_config import read_released

# Folder in the workdir of a converted checkpoint, and the file in it that describes the shards.
ASIDE = "released"
_LAYOUT = "layout.json"


class Layout(NamedTuple):
  """What a conversion remembers of the shards it has read.

  Attributes:
    source: their folder.
    fingerprint: see `Shards.fingerprint`.
    headers: raw header by file name.
  """

  source: str
  fingerprint: str
  headers: dict[str, str]


def keep(shards: Shards, folder: pathlib.Path) -> None:
  """Writes the layout of `shards` and copies their small files."""
  folder.mkdir(exist_ok=True)
  headers = {name: file.header.decode() for name, file in shards.files.items()}
  layout = Layout(str(shards.directory.absolute()), shards.fingerprint(), headers)
  (folder / _LAYOUT).write_text(json.dumps(layout._asdict()), encoding="utf-8")
  copy(shards.directory, folder)


def copy(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies the JSON files beside shards, apart from index and layout."""
  for path in sorted(source.glob("*.json")):
    if path.name not in (INDEX, _LAYOUT):
      shutil.copyfile(path, target / path.name)


def read_layout(folder: pathlib.Path) -> Layout | None:
  """What `keep` has written, or None.

  Raises:
    ValueError: the file is damaged.
  """
  path = folder / _LAYOUT
  if not path.is_file():
    return None
  try:
    return Layout(**json.loads(path.read_text(encoding="utf-8")))
  except (ValueError, TypeError) as error:
    raise ValueError(f"{path} is damaged ({error!r})") from None


def unchanged(layout: Layout | None) -> Shards | None:
  """The shards of a layout, if they are still there and the same."""
  if layout is None or not pathlib.Path(layout.source).is_dir():
    return None
  try:
    shards = Shards(layout.source)
  except (ValueError, OSError):
    return None
  return shards if shards.fingerprint() == layout.fingerprint else None


def released_config(config: ModelConfig) -> dict[str, Any]:
  """A root `config.json` for shards of this model (spec 1)."""
  text = {k: v for k, v in dataclasses.asdict(config).items() if v is not None}
  quantization = {
      "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
      "scale_fmt": "ue8m0", "expert_dtype": "fp4",
  }  # fmt: skip
  return {
      "architectures": ["DeepseekV41ForCausalLM"],
      "model_type": "deepseek_v41",
      "dtype": "bfloat16",
      "quantization_config": quantization,
      "text_config": {"model_type": "deepseek_v41_text", **text},
  }


def check_same_model(config: ModelConfig, path: pathlib.Path) -> None:
  """Compares a configuration with a released `config.json`, if there is one.

  Ratios and number of DSpark blocks do not count.

  Raises:
    ValueError: they describe different models; the message names the first field.
  """
  if path.is_file():
    check_model(config, read_released(path), str(path))


def check_model(config: ModelConfig, other: ModelConfig, where: str) -> None:
  """Compares two configurations of the backbone; `where` says whose the other one is.

  Raises:
    ValueError: see `check_same_model`.
  """

  def backbone(config):
    fields = dataclasses.asdict(config)
    del fields["num_nextn_predict_layers"]
    return fields | {"compress_ratios": config.compress_ratios[: config.num_hidden_layers]}

  ours, theirs = backbone(config), backbone(other)
  for name, value in ours.items():
    if value != theirs[name]:
      raise ValueError(f"model.{name} is {value!r}; {where} says {theirs[name]!r}")


def with_tokenizer(config: Config, source: pathlib.Path, folder: pathlib.Path) -> Config:
  """The experiment with the tokenizer of a released checkpoint, its Engram constants checked.

  Args:
    config: the experiment.
    source: the released checkpoint. Without a `tokenizer.json` there, `config.data.tokenizer` is
      its tokenizer.
    folder: where `copy` will have put the file. `config.data.tokenizer` becomes it, unless it
      already names a tokenizer with the same vocabulary.

  Raises:
    ValueError: see `engram_constants.derive`; or the tokenizer cannot be read.
  """
  file = source / "tokenizer.json"
  name = str(file) if file.is_file() else config.data.tokenizer
  tokenizer = None
  if file.is_file():
    tokenizer = tok.from_name(name)
    if not _same(config.data.tokenizer, tokenizer):
      data = dataclasses.replace(config.data, tokenizer=str(folder / file.name))
      config = dataclasses.replace(config, data=data)
  if config.model.engram_layer_ids:
    engram_constants.derive(config.model, tokenizer or tok.from_name(name), name)
  return config


def _same(name: str, tokenizer: tok.Tokenizer) -> bool:
  try:
    other = tok.from_name(name)
  except (ValueError, ImportError):
    return False
  return other.vocab_size == tokenizer.vocab_size and other.pieces() == tokenizer.pieces()
