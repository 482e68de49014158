"""The training benchmark: its FLOP count, its profile, its repeats and its figures."""

import dataclasses
import json
import pathlib
import sys

import pytest

from deepseek_jax.config import Config, ModelConfig, TrainConfig
from scripts import bench_train

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"

# Window, Full m = 2 and Reuse in the encoder; the decoder's Full m = 1 with a pool of 3 × 2.
TEXT = dict(
    vocab_size=16, hidden_size=24, moe_intermediate_size=8, num_hidden_layers=4,
    num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=12, o_lora_rank=6,
    o_groups=2, n_routed_experts=4, num_experts_per_tok=2, sliding_window=4,
    compress_ratios=[0, 2, 2, 1], kv_source_layer_ids=[1, 3], index_source_layer_ids=[1, 3],
    index_n_heads=3, index_head_dim=32, index_topk=2, hc_mult=2, hc_sinkhorn_iters=2,
    candidate_source_layer_id=3, candidate_topk_blocks=3, candidate_block_size=2,
    max_position_embeddings=64,
)  # fmt: skip
BATCH, LENGTH = 2, 11


def experiment(**fields):
  train = TrainConfig(steps=20, batch_size=BATCH, seq_len=LENGTH, learning_rate=1e-3)
  return Config(ModelConfig.from_released(TEXT), train=dataclasses.replace(train, **fields))


def test_useful_flops_are_those_counted_by_hand():
  found = bench_train.useful_flops(experiment())
  d, n, h, latent, rank, f, v = 24, 2, 32, 12, 6, 8, 16
  shared = d * latent + latent * n * h + d * h + n * h * rank + 2 * rank * d  # output groups: 2
  mixing = 2 * (2 + 2) * 2 * (2 * d)
  moe = d * 4 + 3 * d * f * (2 + 1)  # two of four routed, one shared
  compressors = 2 * d * h + d * h  # with a gate where m = 2
  linear = 4 * (shared + mixing + moe) + compressors + d * v
  assert found["linear"] == 6 * linear * BATCH * LENGTH

  keys = index = 0
  for seen in range(1, LENGTH + 1):
    for m in (0, 2, 2, 1):
      keys += min(4, seen) + (min(2, seen // m) if m else 0)
    index += (seen // 2 + seen) * 3 * 33 + 2 * (latent * 3 * 32 + d * 3)
  index += (LENGTH // 2 + LENGTH) * h * 32
  assert found["attention"] == 3 * BATCH * keys * 2 * 2 * n * h
  assert found["index"] == BATCH * index * 2
  assert found["total"] == found["linear"] + found["attention"] + found["index"]


def test_a_trained_indexer_costs_three_times_its_forward_pass():
  frozen, trained = (
      bench_train.useful_flops(experiment(index_loss=stage)) for stage in ("frozen", "sparse")
  )
  assert trained == {k: 3 * v if k == "index" else v for k, v in frozen.items()} | {
      "total": frozen["total"] + 2 * frozen["index"]
  }


def test_every_target_is_the_next_token():
  batch = bench_train.random_batch(experiment(), 0)
  assert (batch.targets[0, :, :-1] == batch.tokens[0, :, 1:]).all()
  assert batch.weights.sum() == BATCH * (LENGTH - 1)


def test_nested_operations_are_counted_once():
  def event(op, start, duration, tid=1):
    return {"ph": "X", "pid": 1, "tid": tid, "ts": start, "dur": duration, "args": {"hlo_op": op}}

  events = [
      event("loop", 0, 10), event("a", 1, 3), event("inner", 5, 4), event("b", 6, 2),
      event("after", 10, 5), event("loop", 0, 7, tid=2), {"ph": "M", "pid": 1, "tid": 1},
  ]  # fmt: skip
  found = sorted(bench_train.self_times(events))
  assert found == [("a", 3), ("after", 5), ("b", 2), ("inner", 2), ("loop", 3), ("loop", 7)]


def program(tmp_path, name, body):
  """A command that runs `body` and leaves a line in the shared log."""
  file = tmp_path / f"{name}.py"
  log = f"open({str(tmp_path / 'log')!r}, 'a').write('{name} ')\n"
  file.write_text(f"import json\n{log}{body}")
  return [sys.executable, "-S", str(file)]


def test_repeats_alternate_with_the_yardstick_and_keep_the_spread(tmp_path):
  figures = {key: [1.0, 4.0] for key in bench_train._SPREAD} | {"useful_flops": {"total": 1.0}}
  own = program(tmp_path, "own", f"print('noise'); print(json.dumps({figures!r}))")
  counted = f"n = open({str(tmp_path / 'log')!r}).read().count('other')\n"
  other = program(
      tmp_path, "other", counted + "print(json.dumps({'seconds': {'median': 5.0 * n}}))"
  )
  found = bench_train.repeat(own, 3, other)
  assert (tmp_path / "log").read_text() == "own other own other own other "
  assert found["gradient_seconds"] == {"min": 1.0, "median": 2.5, "max": 4.0}
  assert found["yardstick_seconds"] == {"min": 5.0, "median": 10.0, "max": 15.0}
  assert found["yardstick_ratio"] == {"min": 2.0, "median": 4.0, "max": 6.0}
  assert bench_train.repeat(own, 1, None)["yardstick_ratio"] is None


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise SystemExit('no such model')", "no such model"),
        ("print('text')", "JSON object"),
        ("print('{}')", "seconds.median"),
    ],
)
def test_a_failing_yardstick_is_told(tmp_path, body, says):
  own = program(tmp_path, "own", "print('{}')")
  with pytest.raises(ValueError, match=says):
    bench_train.repeat(own, 1, program(tmp_path, "other", body))


@pytest.fixture
def released_file(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps({"text_config": TEXT}))
  return str(tmp_path / "config.json")


def test_a_released_configuration_is_measured_as_the_yardstick_is():
  config = bench_train.read_config(str(GOLDEN / "yardstick_config.json"), None, None, ())
  assert (config.train.batch_size, config.train.seq_len) == (2, 512)
  assert (config.train.balance_loss, config.train.index_loss) == (0.0, "frozen")
  assert (config.compute.dtype, config.compute.quantize) == ("float32", ())


def test_sizes_and_fields_can_be_overridden(released_file):
  overrides = ("--config.train.seq_len=9", "--config.compute.remat=layer")
  config = bench_train.read_config(released_file, 3, None, overrides)
  assert (config.train.batch_size, config.train.seq_len, config.compute.remat) == (3, 9, "layer")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--batch=0"], "batch_size"),
        (["--length=none"], "length"),
        (["--repeats=0"], "--repeats"),
        (["--matmul=12,x"], "--matmul"),
        (["--nonsense"], "--nonsense"),
        (["--config.model.nonsense=1"], "nonsense"),
        (["--config.model.hidden_size=x"], "hidden_size"),
        (["--config=absent.json"], "absent.json"),
        (["--config=text.txt"], "text.txt"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_sentence(released_file, flags, says, capsys):
  assert bench_train.main([f"--config={released_file}", *flags]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert says in err
  assert err.count("\n") == 1


@pytest.mark.slow
def test_figures_of_one_repeat(released_file, capsys):
  flags = ["--batch=2", "--length=11", "--steps=2", "--matmul=32", "--once"]
  assert bench_train.main([f"--config={released_file}", *flags]) == 0
  found = json.loads(capsys.readouterr().out)
  assert found.keys() >= set(bench_train._SPREAD)
  assert all(min(found[key]) > 0 for key in bench_train._SPREAD)
  assert len(found["seconds_per_step"]) == len(found["gradient_seconds"]) == 2
  assert found["tokens_per_second"] == [22 / s for s in found["seconds_per_step"]]
  assert found["share_in_xla"][0] <= 1
  assert found["peak_rss_bytes"] >= found["gradient_peak_rss_bytes"]
  assert found["useful_flops"] == bench_train.useful_flops(experiment())
  assert 0 < sum(op["share"] for op in found["top_ops"]) <= 1
