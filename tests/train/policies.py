"""A tiny policy with every layer mode, and rollouts of prompts that a test gives."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deepseek_jax import config as settings
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.train.on_policy import OnPolicy
from deepseek_jax.train.tasks import Prompt

# Encoder: window, Full m = 2 with an Engram. Decoder: Full with the pool, Reindex, Reuse.
MODEL = settings.ModelConfig(
    vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=5,
    num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_lora_rank=8,
    o_groups=1, n_routed_experts=4, num_experts_per_tok=2, sliding_window=4,
    compress_ratios=(0, 2, 1, 1, 1), kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2, 3),
    index_n_heads=2, index_head_dim=32, index_topk=4, candidate_source_layer_id=2,
    candidate_topk_blocks=3, candidate_block_size=2, hc_mult=2, hc_sinkhorn_iters=2,
    max_position_embeddings=64, engram_layer_ids=(1,), engram_num_embeddings=(120,),
    engram_max_ngram_size=3, engram_vocab_size=20, engram_n_heads=2, engram_head_dim=8,
    engram_compressed_vocab_size=16,
)  # fmt: skip
W = MODEL.sliding_window
COMPUTE = settings.ComputeConfig(row_chunk=64)
REPLAYS = settings.ReplayConfig(decoder_len=14, encoder=1.0)


class Letters:
  """64 tokens in 16 classes; a character is one token, digits are told apart."""

  vocab_size, bos_id, eos_id, pad_id = 64, 0, 1, 2
  user_id, assistant_id, system_id = 3, 4, None

  def encode(self, text):
    return [8 + byte % 56 for byte in text.encode()]

  def decode(self, ids):
    return "".join(chr(48 + i) for i in ids)

  def pieces(self):
    return [(str(i % 16), str(i)) for i in range(self.vocab_size)]


@functools.cache
def graph():
  return nnx.split(
      nnx.eval_shape(lambda: Transformer(MODEL, COMPUTE, rngs=nnx.Rngs(0)))
  )
