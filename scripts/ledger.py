"""The bill of a configuration: parameters, cache bytes and FLOPs, with named baselines beside it.

  python scripts/ledger.py --config=configs/flash.py [--context=8192,65536] [--json]

Nothing is allocated: shapes come from `jax.eval_shape` of the model. FLOPs are weighted as in the
report (bf16 1, FP8 ½, FP4 ¼, experts ½) unless --weighting says otherwise; a multiply-add is two.
"""

from absl import flags

from deepseek_jax import cli

_CONFIG = cli.config_flag()
_CONTEXT = flags.DEFINE_list("context", [], "Further context lengths in tokens, as 8192,65536.")
_WEIGHTING = flags.DEFINE_string(
    "weighting", "report", "Precision weights of FLOPs: report, storage (experts at ¼) or none."
)
_TURN = flags.DEFINE_integer(
    "turn_tokens",
    1783,
    "Tokens of a turn, for baselines that store window state twice a turn. At the default the"
    " released model stores an eighth of DeepSeek-V4-Flash's bytes, as the report says.",
)
_DECODE = (4096, 1048576)
_PREFILL = (4096, 16384, 65536)


def contexts(values: list[str]) -> tuple[int, ...]:
  """Context lengths of the command line.

  Raises:
    ValueError: one that is no whole number, or below 1.
  """
  for value in values:
    if not value.isdecimal() or int(value) < 1:
      raise ValueError(f"--context has {value!r}; it must be a whole number of tokens, at least 1")
  return tuple(int(v) for v in values)


def bill(config, further: tuple[int, ...], weighting: str, turn: int) -> dict:
  """Everything that the command prints, JSON-able.

  Args:
    config: the experiment.
    further: context lengths besides the usual ones.
    weighting: one of `ledger.WEIGHTINGS`.
    turn: tokens of a turn.

  Raises:
    ValueError: an unknown weighting, a turn below 1, or a model that cannot be built.
  """
  from deepseek_jax import ledger
  from deepseek_jax.baselines import baselines

  decode, prefill = (tuple(sorted({*usual, *further})) for usual in (_DECODE, _PREFILL))
  short, long = _DECODE

  def decoding(model) -> dict:
    """Decode FLOPs of a model or a baseline, and their growth from 4K to 1M tokens."""
    parts = {n: ledger.weigh(model.decode_flops(n), weighting) for n in decode}
    totals = {n: sum(parts[n].values()) for n in decode}
    return {
        "decode_flops": {str(n): totals[n] for n in decode},
        "decode_flops_growth": totals[long] / totals[short],
        "decode_flops_by_part": {str(n): parts[n] for n in decode},
    }

  others = baselines(config.model)
  ledger.weigh({}, weighting)
  for other in others:
    other.persistent_bytes_per_token(turn)
  from deepseek_jax.eval.programs import parameter_shapes  # Bad flags need not wait for JAX.

  ours = ledger.Ledger.of(config.model, parameter_shapes(config))
  totals = {
      arm: {
          str(n): sum(ledger.weigh(ours.prefill_flops(n, arm), weighting).values()) for n in prefill
      }
      for arm in "AB"
  }
  return {
      "parameters": ours.parameters,
      "parameters_by_part": ours.parameters_by_part,
      "layer_modes": {mode.value: n for mode, n in ours.schedule.census.items()},
      "kv_bytes_per_token": ours.kv_bytes_per_token,
      "cache_bytes_by_part": ours.cache_bytes_by_part,
      "window_bytes_per_sequence": ours.window_bytes_per_sequence,
      "persistent_bytes_per_token": ours.persistent_bytes_per_token,
      "weighting": weighting,
      **decoding(ours),
      "prefill_flops": totals,
      "prefill_flops_ratio": {str(n): ours.prefill_flops_ratio(n, weighting) for n in prefill},
      "turn_tokens": turn,
      "baselines": {
          b.name: {
              "kv_bytes_per_token": b.kv_bytes_per_token,
              "kv_bytes_ratio": b.kv_bytes_per_token / ours.kv_bytes_per_token,
              "persistent_bytes_per_token": b.persistent_bytes_per_token(turn),
              "turn_tokens_at_one_eighth": b.turn_tokens_at(1 / 8, ours.kv_bytes_per_token),
              "window_bytes_per_sequence": b.window_bytes_per_sequence,
              **decoding(b),
              "runs": b.runs,
              "reason": b.why_not,
              "assumes": b.assumes,
          }
          for b in others
      },
  }


def show(found: dict, title: str) -> None:
  """The bill as tables."""
  import rich.console
  import rich.table

  console = rich.console.Console(width=120)
  table = rich.table.Table("part", "parameters", title=f"Parameters of {title}")
  table.columns[1].justify = "right"
  for name, n in found["parameters_by_part"].items():
    table.add_row(name, f"{n:,}")
  table.add_section()
  for name, n in found["parameters"].items():
    table.add_row(name, f"{n:,}")
  console.print(table)

  modes = ", ".join(f"{n} {mode}" for mode, n in found["layer_modes"].items())
  part = found["cache_bytes_by_part"]
  entries = part["entries_per_token"]
  console.print(f"Layers: {modes}")
  console.print(
      f"Global KV: {entries:g} entries a token × (main KV {part['main_kv_per_entry']} B + index key"
      f" {part['index_key_per_entry']} B) = {part['main_kv_per_token']:g} +"
      f" {part['index_keys_per_token']:g} = {found['kv_bytes_per_token']:g} B a token"
  )
  console.print(
      f"1M tokens: {found['kv_bytes_per_token'] * 1e6 / 1e6:,.2f} MB; windows:"
      f" {part['window_per_slot']} B a slot,"
      f" {found['window_bytes_per_sequence'] / 1e6:.2f} MB a sequence\n"
  )

  table = rich.table.Table(
      "G a token at", *next(iter(found["decode_flops_by_part"].values())), "total",
      title=f"FLOPs of one generated token, weighting {found['weighting']!r}",
  )  # fmt: skip
  for n, parts in found["decode_flops_by_part"].items():
    table.add_row(n, *(f"{v / 1e9:.3f}" for v in (*parts.values(), found["decode_flops"][n])))
  console.print(table)
  console.print(f"growth 4K → 1M: × {found['decode_flops_growth']:.3f}\n")

  table = rich.table.Table(
      "prompt", "A: every layer, every row", "B: decoder on the last W", "B / A",
      title="FLOPs of a prompt, T",
  )  # fmt: skip
  for n, ratio in found["prefill_flops_ratio"].items():
    a, b = (found["prefill_flops"][arm][n] / 1e12 for arm in "AB")
    table.add_row(n, f"{a:.4g}", f"{b:.4g}", f"{ratio:.4f}")
  console.print(table)

  table = rich.table.Table(
      "schedule", "KV B/token", "× ours", f"stored B/token, turn {found['turn_tokens']}",
      "windows, MB", "decode 4K, G", "decode 1M, G", "runs",
      title="Beside it",
  )  # fmt: skip
  ours = {**found, "kv_bytes_ratio": 1.0, "runs": True}
  for name, row in {title: ours, **found["baselines"]}.items():
    table.add_row(
        name, f"{row['kv_bytes_per_token']:,.2f}", f"{row['kv_bytes_ratio']:.2f}",
        f"{row['persistent_bytes_per_token']:,.2f}",
        f"{row['window_bytes_per_sequence'] / 1e6:.2f}",
        *(f"{row['decode_flops'][str(n)] / 1e9:,.4g}" for n in _DECODE),
        "yes" if row["runs"] else "no",
    )  # fmt: skip
  console.print(table)
  for name, row in found["baselines"].items():
    console.print(f"[bold]{name}[/]: {row['assumes']}")
    if not row["runs"]:
      console.print(f"  Not run: {row['reason']}.")
    if name == "deepseek-v4-flash" and row["turn_tokens_at_one_eighth"]:
      console.print(
          f"  Ours stores an eighth of it at {row['turn_tokens_at_one_eighth']:,.0f} tokens a turn."
      )


def main() -> dict | None:
  """The bill, as JSON or as tables."""
  further = contexts(_CONTEXT.value)
  found = bill(_CONFIG.value, further, _WEIGHTING.value, _TURN.value)
  if flags.FLAGS.json:
    return found
  show(found, flags.FLAGS.config)
  return None


if __name__ == "__main__":
  cli.run(main)
