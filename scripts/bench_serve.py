"""Decode at two contexts, timed, and prefill's FLOPs, counted.

  python scripts/bench_serve.py --config=configs/tiny.py --prefill=4096,16384,65536 --json

Decode: steps of one request at each context, alternately in one process, so that the ratio does not
carry the machine's drift. The tables hold random entries: what is read costs the same.

Prefill: FLOPs of arm B over arm A from the cost analysis of the compiled programs that would read
the prompt, chunk by chunk (nothing is executed). XLA counts the body of a loop once, so layers are
unrolled and a chunk's rows are one block; the experts' block loop alone stays, which counts every
chunk's experts as one block in both arms alike.
"""

import dataclasses
import statistics
import time

from absl import flags

from deepseek_jax import cli

_CONFIG = cli.config_flag()
_CONTEXTS = flags.DEFINE_list("contexts", ["1024", "16384"], "Contexts to decode at.")
_STEPS = flags.DEFINE_integer("steps", 40, "Timed steps per context and repeat.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Repeats; ratios are within one.")
_PREFILL = flags.DEFINE_list("prefill", [], "Prompt lengths whose FLOPs are compared.")
_CHUNK = flags.DEFINE_integer("chunk", 1024, "Rows of a compiled prefill chunk.")


def spread(values) -> dict[str, float]:
  """Minimum, median and maximum."""
  return dict(min=min(values), median=statistics.median(values), max=max(values))


def lengths_of(flag: str, values: list[str]) -> list[int]:
  """Positive integers of a list flag."""
  if not all(v.isdecimal() and int(v) > 0 for v in values):
    raise ValueError(f"--{flag} is {','.join(values)!r}; it must be lengths of at least 1 token")
  return [int(v) for v in values]


def random_cache(config, capacity: int, length: int, seed: int):
  """A cache of `length` tokens with random finite rows in every table."""
  import numpy as np

  from deepseek_jax.cache import Cache
  from deepseek_jax.config import CacheFormats

  rng = np.random.default_rng(seed)
  storage = config.serve.cache or CacheFormats.of(config.compute)
  cache = Cache.init(config.model, storage, batch=1, capacity=capacity)
  for table in (*cache.main_kv, *cache.index_keys, cache.encoder_window, cache.decoder_window):
    for buffer in (table.data, table.scales):
      if buffer is not None and buffer.dtype == np.int32:
        # No byte above 0x77: every code and scale is finite.
        buffer[:] = rng.integers(0, 1 << 31, buffer.shape) & 0x77777777
        if buffer is table.scales:
          buffer[:] = 0x7F7F7F7F  # 2^0: products with random E8M0 scales would be subnormal
      elif buffer is not None:
        buffer[:] = rng.normal(size=buffer.shape)
  cache.lengths[:] = length
  return cache


def time_decode(config, model, contexts, steps, repeats) -> dict:
  """Seconds per step by context, and each repeat's ratio of the first to the last."""
  import jax
  import numpy as np

  from deepseek_jax.serve import decode
  from deepseek_jax.serve.weights import Weights

  classes = None
  if config.model.engram_layer_ids:
    count = config.model.engram_compressed_vocab_size
    classes = jax.numpy.asarray(np.arange(config.model.vocab_size) % count, np.int32)
  token, live = np.array([5], np.int32), np.array([True])
  room = (steps + 1) * (repeats + 1)
  caches = {n: jax.device_put(random_cache(config, n, n - room, 0)) for n in contexts}
  weights = Weights.of(model)
  traced, taken = decode.program._cache_size(), {n: [] for n in contexts}

  def run(n, count):
    times = []
    for _ in range(count):
      began = time.perf_counter()
      caches[n], logits = decode.step(weights, caches[n], token, live, classes)
      logits.block_until_ready()
      times.append(time.perf_counter() - began)
    return statistics.median(times)

  for n in contexts:
    run(n, 1)
  compiled = decode.program._cache_size() - traced
  for _ in range(repeats):
    for n in contexts:
      taken[n].append(run(n, steps))
  if decode.program._cache_size() - traced != compiled:
    raise ValueError("decode was compiled again while the lengths grew")
  ratios = [a / b for a, b in zip(taken[contexts[0]], taken[contexts[-1]])]
  return {
      "seconds_per_step": {str(n): spread(t) for n, t in taken.items()},
      "speed_ratio": spread(ratios),
      "compilations": compiled,
  }


def count_prefill(config, lengths, chunk) -> dict:
  """Arm B's FLOPs over arm A's by prompt length."""
  import jax
  import jax.numpy as jnp
  from flax import nnx

  from deepseek_jax.nn.rows import Rows
  from deepseek_jax.nn.transformer import Transformer
  from deepseek_jax.serve import prefill

  window = config.model.sliding_window
  compute = dataclasses.replace(config.compute, scan_layers=False, row_chunk=max(chunk, window))
  model = nnx.eval_shape(lambda: Transformer(config.model, compute, rngs=nnx.Rngs(0)))
  shape = lambda dtype, *axes: jax.ShapeDtypeStruct(axes, dtype)

  def flops(program, rows, capacity, *more):
    cache = jax.tree.map(
        lambda a: shape(a.dtype, *a.shape), random_cache(config, capacity, capacity, 0)
    )
    i32 = shape(jnp.int32, 1, rows)
    own = Rows(i32, i32, i32, shape(bool, 1, rows))
    order = config.model.engram_max_ngram_size
    ngrams = shape(jnp.int32, 1, rows, order) if config.model.engram_layer_ids else None
    compiled = program.lower(model, cache, i32, own, ngrams, *more).compile()
    return compiled.cost_analysis()["flops"]

  found = {}
  for n in lengths:
    floors = lambda rows: shape(jnp.int32, 1, rows)
    whole = n / chunk * flops(prefill.extend, chunk, n, floors(chunk))
    narrow = (n - window) / chunk * flops(prefill.encode, chunk, n)
    narrow += flops(prefill.extend, window, n, floors(window))
    found[str(n)] = narrow / whole
  return found


def main() -> dict:
  """Figures of both parts."""
  contexts = lengths_of("contexts", _CONTEXTS.value)
  room = (_STEPS.value + 1) * (_REPEATS.value + 1)
  if min(contexts, default=0) <= room:
    raise ValueError(f"--contexts is {_CONTEXTS.value}; each must exceed {room}, the timed steps")
  config = _CONFIG.value
  cli.keep_heap()
  import jax  # Bad flags need not wait for JAX.
  from flax import nnx

  from deepseek_jax.nn.transformer import Transformer

  model = jax.jit(lambda: Transformer(config.model, config.compute, rngs=nnx.Rngs(0)))()
  found = time_decode(config, model, contexts, _STEPS.value, _REPEATS.value)
  if _PREFILL.value:
    lengths = lengths_of("prefill", _PREFILL.value)
    found["prefill_flops_ratio"] = count_prefill(config, lengths, _CHUNK.value)
  return found


if __name__ == "__main__":
  cli.run(main)
