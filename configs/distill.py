"""On-policy distillation: responses written behind replays, taught by what exact rows make of them.

Source: report 4, on-policy distillation over the whole vocabulary. Teacher and student are the same
checkpoint at first. The teacher reads every row in both stacks, so the loss of the first step is
what bounded replay costs, in nats of reverse KL per token of the student's own responses. Model and
formats are those of `configs/sft_replay_full.py`.

Command: after `scripts/finetune.py --config=configs/sft_replay_full.py --workdir=runs/sft`,
`scripts/finetune.py --config=configs/distill.py --config.train.init=runs/sft
--config.train.rollout.teacher=runs/sft --workdir=runs/distill`.
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
      batch_size=8,
      seq_len=256,
      learning_rate=1e-3,
      index_loss="frozen",
      init="runs/sft",
      replay=dict(decoder_len=96, encoder=0.5, hits="uniform"),
      rollout=dict(
          objective="distill", teacher="runs/sft", prompts="data", prompt_len=96, max_new_tokens=32
      ),
  )
  return config
