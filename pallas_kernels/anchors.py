"""What other people's TPU kernels cost: modelled cycles with result latencies, per query or token.

Compiled ahead of time and counted as ours are, with jax 0.11.2 and libtpu 0.0.48.1 in August 2026;
compiler versions differ by a few per cent. On v5p a grid that both cores share counts once.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Anchor:
  """One peer kernel at one shape.

  Attributes:
    source: whose kernel, which one, and how its work differs.
    cycles: by generation; one that is absent does not compile there.
  """

  source: str
  cycles: Mapping[str, int]


def _cycles(v5e: int | None, v5p: int, v6e: int, tpu7x: int) -> Mapping[str, int]:
  found = {"v5e": v5e, "v5p": v5p, "v6e": v6e, "tpu7x": tpu7x}
  return {name: n for name, n in found.items() if n is not None}


_SORTED = "tpu-inference 0.32.0 streamindex_topk: approx_max_k at recall 1, two sorts of"
_SCORED = "tpu-inference 0.32.0 streamindex_topk: 64 FP8 heads of 128 (twice ours), entries"
_MIXED = "tpu-inference 0.32.0 mHC fused_post_pre, width 5,120, without its Sinkhorn; tokens"

ANCHORS = {
    "sparse_decode": Anchor(
        "tpu-inference 0.32.0 sparse_mla + page ids + mla_swa, FP8 entries; a SparseCore pass and"
        " 0.8 MB more traffic not counted",
        _cycles(None, 2912, 2790, 2364),
    ),
    "window_decode_16": Anchor(
        "tpu-inference 0.32.0 mla_swa, window 128, BF16", _cycles(1596, 1312, 1576, 1583)
    ),
    "window_decode_128": Anchor(
        "tpu-inference 0.32.0 mla_swa, window 128, BF16", _cycles(1737, 1274, 1728, 1558)
    ),
    "sparse_prefill": Anchor(
        "sglang-jax sparse_mla_prefill, 8 pages of 64, BF16; copies the cache on every call",
        _cycles(1424, 1565, 1495, 1547),
    ),
    "scores_65536_16": Anchor(f"{_SCORED} 65,536", _cycles(63641, 63884, 25514, 19136)),
    "scores_65536_128": Anchor(f"{_SCORED} 65,536", _cycles(62462, 64253, 24358, 19501)),
    "scores_262144_16": Anchor(f"{_SCORED} 262,144", _cycles(252313, 253596, 100650, 75616)),
    "scores_262144_128": Anchor(f"{_SCORED} 262,144", _cycles(247678, 255127, 96102, 77129)),
    "topk_65536_16": Anchor(f"{_SORTED} 65,536", _cycles(74521, 37757, 61592, 62170)),
    "topk_65536_128": Anchor(f"{_SORTED} 65,536", _cycles(42890, 23029, 36772, 37144)),
    "topk_262144_16": Anchor(f"{_SORTED} 262,144", _cycles(149303, 71477, 121388, 116210)),
    "topk_262144_128": Anchor(f"{_SORTED} 262,144", _cycles(108579, 55159, 90601, 91294)),
    "hyper_5120_16": Anchor(f"{_MIXED} 16", _cycles(262, 281, 201, 225)),
    "hyper_5120_128": Anchor(f"{_MIXED} 128", _cycles(245, 133, 142, 160)),
    "hyper_5120_2048": Anchor(f"{_MIXED} 2,048", _cycles(245, 128, 143, 156)),
    "dense_8192": Anchor(
        "JAX 0.11.2 splash attention, 512 queries of 64 heads, 8,192 keys of 512, BF16",
        _cycles(8958, 4545, 3306, 3086),
    ),
}
