"""Named schedules of other models in the ledger's language (report, related designs; spec 15).

A baseline is a tuple of `ledger.Layer` records and the sizes they stand in. All but DeepSeek-V4-
Flash, which keeps its own, take sizes and storage formats of the configuration beside which they
are shown, so that figures differ by the schedule alone.
"""

import collections
import dataclasses
import math

from deepseek_jax import ledger
from deepseek_jax.config import ModelConfig
from deepseek_jax.fields import require
from deepseek_jax.ledger import Layer
from deepseek_jax.schedule import Schedule
from pallas_kernels.quantize import formats

# Released config.json of DeepSeek-V4-Flash; layers 0 and 1 are window alone, CSA and HCA alternate.
V4_FLASH = ModelConfig(
    vocab_size=129280, hidden_size=4096, moe_intermediate_size=2048, num_hidden_layers=43,
    num_attention_heads=64, head_dim=512, qk_rope_head_dim=64, q_lora_rank=1024, o_lora_rank=1024,
    o_groups=8, n_routed_experts=256, num_experts_per_tok=6, sliding_window=128,
    compress_ratios=(0, 0) + (4, 128) * 20 + (4,), kv_source_layer_ids=(),
    index_source_layer_ids=(), index_n_heads=64, index_head_dim=128, index_topk=512,
)  # fmt: skip
# An entry of V4: 448 channels in FP8 with 7 scales, padded to 8 bytes, and 64 rotary ones in bf16.
V4_ENTRY_BYTES = 448 + 8 + 2 * 64

NO_DENSE = "no layer of this model attends to all entries: every global read goes through a Top-K"


@dataclasses.dataclass(frozen=True)
class Baseline:
  """A schedule to compare with.

  Attributes:
    name: as in the JSON of `scripts/ledger.py`.
    sizes: heads, widths and experts; its own schedule fields are not read.
    layers: one record a layer.
    why_not: why this model cannot execute it, or None where it can.
    assumes: what was assumed beyond its one-line definition, for the reader.
  """

  name: str
  sizes: ModelConfig
  layers: tuple[Layer, ...]
  why_not: str | None
  assumes: str

  @property
  def runs(self) -> bool:
    """Whether this model can execute it."""
    return self.why_not is None

  @property
  def kv_bytes_per_token(self) -> float:
    return ledger.kv_bytes_per_token(self.layers)

  @property
  def window_bytes_per_sequence(self) -> int:
    return ledger.window_bytes_per_sequence(self.layers)

  def persistent_bytes_per_token(self, turn_tokens: float) -> float:
    """Bytes that a stored conversation keeps per token when nothing rebuilds a window.

    Global KV, and the window state at two points of every turn: the end of the input and the end of
    the output, where the next turn or a retry may resume.

    Args:
      turn_tokens: tokens of a turn, input and output together.

    Raises:
      ValueError: `turn_tokens` is not above 0.
    """
    require(turn_tokens > 0, "turn_tokens", turn_tokens, "above 0")
    return self.kv_bytes_per_token + 2 * self.window_bytes_per_sequence / turn_tokens

  def turn_tokens_at(self, share: float, ours: float) -> float | None:
    """Turn length at which `ours` persistent bytes per token are `share` of this baseline's.

    Returns:
      Tokens, or None where no turn length gives that share.
    """
    rest = ours / share - self.kv_bytes_per_token
    state = self.window_bytes_per_sequence
    return 2 * state / rest if rest > 0 and state else None

  def decode_flops(self, context: int) -> dict[str, float]:
    """FLOPs of one generated token, by part, as `Ledger.decode_flops`.

    Raises:
      ValueError: `context` is below 1.
    """
    require(context >= 1, "context", context, "at least 1")
    lookups = ledger.lookup_flops(self.layers, self.sizes, context - 1, context)
    macs = linear_macs(self.sizes, self.layers)
    return {part: 2 * n for part, n in macs.items()} | lookups


def linear_macs(c: ModelConfig, layers: tuple[Layer, ...]) -> dict[str, float]:
  """Multiply-adds of one token with all parameters that it uses, by FLOP part.

  From formulas of the sizes, because a baseline has no allocated shapes; for a schedule that this
  model runs it equals what `Ledger` counts from shapes.
  """
  d, h = c.hidden_size, c.head_dim
  expert = 3 * d * c.moe_intermediate_size
  streams = c.hc_mult
  mixing = 2 * (2 + streams) * streams * streams * d
  columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
  macs = collections.Counter(
      experts=len(layers) * c.num_experts_per_tok * expert,
      fp8_linear=len(c.engram_layer_ids) * (streams + 1) * d * columns,
      bf16_linear=c.vocab_size * d,
  )
  for layer in layers:
    macs["fp8_linear"] += (
        c.q_lora_rank * (d + c.num_attention_heads * h)
        + c.o_groups * c.o_lora_rank * d
        + expert
        + (h * d if layer.window else 0)
    )
    macs["bf16_linear"] += (
        c.num_attention_heads * h * c.o_lora_rank
        + c.n_routed_experts * d
        + mixing
        + layer.entry_products * h * d
        + layer.key_macs
    )
    if layer.scores:
      macs["fp8_linear"] += c.index_n_heads * c.index_head_dim * c.q_lora_rank
      macs["bf16_linear"] += c.index_n_heads * d
  return dict(macs)


def baselines(config: ModelConfig) -> tuple[Baseline, ...]:
  """All named baselines at the sizes of `config`; what each assumes stands in its `assumes`."""
  c, n, half = config, config.num_hidden_layers, config.num_hidden_layers // 2
  main = formats.FP4_MAIN.num_bytes(c.head_dim)
  key = formats.MXFP4.num_bytes(c.index_head_dim)
  window = dict(window=c.sliding_window, slot_bytes=formats.FP8_WINDOW.num_bytes(c.head_dim))
  owns = dict(ratio=1, entry_bytes=main, entry_products=1)
  selects = dict(scores=math.inf, key_bytes=key, key_macs=c.index_head_dim * c.head_dim)
  v4 = V4_FLASH
  v4_window = dict(window=v4.sliding_window, slot_bytes=V4_ENTRY_BYTES)
  v4_layer = {
      0: lambda i: Layer("window", **v4_window),
      4: lambda i: Layer(
          "csa", i, 4, v4.index_topk, math.inf, V4_ENTRY_BYTES,
          formats.MXFP4.num_bytes(v4.index_head_dim), **v4_window, entry_products=4,
          key_macs=4 * v4.index_head_dim * v4.hidden_size,
      ),
      128: lambda i: Layer(
          "hca", i, 128, entry_bytes=V4_ENTRY_BYTES, **v4_window, entry_products=2
      ),
  }  # fmt: skip
  yoio = dataclasses.replace(
      c, compress_ratios=(0,) * half + (1,) * (n - half), kv_source_layer_ids=(half,),
      index_source_layer_ids=(half,), candidate_source_layer_id=None, candidate_topk_blocks=0,
  )  # fmt: skip
  return (
      Baseline(
          "deepseek-v4-flash",
          v4,
          tuple(v4_layer[m](i) for i, m in enumerate(v4.compress_ratios)),
          f"{NO_DENSE}, and HCA (m = 128) has none; CSA pools overlapping groups, with index keys"
          " from a compressor of their own",
          "Sizes as released: 2 window, 21 CSA and 20 HCA layers, each with a window of 128 slots;"
          " 584 bytes per entry and per window slot, 68 per index key of a CSA layer. Compressor"
          " tails are left out, and the 3 hash-routed layers are billed a router. Precisions of"
          " products as in V4.1.",
      ),
      Baseline(
          "indexcache",
          c,
          tuple(
              Layer("shared", i, attends=c.index_topk, **owns)
              if i % 4
              else Layer("full", i, attends=c.index_topk, **owns, **selects)
              for i in range(n)
          ),
          "a layer that stores its own KV and borrows a Top-K does not exist here: every KV source"
          " must be an index source",
          "One layer in four has an indexer (75 % removed); every layer stores one entry per token,"
          " in this configuration's formats and with its Top-K; no window.",
      ),
      Baseline(
          "yoio",
          yoio,
          ledger.layers_of(Schedule.from_config(yoio), yoio),
          None,
          "Built on YOCO: the lower half is window alone; the first upper layer stores an entry and"
          " an index key per token, and its Top-K serves the whole upper half. Every layer keeps a"
          " window, as this model runs it.",
      ),
      Baseline(
          "hysparse",
          c,
          tuple(
              Layer("sparse", i - i % 8, 1, attends=c.index_topk, **window)
              if i % 8
              else Layer("dense", i, **owns)
              for i in range(n)
          ),
          f"{NO_DENSE}, and a Top-K comes from an indexer, never from a dense layer's attention",
          "One dense layer in eight: five of forty, as the paper's five of forty-nine. The seven"
          " sparse ones read its entries through the Top-K that its attention gives, and keep a"
          " window of their own. One entry per token in this configuration's main-KV format.",
      ),
      Baseline(
          "yoco",
          c,
          tuple(
              Layer("window", **window)
              if i < half
              else Layer("cross", half, ratio=1)
              if i > half
              else Layer("cross", half, **owns)
              for i in range(n)
          ),
          NO_DENSE,
          "The lower half is window alone (the paper also has gated retention). Every upper layer"
          " attends densely to one entry per token, in this configuration's main-KV format, and"
          " has no window.",
      ),
      Baseline(
          "dense-gqa",
          c,
          tuple(
              Layer(
                  "dense", i, 1, entry_bytes=2 * 2 * c.o_groups * c.head_dim,
                  entry_products=2 * c.o_groups,
              )
              for i in range(n)
          ),
          f"{NO_DENSE}; and there is one latent for all heads, no keys and values of several",
          "One KV head per output group of the configuration (8 in the released sizes), keys and"
          " values apart in bf16, the configuration's head_dim, every layer dense, no window.",
      ),
  )  # fmt: skip
