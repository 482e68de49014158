"""The experiment end to end at small sizes: what is kept, what is pooled, what is written."""

import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest

from deepseek_jax import cli
from deepseek_jax.config import Config
from deepseek_jax.eval import brackets, replay_report, replay_text, resume, retrieval
from deepseek_jax.eval import replay_experiment as experiment
from deepseek_jax.eval.replay_experiment import TRAININGS, Measure, Phase, Setting
from deepseek_jax.eval.resume import Answers
from deepseek_jax.train import step

ROOT = pathlib.Path(__file__).parents[1]
W = 4
NESTED = Setting(
    "nested",
    W,
    (Phase(1, 2, 64, 24, 60, questions=0, facts=0),),
    Phase(2, 2, 96, 32, 48, questions=3, distances=(1, 6), facts=0),
    (Measure("open", brackets.Task(32, filler=(0.7, 0.7)), (1, 3), (1, W, 33), 2),),
)


@pytest.fixture(scope="module")
def config():
  return Config.from_config_dict(cli.load(str(ROOT / "configs" / "retrieval.py")))


def made(n, right, nll):
  """Answers of which the arms have so many right, the first ones."""
  right = np.arange(n) < np.array(right)[:, None]
  nothing = np.zeros((2, n), np.float32)
  return Answers(right, nll, nothing, nothing, np.arange(n))


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize(
    "phase",
    [NESTED.tune, Phase(1, 4, 256, 64, 128, distances=(2, 20)), Phase(1, 2, 160, 80, 80)],
)
def test_lines_have_room_for_every_draw(config, phase, training):
  """No turn is lost where documents are replayed: every line has its documents whole."""
  setting = dataclasses.replace(NESTED, tune=phase, window=16)
  one, batch = experiment.tuning(setting, config, training)
  hits = 0
  for number in range(10):
    found = batch(number)
    asked = found.weights.sum(-1)
    assert (asked >= phase.questions).all()
    assert (asked % phase.questions == 0).all()
    hits += found.rows.reads is not None and bool((found.rows.reads.base > 0).any())
  assert (hits > 5) == (training == "both")
  assert (one.train.replay is None) == (training == "exact")


def test_trainings_get_the_same_flops(config, monkeypatch):
  """Counted on each one's own program: here by the rows of its decoder."""
  rows = lambda one, batch: float(batch.targets.size)
  monkeypatch.setattr(experiment, "flops", rows)
  phase = Phase(30, 2, 120, 60, 60, questions=4)
  setting = dataclasses.replace(NESTED, tune=phase)
  found = experiment.equal_steps(functools.partial(experiment.tuning, setting, config))
  assert found == {"exact": 30, "decoder": 30 * 120 // 20, "both": 30 * 120 // 20}


def test_cells_count_what_is_known():
  nll = np.arange(5, dtype=np.float32)[:, None] * np.ones(10, np.float32)
  exact, own = made(10, (8, 8, 8, 4, 8), nll), made(10, (8, 6, 6, 6, 8), nll * 3)
  found = replay_report.cell(own, exact)
  assert found["n"] == 10
  assert found["accuracy"]["A"][0] == 0.8
  pair = found["B_against_A"]
  assert (pair["gained"], pair["lost"], pair["p"]) == (0, 2, 0.5)
  assert pair["nll"] == (3.0, 0.0)
  assert pair["nll_over_exact"] == (2.0, 0.0)
  assert (found["D_against_C"]["gained"], found["D_against_C"]["lost"]) == (0, 0)
  assert [found["against_exact"][arm]["gained"] for arm in "ABCDE"] == [0, 0, 0, 2, 0]
  assert [found["against_exact"][arm]["lost"] for arm in "ABCDE"] == [0, 2, 2, 0, 0]


def test_text_cells_are_paired():
  rng = np.random.default_rng(0)
  base = rng.random((6, 32)).astype(np.float32)
  exact = {"A": base, "B": base + 0.25, "D": base + 1}
  both = {"A": base + 0.125, "B": base + 0.25, "D": base + 0.5}
  found = replay_report.text_cells({"exact": [exact, exact], "both": [both, both]})
  assert found["exact"]["turns"] == 12
  for b in replay_report.BYTES:
    assert found["exact"]["B_over_A"][b] == pytest.approx((0.25, 0), abs=1e-6)
    assert found["exact"]["D_over_B"][b] == pytest.approx((0.75, 0), abs=1e-6)
    assert found["both"]["D_over_B"][b] == pytest.approx((0.25, 0), abs=1e-6)
    assert found["both"]["against_exact"]["D"][b] == pytest.approx((-0.5, 0), abs=1e-6)
    assert found["both"]["against_exact"]["D_over_B"][b] == pytest.approx((-0.5, 0), abs=1e-6)
  assert found["both"]["seeds"]["D_over_B"] == pytest.approx([0.25, 0.25])


def test_prompts_are_the_same_for_every_model_and_come_in_batches_of_one_shape():
  facts = Measure("facts", retrieval.Task(64, 8), (2,), (0, 32, 65), 64)
  for measure, lines, count in ((facts, 4, 2), (NESTED.measures[0], 4, 1)):
    found = experiment.prompts_of(measure, measure.distances[0], 0)
    assert len(found) == count
    assert {len(one.beginnings) for one in found} == {lines}
    experiment.prompts_of.cache_clear()
    again = experiment.prompts_of(measure, measure.distances[0], 0)
    other = experiment.prompts_of(measure, measure.distances[0], 1)
    assert all(np.array_equal(a.beginnings, b.beginnings) for a, b in zip(found, again))
    assert not np.array_equal(found[0].beginnings, other[0].beginnings)


@pytest.mark.slow
def test_a_run_is_kept_pooled_and_written(config, tmp_path, quick_compile, monkeypatch):
  said = []
  # Training itself: `make experiment-quick`.
  asked = []

  def drawn(one, batch, params, tell):
    asked.append((one.train.steps, one.train.warmup_steps))
    return step.init_state(one).params

  monkeypatch.setattr(experiment, "train", drawn)
  # Counting FLOPs compiles three programs more.
  experiment.write_json(tmp_path / "nested_steps.json", dict(zip(TRAININGS, (2, 3, 1))))
  for seed in (0, 1):
    experiment.run(NESTED, config, seed, tmp_path, said.append)
  assert asked == [(1, 1), (2, 2), (3, 2), (1, 1)] * 2
  first = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
  experiment.run(NESTED, config, 1, tmp_path, said.append)
  assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == first
  taught = [experiment.read_arrays(tmp_path / f"nested_{seed}_taught0.npz") for seed in (0, 1)]
  assert any((taught[0][k] != taught[1][k]).any() for k in taught[0])

  whole = dict(experiment.read_arrays(tmp_path / "nested_0_exact_open_1.npz"))
  assert (whole["spans"] < W).sum() == 2
  assert len(whole["spans"]) == 4
  text = replay_text.Setting("text", W, *[replay_text.Pieces(64, 1, 32)] * 2, 1, 1, 1)
  experiment.write_json(tmp_path / "text_steps.json", dict.fromkeys(TRAININGS, 1))
  rng = np.random.default_rng(0)
  for seed in (0, 1):
    for training in TRAININGS:
      costs = {arm: rng.random((3, 32)).astype(np.float32) for arm in "ABD"}
      experiment.write_arrays(tmp_path / f"text_{seed}_{training}_costs.npz", costs)
  result = replay_report.results([NESTED, text], 2, tmp_path)
  assert result["simulation_equality"] < 1e-4
  assert result["arms_equality"] < 1e-4
  cells = result["settings"]["nested/open"]["distances"]
  assert list(cells) == ["1", "3"]
  for training in TRAININGS:
    one = cells["1"][training]
    assert one["n"] == 8
    assert [span["n"] for span in one["spans"]] == [4, 4]
    parts = np.mean([seed["A"] for seed in one["seeds"]])
    assert one["accuracy"]["A"][0] == pytest.approx(parts)
  again = json.loads(json.dumps(result))
  table = replay_report.tables(again)
  assert "### nested/open" in table
  assert "### text" in table
  assert "| 1, both |" in table
  replay_report.plots(again, tmp_path)
  plots = {path.name for path in tmp_path.glob("*.svg")}
  assert plots == {"accuracy.svg", "cost.svg", "spans.svg", "text.svg"}
  short = replay_report.short(again | {"seconds": 1, "cost": {}})
  assert short["accuracy"] is short["prompts"] is None  # of buried facts
  assert short["prompts_by_setting"] == {"nested/open": 8}
  again["settings"]["facts/buried"] = again["settings"].pop("nested/open")
  short = replay_report.short(again | {"seconds": 1, "cost": {}})
  assert short["prompts"] == 8
  assert short["accuracy"]["both"]["A"] == round(cells["1"]["both"]["accuracy"]["A"][0], 4)
  assert set(short["accuracy"]["both"]) == set(resume.ARMS)
