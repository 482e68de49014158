"""Post-training on what serving sees: in every turn the decoder begins W rows before the response.

Source: `configs/sft.py` with the decoder's bounded replay (report 2.1.2 and 5; spec 17). A line of
512 encoder rows has 384 decoder rows: of the shipped conversations, where more than half of the
bytes are responses, serving would run four of five in the decoder.

Command: `scripts/finetune.py --config=configs/sft_replay.py --workdir=runs/sft_replay`; with
`--rows` and without a workdir it shows the rows of a line.

Expected: not run to its end yet, so neither cost nor loss is given.
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
