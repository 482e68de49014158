"""Post-training of the byte-level model on exact rows: what the two replay stages stand beside.

Source: the model of `configs/tiny.py` with a window of 16, which nine of ten prompts are longer
than, on lines of 512 tokens. As in the report's post-training the candidate pool is on and entries
are rounded to their cache formats, those of the main KV to FP4.

Command: `scripts/finetune.py --config=configs/sft.py --workdir=runs/sft`;
`--config.train.init=RUN` begins from a checkpoint of the same model.

Cost: that of `configs/tiny.py`, about: a step reads 1,024 tokens too.

Expected: not run to its end yet, so no loss is given.
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
  config.model.sliding_window = 16
  config.train.update(batch_size=2, seq_len=512)
  return config
