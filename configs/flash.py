"""DeepSeek-V4.1-Flash at released sizes: 552 B backbone parameters and 197 B in Engram tables.

Source: the released root `config.json`. Cost: not trainable on one machine; `jax.eval_shape` and
lowering need no memory. Expected: 551,880,835,184 backbone and 196,613,849,600 Engram table
parameters; 2 window, 4 Full, 4 Reindex and 30 Reuse layers; 890 bytes of global KV per token.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.model = dict(
      vocab_size=129280,
      hidden_size=5120,
      moe_intermediate_size=2304,
      num_hidden_layers=40,
      num_attention_heads=64,
      head_dim=512,
      qk_rope_head_dim=64,
      q_lora_rank=1280,
      o_lora_rank=1024,
      o_groups=8,
      n_routed_experts=384,
      num_experts_per_tok=6,
      sliding_window=128,
      compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
      kv_source_layer_ids=(2, 8, 14, 20),
      index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
      index_n_heads=32,
      index_head_dim=128,
      index_topk=512,
      candidate_source_layer_id=20,
      candidate_topk_blocks=2048,
      candidate_block_size=8,
      engram_layer_ids=(1, 14),
      engram_num_embeddings=(384006168, 384016682),
      engram_vocab_size=16000000,
      engram_n_heads=8,
      engram_head_dim=256,
      engram_compressed_vocab_size=99092,
      num_nextn_predict_layers=3,
  )
  config.compute = dict(
      dtype="bfloat16",
      param_dtype="bfloat16",
      quantize=("main_kv", "index", "window_kv"),
      remat="layer",
  )
  config.train = dict(
      steps=1000,
      batch_size=8,
      seq_len=65536,
      learning_rate=2.6e-5,
      warmup_steps=50,
  )
  config.data = dict(tokenizer="deepseek")
  config.serve = dict(buckets=(128, 1024, 4096), block=256)
  return config
