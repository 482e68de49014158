"""The ledger's command: its keys, its tables and its refusals."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments):
  command = [sys.executable, str(ROOT / "scripts" / "ledger.py"), *arguments]
  return subprocess.run(
      command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}, check=False,
      capture_output=True, text=True,
  )  # fmt: skip


def test_json_of_the_released_model():
  done = run("--config=configs/flash.py", "--json", "--context=8192,100")
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  parameters = found["parameters"]
  assert parameters["backbone"] == 551_880_835_184
  assert parameters["engram_tables"] == 196_613_849_600
  assert parameters["total"] == 748_494_684_784
  assert round(parameters["active_prefill"] / 1e9, 2) == 7.89
  assert round(parameters["active_decode"] / 1e9, 2) == 16.13
  assert found["layer_modes"] == {"window": 2, "full": 4, "reindex": 4, "reuse": 30}
  assert found["kv_bytes_per_token"] == found["persistent_bytes_per_token"] == 890
  assert found["window_bytes_per_sequence"] == 2_703_360
  flops = found["decode_flops"]
  assert list(flops) == ["100", "4096", "8192", "1048576"]
  assert list(flops.values()) == sorted(flops.values())
  assert found["decode_flops_growth"] == flops["1048576"] / flops["4096"]
  assert 1.24 < found["decode_flops_growth"] < 1.26
  assert found["prefill_flops_ratio"].keys() >= {"100", "4096", "8192", "65536"}
  assert 0.5 < found["prefill_flops_ratio"]["65536"] < found["prefill_flops_ratio"]["4096"] < 0.52
  assert found["baselines"].keys() == {
      "deepseek-v4-flash", "indexcache", "yoio", "hysparse", "yoco", "dense-gqa",
  }  # fmt: skip
  for row in found["baselines"].values():
    assert row["persistent_bytes_per_token"] >= row["kv_bytes_per_token"] > 0
    assert row["window_bytes_per_sequence"] >= 0
    assert row["decode_flops"].keys() == flops.keys()
    assert row["runs"] == (row["reason"] is None)
  v4 = found["baselines"]["deepseek-v4-flash"]
  assert v4["kv_bytes_per_token"] == 3514.25
  assert round(v4["kv_bytes_ratio"], 2) == 3.95
  assert found["turn_tokens"] == round(v4["turn_tokens_at_one_eighth"])
  assert 890 / v4["persistent_bytes_per_token"] == pytest.approx(1 / 8, rel=1e-3)


def test_tables_of_a_released_file():
  done = run("--config=tests/golden/yardstick_config.json", "--weighting=none")
  assert done.returncode == 0, done.stderr
  for text in ("routed_experts", "B a token", "growth 4K", "B / A", "deepseek-v4-flash", "Not run"):
    assert text in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--config is missing"),
        (["--context=0"], "--context has '0'; it must be a whole number of tokens"),
        (["--context=4096,1e6"], "--context has '1e6'"),
        (["--weighting=int8"], "weighting is 'int8'; it must be one of"),
        (["--turn_tokens=0"], "turn_tokens is 0; it must be above 0"),
        (["--config.model.index_topk=0"], "index_topk is 0; it must be at least 1"),
        (["--config.model.kv_source_layer_ids=(3,)"], "KV source layer 3"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_sentence(flags, message):
  done = run(*(["--config=configs/tiny.py", *flags] if flags else []), "--json")
  assert done.returncode == 2
  assert done.stdout == ""
  assert done.stderr.count("\n") == 1
  assert message in done.stderr
