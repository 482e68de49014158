"""Tiny policies, their tokenizer, and rollouts of prompts that a test gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from deepseek_jax.config import ComputeConfig, Config, ModelConfig, RolloutConfig, TrainConfig
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.train.on_policy import OnPolicy
from deepseek_jax.train.tasks import Prompt
from tests.serve import engines

# Encoder: window, Full m = 2 with an Engram. Decoder: Full with the pool, Reindex, Reuse.
EVERY_MODE = ModelConfig(
    vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=5,
    num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_lora_rank=8,
    o_groups=1, n_routed_experts=4, num_experts_per_tok=2, sliding_window=4,
    compress_ratios=(0, 2, 1, 1, 1), kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2, 3),
    index_n_heads=2, index_head_dim=32, index_topk=4, candidate_source_layer_id=2,
    candidate_topk_blocks=3, candidate_block_size=2, hc_mult=2, hc_sinkhorn_iters=2,
    max_position_embeddings=512, engram_layer_ids=(1,), engram_num_embeddings=(120,),
    engram_max_ngram_size=3, engram_vocab_size=20, engram_n_heads=2, engram_head_dim=8,
    engram_compressed_vocab_size=16,
)  # fmt: skip
# A Full layer in each stack, for what does not depend on the layers.
SMALL = dataclasses.replace(
    EVERY_MODE, num_hidden_layers=2, compress_ratios=(2, 1), kv_source_layer_ids=(0, 1),
    index_source_layer_ids=(0, 1), candidate_source_layer_id=None, engram_layer_ids=(),
    engram_num_embeddings=(),
)  # fmt: skip
W = EVERY_MODE.sliding_window
COMPUTE = ComputeConfig(row_chunk=64)
# Prompts shorter than the window, cold ones, and, where replays are drawn, hits at the turn before:
# on a group's end, inside of one (cut to 8), and at the prompt's own end.
LENGTHS, BEFORE = (2, 3, 4, 11, 14, 17, 16, 19), (0, 0, 0, 0, 9, 16, 16, 6)
HITS = (0, 0, 0, 0, 8, 16, 16, 6)
PROMPT_LEN, NEW = 20, 8


class Letters(engines.Letters):
  """With the ids of the released tokenizer's markers."""

  eos_id, pad_id = 1, 2


@functools.cache
def split_model(config: ModelConfig, seed: int = 0):
  """Graph and parameters, all of them random; with a large head, so that some tokens are likely."""
  graphdef, shapes = nnx.split(
      nnx.eval_shape(lambda: Transformer(config, COMPUTE, rngs=nnx.Rngs(0)))
  )
  rng = np.random.default_rng(seed)

  def draw(leaf):
    x = rng.standard_normal(leaf.shape)
    matrix = leaf.ndim >= 2 and leaf.shape[-1] >= 8 and leaf.shape[-2] >= 8
    return jnp.asarray(x * leaf.shape[-1] ** -0.5 if matrix else 0.5 + 0.3 * x, leaf.dtype)

  params = jax.tree.map(draw, shapes)
  head = params["head"]["weight"]
  head[...] = (4 * head[...]).at[Letters.eos_id].multiply(1.5)
  return graphdef, params


def other_routers(params):
  """Parameters whose routers prefer what they did not."""
  params = jax.tree.map(lambda a: a, params)
  for run in params["runs"].values():
    for one in run["ffn"]["gate"].values():
      one[...] = -one[...]
  return params


def prompts(seed: int = 0, lengths=LENGTHS, before=BEFORE) -> list[Prompt]:
  rng = np.random.default_rng(seed)
  draw = lambda n: rng.integers(8, 64, n).astype(np.int32)
  return [Prompt(draw(n), b, "x") for n, b in zip(lengths, before, strict=True)]


def experiment(model: ModelConfig, replay=None, train=None, **rollout) -> Config:
  """Two updates a rollout, of two micro-batches of two lines each."""
  how = dict(
      objective="grpo", prompts="arithmetic", prompt_len=PROMPT_LEN, max_new_tokens=NEW, group=2,
      updates=2,
  )  # fmt: skip
  steps = TrainConfig(
      **dict(steps=4, warmup_steps=0, batch_size=2, accumulation=2, seq_len=60) | (train or {}),
      replay=replay,
      rollout=RolloutConfig(**how | rollout),
  )
  return Config(model=model, compute=COMPUTE, train=steps)


class Given(OnPolicy):
  """Rollouts of given prompts."""

  def __init__(self, config: Config, given: list[Prompt], **more):
    graphdef, params = split_model(config.model)
    super().__init__(config, Letters(), graphdef, **more)
    self.given = given
    self.see(params)

  def _drawn_prompts(self, number):
    return self.given
