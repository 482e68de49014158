"""What a step on bounded replay costs: decoder rows that nobody needs are not computed."""

import pytest

from deepseek_jax.config import ComputeConfig, Config, ModelConfig, TrainConfig
from deepseek_jax.eval.replay_cost import decoder_replay, flops_ratio

# Six layers, half of them in the decoder; N = 64·W.
W, N = 8, 512
MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=6,
    num_attention_heads=2,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=32,
    o_lora_rank=16,
    o_groups=2,
    n_routed_experts=2,
    num_experts_per_tok=2,
    sliding_window=W,
    compress_ratios=(0, 2, 2, 1, 1, 1),
    kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3, 4),
    index_n_heads=2,
    index_head_dim=32,
    index_topk=16,
    candidate_source_layer_id=3,
    candidate_topk_blocks=8,
    candidate_block_size=4,
    max_position_embeddings=N,
)


@pytest.mark.slow
def test_a_step_on_decoder_replay_takes_at_most_three_fifths_of_the_plain_one(standard_promotion):
  train = TrainConfig(steps=1, batch_size=1, seq_len=N, schedule="constant", warmup_steps=0)
  config = Config(MODEL, ComputeConfig(), train)
  assert decoder_replay(config).decoder_len == W + N // 16
  assert 0.5 < flops_ratio(config) <= 0.60
