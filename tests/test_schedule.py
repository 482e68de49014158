"""The static schedule: the released picture, its queries, and every illegal one with its reason."""

import dataclasses
import json
import pathlib

import jax
import pytest

from configs import flash
from deepseek_jax.config import Config, ModelConfig
from deepseek_jax.schedule import Mode, Schedule

GOLDEN = pathlib.Path(__file__).parent / "golden"
FLASH = Config.from_config_dict(flash.get_config()).model
SCHEDULE = Schedule.from_config(FLASH)
# 0, 1 window; 2, 3 and 4, 5 Full and Reuse of ratio 2; 6 Full of ratio 1 with the pool; 8 and 10
# Reindex; 7, 9, 11 Reuse.
TINY = ModelConfig.from_released(
    json.loads((GOLDEN / "model_args.json").read_text())["text_config"]
)

PICTURE = """
40 layers: 2 Window + 4 Full + 4 Reindex + 30 Reuse; window 128, Top-K 512
── encoder ────────────────────────────────────────────────────────
      0  WINDOW  window only
      1  WINDOW  window only   + Engram
      2  FULL    ■ main KV  ■ index keys  ■ Top-K   m = 2
    3–7  REUSE   ← KV of 2  ← Top-K of 2
      8  FULL    ■ main KV  ■ index keys  ■ Top-K   m = 2
   9–13  REUSE   ← KV of 8  ← Top-K of 8
     14  FULL    ■ main KV  ■ index keys  ■ Top-K   m = 2   + Engram
  15–19  REUSE   ← KV of 14  ← Top-K of 14
── decoder ────────────────────────────────────────────────────────
     20  FULL    ■ main KV  ■ index keys  ■ Top-K   m = 1   ■ pool 2048 × 8
  21–23  REUSE   ← KV of 20  ← Top-K of 20
     24  REINDEX ← KV of 20  ■ Top-K  inside the pool
  25–27  REUSE   ← KV of 20  ← Top-K of 24
     28  REINDEX ← KV of 20  ■ Top-K  inside the pool
  29–31  REUSE   ← KV of 20  ← Top-K of 28
     32  REINDEX ← KV of 20  ■ Top-K  inside the pool
  33–35  REUSE   ← KV of 20  ← Top-K of 32
     36  REINDEX ← KV of 20  ■ Top-K  inside the pool
  37–39  REUSE   ← KV of 20  ← Top-K of 36
"""


def test_the_released_schedule_as_a_picture():
  assert str(SCHEDULE) == PICTURE.strip()


def test_census_stacks_and_entries():
  assert SCHEDULE.census == {Mode.WINDOW: 2, Mode.FULL: 4, Mode.REINDEX: 4, Mode.REUSE: 30}
  assert SCHEDULE.decoder_start == 20
  assert [s.layer for s in SCHEDULE.encoder + SCHEDULE.decoder] == list(range(40))
  assert {s.stack for s in SCHEDULE.decoder} == {"decoder"}
  assert SCHEDULE.ratios == (1, 2)
  assert SCHEDULE.entries_per_token == 2.5


def test_who_reads_whom():
  assert SCHEDULE.kv_consumers(8) == tuple(range(8, 14))
  assert SCHEDULE.kv_consumers(20) == tuple(range(20, 40))
  assert SCHEDULE.index_consumers(20) == (20, 21, 22, 23)
  assert SCHEDULE.index_consumers(36) == (36, 37, 38, 39)
  assert [s.layer for s in SCHEDULE.index_sources] == list(FLASH.index_source_layer_ids)
  assert SCHEDULE.pool_source.layer == 20
  assert [s.layer for s in SCHEDULE.layers if s.in_pool] == [24, 28, 32, 36]
  assert [(s.layer, s.engram) for s in SCHEDULE.layers if s.engram is not None] == [(1, 0), (14, 1)]


def test_runs_cover_the_layers_in_order_and_stack_equal_kinds_alone():
  runs = SCHEDULE.runs
  assert [s.layer for run in runs for s in run] == list(range(40))
  assert len(runs) == 18
  assert all(len({s.kind for s in run}) == 1 for run in runs)
  assert all(len(run) == 1 for run in runs if run[0].selects or run[0].engram is not None)
  assert sum(len(run) for run in runs if run[0].mode is Mode.REUSE) == 30


def test_a_reindex_layer_outside_the_pool_source_is_unrestricted():
  """Without a candidate source nothing is restricted, and no pool is drawn."""
  free = Schedule.from_config(dataclasses.replace(FLASH, candidate_source_layer_id=None))
  assert free.pool_source is None
  assert not any(s.in_pool or s.makes_pool for s in free.layers)
  assert free.pool_blocks == 0
  assert "pool" not in str(free)
  assert "REINDEX ← KV of 20  ■ Top-K" in str(free)


def ratios(**changes):
  new = list(TINY.compress_ratios)
  for layer, m in changes.items():
    new[int(layer.removeprefix("l"))] = m
  return tuple(new)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # A Reuse layer before any source.
        ({"compress_ratios": ratios(l1=2)}, "layer 1 has ratio 2 before any KV source"),
        # A Reindex or Reuse layer whose source has another ratio.
        (
            {"compress_ratios": ratios(l8=2)},
            "Reindex layer 8 has ratio 2, its KV source 6 has ratio 1",
        ),
        (
            {"compress_ratios": ratios(l3=1)},
            "Reuse layer 3 has ratio 1, its KV source 2 has ratio 2",
        ),
        # A candidate source that is not a KV source.
        (
            {"candidate_source_layer_id": 8},
            r"candidate_source_layer_id is 8; .*KV source, one of \[2, 4, 6\]",
        ),
        # A pool that can hold fewer reachable entries than Top-K.
        (
            {"candidate_topk_blocks": 2},
            r"candidate_topk_blocks = 2 × .*5 reachable .*index_topk = 8",
        ),
        ({"index_topk": 18}, r"guarantee 17 reachable entries .*at least index_topk = 18"),
        ({"candidate_topk_blocks": 0}, "candidate_topk_blocks = 0 "),
        ({"candidate_block_size": 0}, "candidate_block_size = 0 "),
        # A decoder that reads nothing.
        (
            {"kv_source_layer_ids": (), "index_source_layer_ids": ()},
            "is empty; the decoder would read nothing",
        ),
        (
            {"compress_ratios": ratios(l9=0)},
            r"decoder layer 9 .*\[9\] = 0; .*would read nothing there",
        ),
        # Ratios and layer counts that disagree.
        (
            {"compress_ratios": TINY.compress_ratios[:-1]},
            r"compress_ratios has 11 entries; .*= 12 .*allow \[12\]",
        ),
        (
            {"compress_ratios": (*TINY.compress_ratios, 0), "num_nextn_predict_layers": 2},
            r"has 13 entries; .*\[12, 14\]",
        ),
        ({"compress_ratios": ratios(l2=-1)}, "a ratio must be at least 0"),
        # Sources that are none, or in no order.
        ({"index_source_layer_ids": (2, 4, 8, 10)}, "layer 6 is not in index_source_layer_ids"),
        (
            {"index_source_layer_ids": (1, 2, 4, 6, 8, 10)},
            r"layer 1 is an index source with .*\[1\] = 0",
        ),
        (
            {"kv_source_layer_ids": (4, 2, 6)},
            r"kv_source_layer_ids is \(4, 2, 6\); .*ascending layer ids within 0\.\.11",
        ),
        (
            {"kv_source_layer_ids": (2, 4, 12)},
            r"kv_source_layer_ids is \(2, 4, 12\); .*within 0\.\.11",
        ),
        ({"index_source_layer_ids": (2, 2, 4, 6)}, r"index_source_layer_ids is \(2, 2, 4, 6\)"),
        ({"engram_layer_ids": (1, 12)}, r"engram_layer_ids is \(1, 12\); .*within 0\.\.11"),
    ],
)
def test_an_illegal_schedule_is_refused_with_its_reason(changes, message):
  with pytest.raises(ValueError, match=message):
    Schedule.from_config(dataclasses.replace(TINY, **changes))


def test_the_smallest_legal_pool_is_accepted():
  """(blocks - 1) · size + 1 = Top-K."""
  legal = dataclasses.replace(TINY, candidate_topk_blocks=5, candidate_block_size=4, index_topk=17)
  assert Schedule.from_config(legal).topk == 17


def test_it_travels_through_jit_without_becoming_an_array():
  other = Schedule.from_config(Config.from_config_dict(flash.get_config()).model)
  assert other is not SCHEDULE
  assert (other, hash(other)) == (SCHEDULE, hash(SCHEDULE))
  assert jax.tree.leaves(SCHEDULE) == []
  traces = []

  @jax.jit
  def run(state):
    traces.append(state["schedule"])
    return state

  for schedule in (SCHEDULE, other):
    assert run({"schedule": schedule, "step": 1})["schedule"] == SCHEDULE
  assert len(traces) == 1
  run({"schedule": Schedule.from_config(TINY), "step": 1})
  assert len(traces) == 2
