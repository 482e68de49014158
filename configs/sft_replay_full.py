"""Post-training on both bounded replays: the decoder's, and the encoder's in half of the turns.

Source: `configs/sft_replay.py`. A turn is hit with probability 0.5 at a position drawn from all
whole groups of its prompt behind the window: few of the shipped conversations have a second turn,
and `hits="turn"` would replay nothing in the first. The report says neither how often nor where.

Command: `scripts/finetune.py --config=configs/sft_replay_full.py --workdir=runs/sft_replay_full`;
with `--rows` in place of the workdir it shows what a line holds.

Cost: lines of 512 rows in the encoder and 320 in the decoder, two a step. In the first epoch 392 of
925 turns are hit. Three epochs have 111,719 rows each in the encoder, on average, 61,786 in the
decoder and 232 lines. A line must hold a conversation however its hits fall, so long ones are cut:
14 % of the response bytes of `configs/sft.py`.

Expected: not run to its end yet, so neither time nor loss is given.
"""

import importlib.util
import pathlib

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  path = pathlib.Path(__file__).with_name("sft_replay.py")
  spec = importlib.util.spec_from_file_location("sft_replay", path)
  sft_replay = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(sft_replay)
  config = sft_replay.get_config()
  config.train.replay.update(decoder_len=320, encoder=0.5, hits="uniform")
  return config
