"""What low-rank fine-tuning adapts: a section of the configuration."""

import dataclasses
import re

from deepseek_jax.fields import require


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Low-rank adapters on a frozen base; see `nn.adapters`.

  Attributes:
    rank: r of A [in, r] and B [r, out].
    patterns: regular expressions, searched in the dotted path of a weight
      (`runs.0.attn.wq_a.weight`). `ffn.experts.` adds routed experts.
    alpha: an adapter adds alpha / rank · B A.
  """

  rank: int = 16
  patterns: tuple[str, ...] = (r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.", r"ffn\.shared_experts\.")
  alpha: float = 16.0

  def __post_init__(self):
    require(self.rank >= 1, "lora.rank", self.rank, "at least 1")
    require(self.alpha > 0, "lora.alpha", self.alpha, "above 0")
    require(self.patterns, "lora.patterns", self.patterns, "at least one regular expression")
    for pattern in self.patterns:
      try:
        re.compile(pattern)
      except re.error as error:
        raise ValueError(f"lora.patterns: {pattern!r} is no regular expression: {error}") from error
