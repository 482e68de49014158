"""Post-training of the byte-level model on exact rows: what the stages with replay stand beside.

Source: the model of `configs/tiny.py` with a window of 16, shorter than nine of ten prompts, and
lines of 512 tokens, which hold a whole conversation of several turns. As in the report's
post-training the candidate pool is on and the main KV is rounded to FP4 (index keys and window
entries to their formats as well).

Command: `scripts/finetune.py --config=configs/sft.py --workdir=runs/sft`;
`--config.train.init=RUN` begins from a checkpoint of the same model.

Cost: two lines a step, 1,024 rows in both stacks; an epoch of the shipped conversations is 178
lines. Compiling the step is most of a short run.

Expected: not run to its end yet, so neither time nor loss is given.
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
