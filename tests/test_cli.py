"""Laws of the scripts' door: what reaches a Config, what ends with status 2 and one sentence."""

import json
import pathlib
import subprocess
import sys

import pytest

from deepseek_jax import cli
from deepseek_jax.config import Config
from deepseek_jax.model_config import read_released

ROOT = pathlib.Path(__file__).parents[1]
TINY = str(ROOT / "configs" / "tiny.py")
RELEASED = str(ROOT / "tests" / "golden" / "yardstick_config.json")


def config_of(path, *overrides):
  return Config.from_config_dict(cli.override(cli.load(path), overrides))


def test_fields_are_overridden_whether_the_file_names_them_or_not():
  config = config_of(
      TINY, "--config.train.steps=10", "--config.train.seed=7", "--noconfig.data.truncate",
      "--config.model.rope_scaling.factor=4", "--config.compute.quantize=('main_kv', 'index')",
      "--config.train.learning_rate=1",
  )  # fmt: skip
  assert (config.train.steps, config.train.seed, config.data.truncate) == (10, 7, False)
  assert config.train.warmup_steps <= 10
  assert config.model.rope_scaling.factor == 4.0
  assert config.compute.quantize == ("main_kv", "index")
  assert config.train.learning_rate == 1.0


def test_filling_in_defaults_changes_no_value():
  for file in sorted((ROOT / "configs").glob("*.py")):
    if file.name != "from_json.py":
      assert config_of(str(file)) == config_of(str(file)), file
  config = config_of(TINY)
  assert config.train.weight_decay == 0.1
  assert config.model.hc_mult == 4


def test_a_released_file_is_a_config_by_both_spellings():
  short = config_of(RELEASED)
  assert short == config_of(f"{ROOT / 'configs' / 'from_json.py'}:{RELEASED}")
  assert short.model == read_released(RELEASED)
  assert config_of(RELEASED, "--config.train.steps=3").train.steps == 3


@pytest.mark.parametrize(
    ("path", "override", "message"),
    [
        (TINY, "--config.train.stps=3", "unknown key config.train.stps; config.train has"),
        (TINY, "--config.other.steps=3", "unknown key config.other.steps; config has"),
        (TINY, "--config.train.steps.more=3", "unknown key config.train.steps.more"),
        (TINY, "--config.train.steps=abc", "config.train.steps is 'abc'; it must be int"),
        (TINY, "--config.train.steps=1.5", "config.train.steps is '1.5'; it must be int"),
        (TINY, "--config.train=4", "config.train is '4'; it must be ConfigDict"),
        (TINY, "--config.train.batch_size=0", "train.batch_size is 0; it must be at least 1"),
        (TINY, "--config.train.schedule=linear", "train.schedule is 'linear'"),
        ("README.md", "--config.train.steps=1", "must be a .py file with get_config"),
    ],
)
def test_an_unfit_field_is_named(path, override, message):
  with pytest.raises(ValueError, match=message):
    config_of(path, override)


def test_a_file_that_is_not_there_is_named():
  with pytest.raises(FileNotFoundError, match="there is no file configs/none.py"):
    cli.load("configs/none.py")


def test_arguments_of_the_configuration_are_told_from_others():
  overrides, others = cli._split([
      "--config=a.py", "--config.train.steps", "3", "--json", "--noconfig.data.truncate",
      "--config.train.seed=1", "--workdir", "x",
  ])  # fmt: skip
  assert overrides == [
      "--config.train.steps=3", "--noconfig.data.truncate", "--config.train.seed=1",
  ]  # fmt: skip
  assert others == ["--config=a.py", "--json", "--workdir", "x"]


PROGRAM = """
import sys
from deepseek_jax import cli
CONFIG = cli.config_flag()
def main():
  cli.keep_heap()
  print("working")
  return {"steps": CONFIG.value.train.steps, "none": None}
cli.run(main)
"""


def program(*arguments):
  return subprocess.run(
      [sys.executable, "-c", PROGRAM, *arguments], cwd=ROOT, capture_output=True, text=True
  )


def test_a_result_is_one_json_object_on_the_last_line():
  done = program(f"--config={TINY}", "--config.train.steps=3", "--json")
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout.splitlines()[-1]) == {"steps": 3, "none": None}
  lines = program(f"--config={TINY}", "--config.train.steps=3").stdout.splitlines()
  assert lines[-2:] == ["steps: 3", "none: None"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [f"--config={TINY}", "--config.train.stps=3"],
        [f"--config={TINY}", "--config.train.steps=abc"],
        [f"--config={TINY}", "--unknown=1"],
        [f"--config={TINY}", "stray"],
        ["--config=configs/none.py"],
    ],
    ids=["missing", "unknown key", "wrong type", "unknown flag", "stray", "no file"],
)
def test_bad_input_is_one_sentence_and_status_2(arguments):
  done = program(*arguments)
  assert done.returncode == 2
  assert done.stderr.startswith("error: ")
  assert done.stderr.count("\n") == 1
  assert "Traceback" not in done.stderr
