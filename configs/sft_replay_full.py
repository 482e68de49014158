"""X."""

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
