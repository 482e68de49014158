"""Sizes and schedule of the text backbone, as the released `config.json` names them (spec 1)."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

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


def read_released(path: str | pathlib.Path) -> ModelConfig:
  """ModelConfig from a released `config.json` file."""
  try:
    root = json.loads(pathlib.Path(path).read_text())
  except json.JSONDecodeError as e:
    raise ValueError(f"{path} is not JSON: {e}") from None
  if not isinstance(root, dict):
    raise ValueError(f"{path} holds {type(root).__name__}; a released config.json is an object")
  return ModelConfig.from_released(root)
