"""The model of the replay experiment, small enough to be taught on two cores.

Source: every kind of layer in seven: a window layer, a Full layer of ratio 2 and one that reuses it
in the encoder; Full with the candidate pool, Reuse, Reindex and Reuse in the decoder.

Command: `scripts/experiment_replay.py`, which brings its own documents and sets window and
vocabulary (`eval/retrieval.py`, `brackets.py`, `replay_text.py`).
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.model = dict(
      vocab_size=128,
      hidden_size=128,
      moe_intermediate_size=64,
      num_hidden_layers=7,
      num_attention_heads=4,
      head_dim=64,
      qk_rope_head_dim=16,
      q_lora_rank=64,
      o_lora_rank=32,
      o_groups=2,
      n_routed_experts=2,
      num_experts_per_tok=1,
      sliding_window=16,
      compress_ratios=(0, 2, 2, 1, 1, 1, 1),
      kv_source_layer_ids=(1, 3),
      index_source_layer_ids=(1, 3, 5),
      index_n_heads=2,
      index_head_dim=64,
      index_topk=32,
      candidate_source_layer_id=3,
      candidate_topk_blocks=32,
      candidate_block_size=4,
      max_position_embeddings=4096,
      hc_mult=2,
      hc_sinkhorn_iters=4,
  )
  # Of a phase; the experiment sets the rest.
  config.train = dict(steps=1, batch_size=1, seq_len=256, schedule="constant", warmup_steps=0)
  config.train.update(index_loss="sparse", learning_rate=1e-2)
  return config
