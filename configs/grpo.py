"""GRPO on facts that were given a turn earlier, written behind real bounded replays.

Source: report 4 for rewards: exact answers, the mean of a group as the baseline, a length penalty
by level of effort, clipped importance ratios, experts of the rollout. Model and formats are those
of `configs/sft_replay_full.py`. In half of the responses the turn with the facts is found in the
cache without its window entries: 16 of its 45 rows run again.

Command: after `scripts/finetune.py --config=configs/sft_replay_full.py --workdir=runs/sft`,
`scripts/finetune.py --config=configs/grpo.py --config.train.init=runs/sft --workdir=runs/grpo`;
`--config.train.rollout.prompts=arithmetic` for sums.
"""

import importlib.util
import pathlib

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  path = pathlib.Path(__file__).with_name("sft_replay_full.py")
  spec = importlib.util.spec_from_file_location("sft_replay_full", path)
  sft_replay_full = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(sft_replay_full)
  config = sft_replay_full.get_config()
  config.train.update(
      batch_size=16,
      seq_len=136,
      learning_rate=1e-3,
      index_loss="frozen",
      init="runs/sft",
      replay=dict(decoder_len=28, encoder=0.5, hits="turn"),
      rollout=dict(
          objective="grpo",
          prompts="retrieval",
          prompt_len=56,
          max_new_tokens=12,
          group=8,
          updates=2,
          efforts=(50, 75, 100),
          penalty=0.2,
      ),
  )
  return config
