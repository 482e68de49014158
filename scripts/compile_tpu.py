"""Compiles a step for a TPU slice on any machine, and says whether it fits.

  python scripts/compile_tpu.py --config=configs/flash.py --topology=v5p:4x4x8 --mode=train \
    [--context=N] [--lines=N] [--rows=N] [--search] [--json]

The TPU compiler does the work, no chip is needed and nothing is run. Bytes are those of its memory
account; times are modelled: the longest of FLOPs, HBM bytes and network bytes over the chip's peak
rates, a lower bound. FLOPs are at least the ledger's for the model (`model_flops_per_chip`); the
compiler's own and its HBM bytes count a loop's body once, and nothing of a Pallas kernel without an
estimate. With --search the slices of the generation are tried from the one given upwards until the
program fits.
"""

import sys

from absl import flags

from deepseek_jax import cli
from deepseek_jax.eval import topologies

_CONFIG = cli.config_flag()
_TOPOLOGY = flags.DEFINE_string("topology", None, "GENERATION:SHAPE, such as v5p:4x4x8.")
_MODE = flags.DEFINE_string("mode", "train", "train, prefill or decode.")
_CONTEXT = flags.DEFINE_integer("context", 1 << 20, "Tokens a line of the cache holds.")
_LINES = flags.DEFINE_integer("lines", 1, "Lines of a device: of a batch, or requests.")
_ROWS = flags.DEFINE_integer("rows", 4096, "Rows of a prefill chunk.")
_SEARCH = flags.DEFINE_bool("search", False, "Try larger slices until one fits.")
_TIMEOUT = flags.DEFINE_integer("timeout", 3600, "Seconds for one compilation.")


def main() -> dict:
  """Reports of the slices that were tried; the last one is the result."""
  if _TOPOLOGY.value is None:
    raise ValueError("--topology is missing; give a slice such as --topology=v6e:16x16")
  from deepseek_jax.eval import fit

  config, first = _CONFIG.value, topologies.topology(_TOPOLOGY.value)
  tried = []
  for at in topologies.larger(first) if _SEARCH.value else [first]:
    sys.stderr.write(f"compiling {_MODE.value} for {at.name}, {at.chips} chips\n")
    found = fit.compile_for(
        at, config, _MODE.value, context=_CONTEXT.value, lines=_LINES.value, rows=_ROWS.value,
        timeout=_TIMEOUT.value,
    )  # fmt: skip
    tried.append({"topology": at.name, "fits": found["fits"]})
    if found["fits"]:
      break
  smallest = found["topology"] if _SEARCH.value and found["fits"] else None
  return found | {"tried": tried, "smallest": smallest}


if __name__ == "__main__":
  cli.run(main)
