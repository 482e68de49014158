"""Any model of the family from its released `config.json`, with default compute and train sections.

Command: `scripts/finetune.py --config=configs/from_json.py:FILE --workdir=DIR`, or
`--config=FILE.json` for short. Expected: the model section is the file's `text_config`; unknown
keys in it are errors. The train section is a short run with the report's constants.
"""

import dataclasses

import ml_collections
from ml_collections import config_dict

from deepseek_jax.model_config import read_released


def get_config(path: str) -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  model = dataclasses.asdict(read_released(path))
  config.model = {name: value for name, value in model.items() if value is not None}
  steps = config_dict.FieldReference(100)
  config.train = dict(
      steps=steps,
      batch_size=4,
      seq_len=min(512, model["max_position_embeddings"]),
      schedule="cosine",
      warmup_steps=steps // 20,
  )
  config.data = dict(truncate=True)
  return config
