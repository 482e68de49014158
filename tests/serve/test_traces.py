"""How often serving compiles, and what a donated cache says when it is used again (P15)."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from deepseek_jax.cache import Cache
from deepseek_jax.config import CacheFormats
from deepseek_jax.serve import decode, prefill, replay

pytestmark = pytest.mark.usefixtures("quick_compile")

BUCKETS = (8, 32, 128)


@pytest.fixture(scope="module")
def small(served):
  """The shortest model with both stacks: a Full layer in each, and no Engram."""
  config = dataclasses.replace(
      served.config,
      num_hidden_layers=2,
      compress_ratios=(2, 1),
      kv_source_layer_ids=(0, 1),
      index_source_layer_ids=(0, 1),
      candidate_source_layer_id=None,
      engram_layer_ids=(),
      engram_num_embeddings=(),
      max_position_embeddings=512,
  )
  model = served.model(config)
  cache = lambda: Cache.init(config, CacheFormats.of(model.compute), batch=1, capacity=512)
  return model, cache, prefill.Reader(model, BUCKETS)


@pytest.fixture
def compiled():
  """Programs compiled since the test began, by name; nothing else is counted on as precisely."""
  names = collections.Counter()

  def listen(event, seconds, fun_name=None, **_):
    if event.endswith("backend_compile_duration"):
      names[fun_name.removeprefix("jit(").removesuffix(")")] += 1

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_lengths_1_to_300_share_the_programs_of_the_buckets(served, small, compiled):
  model, cache, reader = small
  prompt = served.ids(300, lines=1)[0]
  for plan in (lambda n: replay.cold(n, served.window), replay.exact):
    for n in range(1, 301):
      reader.prefill(cache(), [prompt[:n]], [plan(n)])
  assert 1 <= compiled["encode"] <= len(BUCKETS)
  assert 1 <= compiled["extend"] <= len(BUCKETS) + 1  # one for W


def test_decode_compiles_once_while_lengths_grow(served, small, compiled):
  """From the host's empty cache to the last token that fits."""
  model, cache, _ = small
  cache, live = cache(), np.ones(1, bool)
  for n, token in enumerate(served.ids(cache.capacity, lines=1)[0]):
    cache, _ = decode.step(model, cache, np.array([token]), live, None)
    assert cache.lengths[0] == n + 1
  assert compiled["decode_row"] == 1


def test_a_donated_cache_says_so_when_it_is_used_again(served, small):
  model, cache, reader = small
  tokens, live = np.zeros(1, np.int32), np.ones(1, bool)
  used, _ = decode.step(model, cache(), tokens, live, None)
  decode.step(model, used, tokens, live, None)
  for again in (
      lambda: decode.step(model, used, tokens, live, None),
      lambda: reader.prefill(used, [np.zeros(3, int)], [replay.exact(3)]),
  ):
    with pytest.raises(ValueError, match="the cache was donated to an earlier call"):
      again()
