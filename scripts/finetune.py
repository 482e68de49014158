"""Fine-tunes a configuration: `finetune.py --config=configs/tiny.py --workdir=DIR [--resume]`."""

from absl import flags

from deepseek_jax import cli

_CONFIG = cli.config_flag()
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of this run alone.")
_RESUME = flags.DEFINE_bool("resume", False, "Continue from the newest whole checkpoint.")


def main() -> dict:
  """The run's summary."""
  if _WORKDIR.value is None:
    raise ValueError("--workdir is missing; give the folder that the run is to fill")
  config = _CONFIG.value
  cli.keep_heap()
  from deepseek_jax.train import loop  # Bad flags need not wait for JAX.

  return loop.run(config, _WORKDIR.value, _RESUME.value)


if __name__ == "__main__":
  cli.run(main)
