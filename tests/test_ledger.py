"""The bill: figures of the specification, and laws that hold for every configuration."""

import dataclasses
import functools
import math
import pathlib

import jax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_jax import cli, ledger
from deepseek_jax.baselines import baselines, linear_macs
from deepseek_jax.config import Config
from deepseek_jax.ledger import Ledger
from deepseek_jax.nn.engram import allocated_rows
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.parameter_paths import path_names

ROOT = pathlib.Path(__file__).parents[1]
NAMES = (
    "configs/flash.py", "configs/tiny.py", "configs/small.py", "tests/golden/yardstick_config.json",
)  # fmt: skip
LINEAR = ("experts", "fp8_linear", "bf16_linear")
FLASH, TINY = NAMES[:2]
MILLION = 1 << 20

every_config = pytest.mark.parametrize("name", NAMES)


def model_config(name):
  return Config.from_config_dict(cli.load(str(ROOT / name))).model


@functools.cache
def shapes(model):
  state = nnx.state(nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0))))
  leaves = jax.tree_util.tree_flatten_with_path(state)[0]
  return {".".join(path_names(path)): leaf.shape for path, leaf in leaves}


@functools.cache
def bill(name):
  model = model_config(name)
  return Ledger.of(model, shapes(model))


@functools.cache
def named(name):
  return {b.name: b for b in baselines(model_config(name))}


def weighed(flops, weighting="report"):
  return sum(ledger.weigh(flops, weighting).values())


def billions(n):
  return round(n / 1e9, 2)


def test_released_totals_are_exact():
  found = bill(FLASH).parameters
  assert found["backbone"] == 551_880_835_184
  assert found["engram_tables"] == 196_613_849_600
  assert found["total"] == 551_880_835_184 + 196_613_849_600


def test_released_active_parameters():
  found, projection = bill(FLASH).parameters, 157_327_360
  assert billions(found["active_prefill"]) == 7.89
  assert billions(found["active_decode"]) == 16.13
  assert round(found["active_prefill"] / 1e9, 3) == 7.893
  assert round(found["active_prefill_with_source"] / 1e9, 3) == 7.896
  assert billions(found["active_prefill"] - 2 * projection) == 7.58
  assert billions(found["active_decode"] - 2 * projection) == 15.82


def test_released_parts_are_those_of_the_specification():
  assert bill(FLASH).parameters_by_part == {
      "attention": 40 * 126_617_408,
      "compressor": 3 * 5_243_392 + 2_621_952,
      "indexer": 4 * 5_472_384 + 4 * 5_406_720,
      "router": 40 * 1_966_848,
      "routed_experts": 40 * 384 * 35_389_440,
      "shared_experts": 40 * 35_389_440,
      "hyper_connections": 40 * 983_094,
      "norms": 40 * 10_240 + 5_120,
      "engram_projections": 2 * 157_327_360,
      "engram_tables": (384_006_168 + 384_016_682) * 256,
      "embed": 129_280 * 5_120,
      "head": 129_280 * 5_120,
  }


@every_config
def test_parts_sum_to_what_is_allocated_without_unused_rows(name):
  found = bill(name)
  c = found.config
  allocated = sum(math.prod(shape) for shape in shapes(c).values())
  unused = sum(allocated_rows(rows) - rows for rows in c.engram_num_embeddings) * c.engram_head_dim
  assert sum(found.parameters_by_part.values()) == found.parameters["total"] == allocated - unused
  tables = sum(c.engram_num_embeddings) * c.engram_head_dim
  assert found.parameters["engram_tables"] == found.parameters_by_part["engram_tables"] == tables
  assert 0 < found.parameters["active_prefill"] < found.parameters["active_decode"]
  assert found.parameters["active_decode"] < found.parameters["backbone"]


def test_the_890_bytes():
  found = bill(FLASH)
  assert found.kv_bytes_per_token == 890
  assert found.cache_bytes_by_part == {
      "main_kv_per_entry": 288, "index_key_per_entry": 68, "entries_per_token": 2.5,
      "main_kv_per_token": 720, "index_keys_per_token": 170, "window_per_slot": 528,
  }  # fmt: skip
  assert found.window_bytes_per_sequence == 128 * 40 * 528
  assert found.persistent_bytes_per_token == 890


@every_config
def test_bytes_per_token_are_those_of_the_parts(name):
  found = bill(name)
  parts = found.cache_bytes_by_part
  assert found.kv_bytes_per_token == parts["main_kv_per_token"] + parts["index_keys_per_token"]
  assert found.persistent_bytes_per_token == found.kv_bytes_per_token
  slots = len(found.layers) * found.config.sliding_window
  assert found.window_bytes_per_sequence == slots * parts["window_per_slot"]


def test_decode_flops_of_the_report():
  short, long = (ledger.weigh(bill(FLASH).decode_flops(n)) for n in (4096, MILLION))
  for parts in (short, long):
    assert billions(sum(parts[p] for p in LINEAR)) == 18.27
    assert billions(parts["attention"]) == 3.22
    assert parts["index_head_sum"] == 0
  assert round(short["index"] / 1e9, 3) == 0.055
  assert billions(long["index"]) == 5.50
  assert [round(sum(p.values()) / 1e9, 1) for p in (short, long)] == [21.5, 27.0]
  growth = sum(long.values()) / sum(short.values())
  assert 1.24 < growth < 1.26
  assert round(growth, 3) == 1.253


def test_experts_at_a_quarter_would_grow_more():
  short, long = (weighed(bill(FLASH).decode_flops(n), "storage") for n in (4096, MILLION))
  assert round(long / short, 3) == 1.315


@every_config
def test_only_index_scores_grow_with_the_context(name):
  found = bill(name)
  c = found.config
  counts = [1, 2, 3, 64, 100, 1000, 4096, 65536, MILLION]
  bills = [found.decode_flops(n) for n in counts]
  for before, after in zip(bills, bills[1:]):
    assert all(after[part] >= before[part] for part in before)
    assert all(after[part] == before[part] for part in LINEAR)
  saturated = max(c.sliding_window, c.index_topk * max(found.schedule.ratios))
  assert found.decode_flops(saturated)["attention"] == found.decode_flops(MILLION)["attention"]
  assert found.decode_flops(saturated - 1)["attention"] < bills[-1]["attention"]


def test_past_the_pool_only_full_layers_score_more():
  at = lambda n: bill(FLASH).decode_flops(n)["index"]
  assert at(200_000) - at(100_000) == 100_000 * 2.5 * 2 * 32 * 128
  assert at(8_000) - at(4_000) == 4_000 * (2.5 + 4) * 2 * 32 * 128


@given(
    st.sampled_from(NAMES), st.integers(0, 300), st.integers(0, 200), st.integers(0, 300),
    st.integers(0, 60),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_lookups_are_those_of_the_rows_one_by_one(name, floor, gap, rows, pool):
  found = bill(name)
  c, start, stop = found.config, floor + gap, floor + gap + rows
  layers = tuple(dataclasses.replace(s, scores=min(s.scores, pool)) for s in found.layers)
  keys = entries = 0
  for i in range(start, stop):
    for layer in layers:
      keys += i - max(floor, i - layer.window + 1) + 1
      if layer.ratio:
        keys += min((i + 1) // layer.ratio, layer.attends)
        entries += min((i + 1) // layer.ratio, layer.scores)
  assert ledger.lookup_flops(layers, c, start, stop, floor) == {
      "attention": keys * 4 * c.num_attention_heads * c.head_dim,
      "index": entries * 2 * c.index_n_heads * c.index_head_dim,
      "index_head_sum": entries * 2 * c.index_n_heads,
  }


@every_config
def test_exact_prefill_is_the_sum_of_its_rows_with_one_head(name):
  found, tokens = bill(name), 301
  rows = [found.decode_flops(n) for n in range(1, tokens + 1)]
  prompt = found.prefill_flops(tokens, "A")
  head = 2 * found.config.vocab_size * found.config.hidden_size
  for part, flops in prompt.items():
    heads = (tokens - 1) * head if part == "bf16_linear" else 0
    assert flops == sum(row[part] for row in rows) - heads


@every_config
def test_the_short_prefill_is_the_exact_one_within_a_window(name):
  found = bill(name)
  window = found.config.sliding_window
  for tokens in (1, window - 1, window):
    assert found.prefill_flops(tokens, "B") == found.prefill_flops(tokens, "A")
  longer = found.prefill_flops(window + 1, "B")
  assert weighed(longer) < weighed(found.prefill_flops(window + 1, "A"))


def test_the_decoders_rows_see_no_window_key_before_them():
  """Row by row: the r-th of the last W rows sees r window keys in each decoder layer."""
  found, tokens = bill(TINY), 500
  c = found.config
  keys = 0
  for i in range(tokens):
    keys += sum(
        min(i + 1, 32) + (min((i + 1) // s.ratio, 16) if s.ratio else 0) for s in found.layers[:6]
    )
  for r in range(1, 32 + 1):
    keys += 6 * (r + 16)
  found = found.prefill_flops(tokens, "B")["attention"]
  assert found == keys * 4 * c.num_attention_heads * c.head_dim


def test_a_further_prompt_token_costs_the_encoder_and_the_sources_projections():
  """Past the window the decoder's linears do not grow; neither do its attended keys."""
  found = bill(FLASH)
  more, less = (found.prefill_flops(n, "B") for n in (70_000, 69_998))
  used = sum(
      w.active
      for w in found.weights
      if w.product and w.spec and (w.spec.stack == "encoder" or w.name.startswith("attn.compress"))
  )
  keys = 3 * 128 * 512 * 0.5 + 128 * 512  # index-key projections, a group of two makes one
  assert sum(more[p] - less[p] for p in LINEAR) == 2 * 2 * (used - 3 * 128 * 512 + keys)
  assert more["attention"] - less["attention"] == 2 * 4 * 64 * 512 * (2 * 128 + 18 * 640)


def test_prefill_ratio_tends_to_a_half():
  ratios = [bill(FLASH).prefill_flops_ratio(n) for n in (256, 1024, 4096, 16384, 65536)]
  assert ratios == sorted(ratios, reverse=True)
  assert 0.5 < ratios[-1] < 0.505
  assert ratios[2] < 0.52


@every_config
def test_formulas_of_sizes_count_what_shapes_count(name):
  found = bill(name)
  shaped = found.decode_flops(1)
  formula = linear_macs(found.config, found.layers)
  assert {part: 2 * n for part, n in formula.items()} == {part: shaped[part] for part in LINEAR}


def test_v4_flash_keeps_four_times_the_bytes():
  v4 = named(FLASH)["deepseek-v4-flash"]
  assert v4.kv_bytes_per_token == 21 * (584 + 68) / 4 + 20 * 584 / 128 == 3514.25
  assert round(v4.kv_bytes_per_token / bill(FLASH).kv_bytes_per_token, 2) == 3.95
  assert v4.window_bytes_per_sequence == 43 * 128 * 584
  at = v4.decode_flops(MILLION)
  assert at["attention"] == 4 * 64 * 512 * (43 * 128 + 21 * 512 + 20 * MILLION // 128)
  assert at["index"] == 2 * 64 * 128 * 21 * MILLION // 4
  macs = linear_macs(v4.sizes, v4.layers)
  assert round(sum(macs.values()) / 1e9) == 13  # as its model card says
  everywhere = 8192 * 4096 + 256 * 4096 + 2 * 24 * 4 * 4096  # Woa, router, hyper-connections
  csa = 4 * 512 * 4096 + 4 * 128 * 4096 + 64 * 4096  # pools two groups, so do its index keys
  hca = 2 * 512 * 4096
  assert macs["bf16_linear"] == 43 * everywhere + 21 * csa + 20 * hca + 129280 * 4096


def test_v4_flash_stores_eight_times_the_bytes_at_one_turn_length():
  v4, ours = named(FLASH)["deepseek-v4-flash"], 890
  turn = v4.turn_tokens_at(1 / 8, ours)
  assert round(turn) == 1783
  assert v4.persistent_bytes_per_token(turn) == pytest.approx(8 * ours)
  assert ours / v4.persistent_bytes_per_token(2 * turn) > 1 / 8
  assert v4.persistent_bytes_per_token(1e12) == pytest.approx(3514.25)
  assert v4.turn_tokens_at(1 / 3, ours) is None  # less than its global KV alone


def test_baselines_at_released_sizes():
  found = {name: b.kv_bytes_per_token for name, b in named(FLASH).items()}
  assert found == {
      "deepseek-v4-flash": 3514.25,
      "indexcache": 40 * 288 + 10 * 68,
      "yoio": 288 + 68,
      "hysparse": 5 * 288,
      "yoco": 288,
      "dense-gqa": 40 * 8 * 512 * 2 * 2,
  }


def test_dense_layers_attend_to_everything():
  keys = {
      name: b.decode_flops(MILLION)["attention"] / (4 * 64 * 512)
      for name, b in named(FLASH).items()
  }
  assert keys["dense-gqa"] == 40 * MILLION
  assert keys["yoco"] == 20 * MILLION + 20 * 128
  assert keys["hysparse"] == 5 * MILLION + 35 * (512 + 128)
  assert keys["indexcache"] == 40 * 512
  assert keys["yoio"] == 40 * 128 + 20 * 512


@every_config
def test_every_layer_reads_entries_that_an_earlier_layer_or_itself_stores(name):
  schedules = [b.layers for b in named(name).values()] + [bill(name).layers]
  for layers in schedules:
    for i, layer in enumerate(layers):
      stores = layer.entry_bytes > 0
      assert stores == (layer.reads == i) == (layer.entry_products > 0)
      assert (layer.reads is None) == (layer.ratio == 0)
      if layer.reads is not None:
        assert layer.reads <= i
        assert layers[layer.reads].entry_bytes > 0
        assert layers[layer.reads].ratio == layer.ratio
      if layer.scores:
        assert layers[layer.reads].key_bytes > 0


@pytest.mark.parametrize("name", [TINY, NAMES[3]])
def test_a_baseline_that_runs_is_billed_as_the_model_that_runs_it(name):
  for b in named(name).values():
    assert b.runs == (b.why_not is None) == (b.name == "yoio")
    if b.runs:
      run = Ledger.of(b.sizes, shapes(b.sizes))
      assert run.layers == b.layers
      assert run.kv_bytes_per_token == b.kv_bytes_per_token
      assert run.decode_flops(1000) == b.decode_flops(1000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bill(TINY).decode_flops(0), "context is 0"),
        (lambda: bill(TINY).prefill_flops(0), "tokens is 0"),
        (lambda: bill(TINY).prefill_flops(9, "C"), "arm is 'C'; it must be 'A' or 'B'"),
        (lambda: ledger.weigh({}, "int8"), "weighting is 'int8'; it must be one of"),
        (lambda: named(TINY)["yoco"].decode_flops(0), "context is 0"),
        (lambda: named(TINY)["yoco"].persistent_bytes_per_token(0), "turn_tokens is 0"),
        (lambda: Ledger.of(bill(TINY).config, {"tail.weight": (2,)}), "parameter tail.weight"),
        (
            lambda: Ledger.of(bill(TINY).config, {"runs.0.attn.wq_a.weight": (5, 2, 2)}),
            "the 1 layers",
        ),
        (lambda: Ledger.of(bill(TINY).config, {"runs.99.attn_sink": (1, 4)}), "the 0 layers"),
        (
            lambda: Ledger.of(bill(TINY).config, {"runs.0.engram.embed.weight": (1, 4, 2)}),
            "layer 0, which has no Engram",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()
