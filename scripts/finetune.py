"""Fine-tunes a configuration: `finetune.py --config=configs/tiny.py --workdir=DIR [--resume]`.

With --rows it shows what the first packed line holds, and writes nothing. On several hosts the same
command runs on each; see docs/pods.md.
"""

import sys

from absl import flags, logging

from deepseek_jax import cli

_CONFIG = cli.config_flag()
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of this run alone.")
_RESUME = flags.DEFINE_bool("resume", False, "Continue from the newest whole checkpoint.")
_PROFILE = flags.DEFINE_integer("profile", 0, "Steps to trace for xprof.", lower_bound=0)
_ROWS = flags.DEFINE_bool("rows", False, "Only show the rows of the first packed line.")
_ADDRESS = flags.DEFINE_string(
    "address", None, "HOST:PORT of process 0; on a Cloud TPU it is found without."
)
_PROCESSES = flags.DEFINE_integer("processes", None, "Number of processes.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Number of this process, from 0.")
_JOIN_SECONDS = flags.DEFINE_integer("join_seconds", 300, "Timeout for all processes to join.")
_EXPECT_TPU = flags.DEFINE_bool("expect_tpu", False, "End if JAX finds no TPU.")


def main() -> dict | None:
  """The run's summary, of process 0; with --rows, counts of rows."""
  if _ROWS.value:
    from deepseek_jax.train import loop, turns

    config = _CONFIG.value
    if config.train is not None and config.train.rollout is not None:
      raise ValueError("--rows shows rows of conversations; train.rollout writes its own")
    source = loop.load_data(config)
    ids = source.pipeline.epoch(0)[0]
    picture, counts = turns.overview(source.views, ids, config.train.seq_len)
    sys.stdout.write(f"{picture}\n\n")
    return counts
  if _WORKDIR.value is None:
    raise ValueError("--workdir is missing; give the folder that the run is to fill")
  config = _CONFIG.value
  cli.keep_heap()
  from deepseek_jax import distributed  # Bad flags need not wait for JAX.
  from deepseek_jax.train import loop

  distributed.initialize(
      _ADDRESS.value, _PROCESSES.value, _PROCESS_ID.value, timeout_seconds=_JOIN_SECONDS.value
  )
  try:
    logging.info(distributed.environment_check(_EXPECT_TPU.value))
  except RuntimeError as error:
    raise OSError(error) from error
  with distributed.together():
    summary = loop.run(config, _WORKDIR.value, _RESUME.value, profile=_PROFILE.value)
  return summary if distributed.is_main() else None


if __name__ == "__main__":
  cli.run(main)
