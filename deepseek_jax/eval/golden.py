"""Golden files: what they ask for, read and checked before anything is compiled.

Keys and conventions are those of the golden data's README: weights under released names after `w/`,
captures under `cap/layer{i}.`, gradients under `g/`. Sizes, batch and length are the file's own.
"""

import json
import pathlib
import re
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax import tokenizer as tok
from deepseek_jax.config import ModelConfig
from deepseek_jax.quant import QuantPlan, fake_quant

# The official argument names where they differ from the released config's.
_OFFICIAL = {
    "dim": "hidden_size", "moe_inter_dim": "moe_intermediate_size", "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads", "n_activated_experts": "num_experts_per_tok",
    "route_scale": "routed_scaling_factor", "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window", "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids", "score_func": "scoring_func",
    "candidate_source_layer": "candidate_source_layer_id", "engram_pad_id": "engram_pad_token_id",
    "max_seq_len": "max_position_embeddings", "n_mtp_layers": "num_nextn_predict_layers",
    "norm_eps": "rms_norm_eps",
}  # fmt: skip
_OFFICIAL_ROPE = {
    "rope_factor": "factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
    "original_seq_len": "original_max_position_embeddings",
}  # fmt: skip
# They steer the reference program, or parts outside the text backbone.
_REFERENCE_ONLY = re.compile(
    r"(dtype|expert_dtype|scale_fmt|max_batch_size|temperature)$|vision_|dspark_"
)

# Captured latents tell which components the run rounded.
_COMPONENTS = {"window_kv": "window_kv", "compress_kv": "main_kv", "index_k": "index"}
CAPTURE = re.compile(
    r"cap/layer(\d+)\.(x_out|pre_out|window_kv|topk|compress_kv|index_k|index_scores|candidates)$"
)


class Case(NamedTuple):
  """What a golden file asks for.

  Attributes:
    golden: its arrays.
    config: of the model.
    tensors: weights under released names.
    ids: [B, T]; `single` if the file stores one sequence without the batch axis.
    ngrams: Engram classes [B, T, n], or None.
    classes: token class of every id, or None without Engram.
    single: see `ids`.
  """

  golden: Mapping[str, np.ndarray]
  config: ModelConfig
  tensors: Mapping[str, np.ndarray]
  ids: np.ndarray
  ngrams: np.ndarray | None
  classes: np.ndarray | None
  single: bool


def read_npz(flag: str, path: str) -> dict[str, np.ndarray]:
  """All arrays of a file; a ValueError says in one sentence what is wrong with it."""
  if not pathlib.Path(path).is_file():
    raise ValueError(f"{flag} is {path}; there is no such file")
  try:
    if not zipfile.is_zipfile(path):
      raise ValueError("it is no zip archive")
    with np.load(path) as file:
      return dict(file)
  except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as e:
    raise ValueError(f"{flag} is {path}; it must be an .npz file of plain arrays: {e}") from None


def read_config(path: str) -> ModelConfig:
  """The model of `text_config`, or of the official arguments where a file has only those."""
  if not pathlib.Path(path).is_file():
    raise ValueError(f"--args is {path}; there is no such file")
  try:
    root = json.loads(pathlib.Path(path).read_text())
  except ValueError as e:
    raise ValueError(f"--args is {path}; it must be JSON: {e}") from None
  if not isinstance(root, dict):
    raise ValueError(f"--args is {path}, a {type(root).__name__}; it must be a JSON object")
  text = root.get("text_config", root)
  if "text_config" not in root and ("args" in root or "dim" in root):
    text = _from_official(root.get("args", root))
  if not isinstance(text, dict):
    raise ValueError(f"text_config in {path} is {text!r}; it must be a JSON object")
  return ModelConfig.from_released(text)


def _from_official(args: Any) -> dict[str, Any]:
  if not isinstance(args, dict):
    raise ValueError(f"args is {args!r}; it must be a JSON object")
  args = {k: v for k, v in args.items() if not _REFERENCE_ONLY.match(k)}
  rope = {new: args.pop(old) for old, new in _OFFICIAL_ROPE.items() if old in args}
  text = {_OFFICIAL.get(k, k): v for k, v in args.items()}
  return text | ({"rope_scaling": rope} if rope else {})


def read_case(golden_path: str, args_path: str, weights_path: str | None) -> Case:
  """The files as one case; every input error is found here, before anything is compiled."""
  golden = read_npz("--golden", golden_path)
  weights = read_npz("--weights", weights_path) if weights_path else {}
  config = read_config(args_path)
  tensors = {k[2:]: v for f in (weights, golden) for k, v in f.items() if k.startswith("w/")}
  if not tensors:
    where = f"and {weights_path} hold" if weights_path else "holds"
    raise ValueError(
        f"--golden {golden_path} {where} no w/ tensors; --weights must name a file that does"
    )

  def find(key):
    return golden.get(key, weights.get(key))

  ids = find("ids")
  if ids is None:
    raise ValueError(f"ids is missing in {golden_path}; it must be [B, S] or [S] token ids")
  if ids.ndim not in (1, 2) or ids.shape[-1] < 1 or not np.issubdtype(ids.dtype, np.integer):
    raise ValueError(f"ids is {ids.dtype} {ids.shape}; it must be integers [B, S] or [S]")
  for key in ("logits", "exact_logits"):
    if key in golden and golden[key].shape != (*ids.shape, config.vocab_size):
      raise ValueError(
          f"{key} has shape {golden[key].shape}; ids and vocab_size give"
          f" {(*ids.shape, config.vocab_size)}"
      )
  single, ids = ids.ndim == 1, np.atleast_2d(ids)
  for line in ids:
    tok.checked_ids(line, config.vocab_size)
  ngrams = classes = None
  if config.engram_layer_ids:
    classes = find("engram_token_map")
    if classes is None or classes.shape != (config.vocab_size,):
      got = "missing" if classes is None else f"{classes.shape}"
      raise ValueError(
          f"engram_token_map is {got}; Engram layers {config.engram_layer_ids} need the class of"
          f" each of {config.vocab_size} tokens"
      )
    outside = (classes < 0) | (classes >= config.engram_compressed_vocab_size)
    if outside.any():
      raise ValueError(
          f"engram_token_map holds {classes[outside][0]}; allowed are"
          f" 0..{config.engram_compressed_vocab_size - 1}"
      )
    pad, order = int(classes[config.engram_pad_token_id]), config.engram_max_ngram_size
    ngrams = np.stack([tok.ngrams(tok.classes_of(line, classes), pad, order) for line in ids])
    classes = classes.astype(np.int32)
  return Case(golden, config, tensors, ids.astype(np.int32), ngrams, classes, single)


def rounded_components(golden: Mapping[str, np.ndarray]) -> tuple[str, ...] | None:
  """Components whose stored latents lie on their storage grid; None where no latents are stored.

  A block that was rounded is unchanged when rounded again; one that was not has no chance of it.
  """
  plan, votes = QuantPlan.released(), {}
  rounded_again = jax.jit(fake_quant, static_argnums=1)
  for key, value in golden.items():
    match = CAPTURE.match(key)
    component = _COMPONENTS.get(match[2]) if match else None
    if key == "exact_window_kv":
      component = "window_kv"
    if component and value.size:
      again = rounded_again(jnp.asarray(value, jnp.float32), getattr(plan, component))
      votes.setdefault(component, []).append(np.mean(np.asarray(again) == value) > 0.9)
  if not votes:
    return None
  rounded = {c: np.mean(v) > 0.5 for c, v in votes.items()}
  # A component without captures goes with those that have some.
  default = np.mean(list(rounded.values())) > 0.5
  return tuple(c for c in ("main_kv", "index", "window_kv") if rounded.get(c, default))
