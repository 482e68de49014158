"""Post-training on what every prefill leaves: a decoder that begins W rows before a response.

Source: `configs/sft.py` with the decoder's bounded replay (report 3.2.2; the simulation is this
project's, see docs/finetuning.md).

Command: `scripts/finetune.py --config=configs/sft_replay.py --workdir=runs/sft_replay`; with
`--rows` in place of the workdir it shows what a line holds.

Cost: lines of 512 rows in the encoder and 384 in the decoder, two a step; an epoch of the shipped
conversations is 188 of them. It has 87,675 rows in the encoder and 68,697 in the decoder, though
more than half of the bytes are responses. Conversations that fill more than a line are cut, 3 % of
the response bytes of `configs/sft.py`.

Expected: not run to its end yet, so neither time nor loss is given.
"""

import importlib.util
import pathlib

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  path = pathlib.Path(__file__).with_name("sft.py")
  spec = importlib.util.spec_from_file_location("sft", path)
  sft = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(sft)
  config = sft.get_config()
  config.train.replay = dict(decoder_len=384, encoder=0.0, hits="turn")
  return config
