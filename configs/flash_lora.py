"""DeepSeek-V4.1-Flash with low-rank adapters on a base that stays in FP8 and FP4 as released.

Source: `configs/flash.py`; ranks as is usual. Adapters on the attention projections and the shared
experts, 60 M parameters; nothing else has a gradient or optimiser state.

Command: `scripts/convert_checkpoint.py --source=RELEASED --target=runs/flash`, then on every host
`scripts/finetune.py --config=configs/flash_lora.py --config.train.init=runs/flash --workdir=DIR`.

Cost: see "What fits" in docs/pods.md. With `compute.stored_base=False` it has been compiled for 128
chips of v5p (36 GB a chip); it has never been run.
"""

import importlib.util
import pathlib

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  path = pathlib.Path(__file__).with_name("flash.py")
  spec = importlib.util.spec_from_file_location("flash", path)
  flash = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(flash)
  config = flash.get_config()
  config.compute.stored_base = True
  config.lora = dict(rank=16, alpha=32.0)
  config.train.update(learning_rate=1e-4, router_bias_speed=0.0, init="runs/flash")
  return config
