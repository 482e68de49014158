"""GRPO on facts that were given a turn earlier, written behind real bounded replays.

Source: report 4 for rewards: exact answers, the mean of a group as the baseline, a length penalty
by level of effort, clipped importance ratios, experts of the rollout. Model and replay are those of
`configs/sft_replay_full.py`.

Command: after `scripts/finetune.py --config=configs/sft_replay_full.py --workdir=runs/sft`,
`scripts/finetune.py --config=configs/grpo.py --config.train.init=runs/sft --workdir=runs/grpo`;
`--config.train.rollout.prompts=arithmetic` for sums.
"""

import importlib.util
import pathlib

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  path = pathlib.Path(__file__).with_name("tiny.py")
  spec = importlib.util.spec_from_file_location("tiny", path)
  tiny = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(tiny)
  config = tiny.get_config()
  config.train.update(
      batch_size=16,
      seq_len=208,
      learning_rate=1e-3,
      index_loss="frozen",
      init="runs/sft",
      replay=dict(decoder_len=48, encoder=0.5),
      rollout=dict(
          objective="grpo",
          prompts="retrieval",
          prompt_len=88,
          max_new_tokens=12,
          group=8,
          updates=2,
          efforts=(50, 75, 100),
          penalty=0.2,
      ),
  )
  return config
