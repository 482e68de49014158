"""A model of 104.6 M parameters over the released vocabulary, for one accelerator.

Source: the released configuration at hidden size 256 and 16 layers, with its kinds of layers, pool
and Engram tables; 66 M parameters are embedding and head.

Command: `scripts/finetune.py --config=configs/small.py --workdir=runs/small`, with the extras
`data` and `text` installed; `--config.data.source=FILE.jsonl` for conversations of one's own.

Expected: not run to its end yet, so neither cost nor loss is given. The shipped conversations are
far too few for its size; it will learn them by heart.
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.model = dict(
      vocab_size=129280,
      hidden_size=256,
      moe_intermediate_size=128,
      num_hidden_layers=16,
      num_attention_heads=8,
      head_dim=64,
      qk_rope_head_dim=32,
      q_lora_rank=128,
      o_lora_rank=64,
      o_groups=4,
      n_routed_experts=16,
      num_experts_per_tok=4,
      sliding_window=64,
      compress_ratios=(0,) * 2 + (2,) * 6 + (1,) * 8,
      kv_source_layer_ids=(2, 5, 8),
      index_source_layer_ids=(2, 5, 8, 12),
      index_n_heads=8,
      index_head_dim=32,
      index_topk=64,
      candidate_source_layer_id=8,
      candidate_topk_blocks=32,
      max_position_embeddings=65536,
      engram_layer_ids=(1, 5),
      engram_num_embeddings=(96708, 98016),
      engram_vocab_size=8000,
      engram_n_heads=4,
      engram_head_dim=32,
      engram_compressed_vocab_size=99092,
  )
  steps = config_dict.FieldReference(1000)
  config.train = dict(
      steps=steps,
      batch_size=8,
      seq_len=1024,
      learning_rate=2e-3,
      schedule="report",
      warmup_steps=steps // 20,
      index_loss="sparse",
      checkpoint_every=100,
      eval_every=100,
  )
  config.data = dict(tokenizer="deepseek", truncate=True)
  return config
