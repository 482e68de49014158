"""Configuration: frozen, typed, hashable; built once at the door and static under `jit`.

Values live in `configs/*.py` as `ml_collections.ConfigDict`, or in a released `config.json`. They
become the dataclasses below, and the ConfigDict is never seen again. Unknown keys, wrong types and
values the model cannot represent are errors that name the field.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_collections

from deepseek_jax.fields import build, require


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """YaRN scaling of the compressed layers' rotary table (spec 3)."""

  factor: float = 16.0
  beta_fast: int = 32
  beta_slow: int = 1
  original_max_position_embeddings: int = 65536
  rope_type: str = "yarn"

  def __post_init__(self):
    require(self.rope_type == "yarn", "rope_scaling.rope_type", self.rope_type, "'yarn'")
    require(self.factor >= 1, "rope_scaling.factor", self.factor, "at least 1")


# Keys of the released text_config for which the architecture has one legal value.
_FIXED = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
# Keys that describe parts outside the text backbone (DSpark) or the Hugging Face wrapper.
_IGNORED = frozenset({
    "initializer_range", "use_cache", "dtype", "torch_dtype", "dspark_block_size",
    "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank",
    "dspark_n_routed_experts", "dspark_num_experts_per_tok",
    "bos_token_id", "eos_token_id", "pad_token_id",
})  # fmt: skip

_POSITIVE = (
    "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "head_dim", "q_lora_rank", "o_lora_rank", "o_groups",
    "n_routed_experts", "num_experts_per_tok", "sliding_window", "index_n_heads",
    "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings",
    "engram_max_ngram_size",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Sizes and schedule of the text backbone, named as in the released `text_config` (spec 1).

  Sizes are in channels, heads, tokens or entries. `compress_ratios` may carry the ratios of the
  `num_nextn_predict_layers` DSpark blocks after those of the backbone, as released.
  """

  vocab_size: int
  hidden_size: int
  moe_intermediate_size: int
  num_hidden_layers: int
  num_attention_heads: int
  head_dim: int
  qk_rope_head_dim: int
  q_lora_rank: int
  o_lora_rank: int
  o_groups: int
  n_routed_experts: int
  num_experts_per_tok: int
  sliding_window: int
  compress_ratios: tuple[int, ...]
  kv_source_layer_ids: tuple[int, ...]
  index_source_layer_ids: tuple[int, ...]
  index_n_heads: int
  index_head_dim: int
  index_topk: int
  candidate_source_layer_id: int | None = None
  candidate_topk_blocks: int = 0
  candidate_block_size: int = 8
  max_position_embeddings: int = 1048576
  rope_theta: float = 10000.0
  compress_rope_theta: float = 160000.0
  rope_scaling: RopeScaling = RopeScaling()
  routed_scaling_factor: float = 1.5
  swiglu_limit: float = 10.0
  rms_norm_eps: float = 1e-20
  hc_mult: int = 4
  hc_sinkhorn_iters: int = 20
  hc_eps: float = 1e-6
  engram_layer_ids: tuple[int, ...] = ()
  engram_num_embeddings: tuple[int, ...] = ()
  engram_max_ngram_size: int = 4
  engram_vocab_size: int = 0
  engram_n_heads: int = 0
  engram_head_dim: int = 0
  engram_pad_token_id: int = 2
  engram_compressed_vocab_size: int = 0
  num_nextn_predict_layers: int = 0

  def __post_init__(self):
    for name in _POSITIVE:
      require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
    require(
        self.head_dim % 32 == 0, "head_dim", self.head_dim,
        "a multiple of 32 (the FP8 window format scales blocks of 32, FP4 blocks of 16)",
    )  # fmt: skip
    require(
        self.index_head_dim % 32 == 0, "index_head_dim", self.index_head_dim,
        "a multiple of 32 (MXFP4 scales blocks of 32)",
    )  # fmt: skip
    widest = min(self.head_dim, self.index_head_dim)
    require(
        0 < self.qk_rope_head_dim <= widest and self.qk_rope_head_dim % 2 == 0,
        "qk_rope_head_dim", self.qk_rope_head_dim, f"even and within 2..{widest}",
    )  # fmt: skip
    require(
        self.num_attention_heads % self.o_groups == 0, "o_groups", self.o_groups,
        f"a divisor of num_attention_heads ({self.num_attention_heads})",
    )  # fmt: skip
    require(
        self.num_experts_per_tok <= self.n_routed_experts, "num_experts_per_tok",
        self.num_experts_per_tok, f"at most n_routed_experts ({self.n_routed_experts})",
    )  # fmt: skip
    require(
        self.index_topk <= self.max_position_embeddings, "index_topk", self.index_topk,
        f"at most max_position_embeddings ({self.max_position_embeddings})",
    )  # fmt: skip
    require(self.rms_norm_eps > 0, "rms_norm_eps", self.rms_norm_eps, "above 0")
    require(
        len(self.engram_num_embeddings) == len(self.engram_layer_ids), "engram_num_embeddings",
        self.engram_num_embeddings, f"one row count for each of layers {self.engram_layer_ids}",
    )  # fmt: skip
    if self.engram_layer_ids:
      for name in ("engram_vocab_size", "engram_n_heads", "engram_head_dim"):
        require(
            getattr(self, name) >= 1, name, getattr(self, name), "at least 1 with Engram layers"
        )
      require(
          1 <= self.engram_compressed_vocab_size <= self.vocab_size, "engram_compressed_vocab_size",
          self.engram_compressed_vocab_size, f"within 1..vocab_size ({self.vocab_size})",
      )  # fmt: skip
      require(
          0 <= self.engram_pad_token_id < self.vocab_size, "engram_pad_token_id",
          self.engram_pad_token_id, f"a token id below {self.vocab_size}",
      )  # fmt: skip

  @classmethod
  def from_released(cls, root: Mapping[str, Any]) -> "ModelConfig":
    """From a released root `config.json` (nested `text_config`), or from a bare `text_config`.

    Raises:
      ValueError: an unknown key, a wrong type, or a value that the architecture does not have.
    """
    text = dict(root.get("text_config", root))
    for key, only in _FIXED.items():
      if key in text:
        require(text[key] == only, key, text[key], repr(only))
        del text[key]
    return build(cls, {k: v for k, v in text.items() if k not in _IGNORED}, prefix="text_config.")


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
  """How the model is executed; nothing here changes what it computes beyond rounding.

  `quantize` lists the cache components whose fake quantisation is on (`main_kv`, `index`,
  `window_kv`). `row_chunk` is the number of query rows whose scores exist at one time. `kernels`
  is "auto" (Pallas kernels on a TPU, where they take the sizes), "pallas" or "reference".
  """

  dtype: str = "float32"
  param_dtype: str = "float32"
  quantize: tuple[str, ...] = ()
  remat: str = "none"
  scan_layers: bool = True
  row_chunk: int = 128
  kernels: str = "auto"

  def __post_init__(self):
    floats = "float32", "bfloat16"
    known = dict(dtype=floats, param_dtype=floats, remat=("none", "layer", "dots"))
    known["kernels"] = "auto", "pallas", "reference"
    for name, allowed in known.items():
      value = getattr(self, name)
      require(value in allowed, f"compute.{name}", value, f"one of {allowed}")
    allowed = ("main_kv", "index", "window_kv")
    for part in self.quantize:
      require(part in allowed, "compute.quantize", part, f"one of {allowed}")
    require(self.row_chunk >= 1, "compute.row_chunk", self.row_chunk, "at least 1")

  @property
  def implementation(self) -> str | None:
    """What `pallas_kernels.dispatch.resolve` takes."""
    return None if self.kernels == "auto" else self.kernels


_STORAGE = ("fp4_e2m1_e4m3_16", "mxfp4", "fp8_e4m3_e8m0_32", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class CacheFormats:
  """Storage format of each cached component: a block format, 'bfloat16' or 'float32' (spec 8.1)."""

  main_kv: str = "fp4_e2m1_e4m3_16"
  index: str = "mxfp4"
  window_kv: str = "fp8_e4m3_e8m0_32"

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      require(value in _STORAGE, f"serve.cache.{field.name}", value, f"one of {_STORAGE}")

  @classmethod
  def of(cls, compute: ComputeConfig) -> "CacheFormats":
    """What loses nothing: the released format where the model rounds to it, else its dtype."""
    keep = {
        f.name: compute.dtype for f in dataclasses.fields(cls) if f.name not in compute.quantize
    }
    return cls(**keep)


@dataclasses.dataclass(frozen=True)
class ServeConfig:
  """Reading, writing and keeping (report 3.2; spec 7). Lengths are in tokens.

  Attributes:
    cache: storage formats; None stores what the model rounds to, without further loss.
    buckets: lengths of the compiled prefill chunks, ascending. A prompt is read in chunks of the
      last and a rest in the smallest that holds it.
    block: tokens per stored block of global entries.
    guarantee_hours: no stored entry goes earlier after its last use.
    budget_bytes: of the persistent store.
    ttl_minutes: life of window entries in host memory.
    host_fraction: share of the host's memory for window entries.
  """

  cache: CacheFormats | None = None
  buckets: tuple[int, ...] = (32, 128, 512)
  block: int = 64
  guarantee_hours: float = 72.0
  budget_bytes: int = 1 << 34
  ttl_minutes: float = 5.0
  host_fraction: float = 0.1

  def __post_init__(self):
    rising = self.buckets and all(a < b for a, b in zip((0, *self.buckets), self.buckets))
    require(rising, "serve.buckets", self.buckets, "ascending lengths of at least 1")
    for name in ("block", "guarantee_hours", "budget_bytes", "ttl_minutes"):
      require(getattr(self, name) > 0, f"serve.{name}", getattr(self, name), "above 0")
    require(0 < self.host_fraction <= 1, "serve.host_fraction", self.host_fraction, "within (0, 1]")


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Conversations and tokenizer. `source`: 'chatterbot' or a JSONL file of messages."""

  source: str = "chatterbot"
  tokenizer: str = "bytes"
  eval_fraction: float = 0.05
  truncate: bool = False

  def __post_init__(self):
    require(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "within [0, 1)")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """One fine-tuning run (spec 14 for the optimiser's constants). Rates and speeds are per step.

  A step reads `accumulation` × `batch_size` packed rows of `seq_len` tokens.
  """

  steps: int
  batch_size: int
  seq_len: int
  accumulation: int = 1
  seed: int = 0
  learning_rate: float = 2.6e-4
  schedule: str = "report"
  warmup_steps: int = 10
  final_learning_rate: float = 0.1
  weight_decay: float = 0.1
  clip_norm: float = 1.0
  engram_lr_scale: float = 5.0
  balance_loss: float = 1e-4
  router_bias_speed: float = 1e-3
  index_loss: str = "frozen"
  index_loss_weight: float = 1.0
  frozen: tuple[str, ...] = ()
  checkpoint_every: int = 50
  keep_checkpoints: int = 2
  eval_every: int = 50
  sample_prompt: str = "Hello, who are you?"
  sample_tokens: int = 96

  def __post_init__(self):
    counts = "steps batch_size seq_len accumulation checkpoint_every keep_checkpoints eval_every"
    for name in counts.split():
      require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
    kinds = ("constant", "cosine", "report")
    require(self.schedule in kinds, "train.schedule", self.schedule, f"one of {kinds}")
    require(
        0 <= self.warmup_steps <= self.steps, "train.warmup_steps", self.warmup_steps,
        f"within 0..train.steps ({self.steps})",
    )  # fmt: skip
    stages = ("frozen", "warmup", "sparse")
    require(self.index_loss in stages, "train.index_loss", self.index_loss, f"one of {stages}")
    require(self.learning_rate > 0, "train.learning_rate", self.learning_rate, "above 0")
    require(self.clip_norm > 0, "train.clip_norm", self.clip_norm, "above 0")


@dataclasses.dataclass(frozen=True)
class Config:
  """One experiment: what a `configs/*.py` file becomes."""

  model: ModelConfig
  compute: ComputeConfig = ComputeConfig()
  train: TrainConfig | None = None
  data: DataConfig = DataConfig()
  serve: ServeConfig = ServeConfig()

  @classmethod
  def from_config_dict(cls, config: ml_collections.ConfigDict) -> "Config":
    """From the ConfigDict of a config file; the door through which every configuration comes."""
    return build(cls, config.to_dict())

  def to_json(self) -> str:
    """Stable text form: what a workdir remembers of the experiment that filled it."""
    return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)


def read_released(path: str | pathlib.Path) -> ModelConfig:
  """ModelConfig from a released `config.json` file."""
  try:
    root = json.loads(pathlib.Path(path).read_text())
  except json.JSONDecodeError as e:
    raise ValueError(f"{path} is not JSON: {e}") from None
  if not isinstance(root, dict):
    raise ValueError(f"{path} holds {type(root).__name__}; a released config.json is an object")
  return ModelConfig.from_released(root)
