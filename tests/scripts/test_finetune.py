"""The fine-tuning command: what it shows of the rows of a configuration."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
  """A JSONL file of conversations of two turns: 22 tokens, with the ends 13, 15, 20 and 22."""
  path = tmp_path_factory.mktemp("data") / "talks.jsonl"
  say = lambda role, content: {"role": role, "content": content}
  talk = lambda c: [
      say("user", f"what next {c}"[-10:]), say("assistant", "a"),
      say("user", "yes"), say("assistant", "b"),
  ]  # fmt: skip
  path.write_text("".join(json.dumps({"messages": talk(c)}) + "\n" for c in "abcdefghij"))
  return path


def rows_of(config, talks, folder, *more):
  command = [
      sys.executable, str(ROOT / "scripts" / "finetune.py"), "--rows", "--json",
      f"--config={ROOT / 'configs' / config}.py", f"--config.data.source={talks}",
      "--config.model.sliding_window=4", "--config.train.seq_len=64",
      "--config.data.eval_fraction=0.2", *more,
  ]  # fmt: skip
  return subprocess.run(
      command, cwd=folder, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}, check=False,
      capture_output=True, text=True,
  )  # fmt: skip


def test_rows_of_a_simulation(talks, tmp_path):
  done = rows_of(
      "sft_replay_full", talks, tmp_path, "--config.train.replay.decoder_len=32",
      "--config.train.replay.encoder=1", "--config.train.replay.hits=turn",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  *shown, last = done.stdout.splitlines()
  assert shown == [
      "22 tokens, 1 a column; W = 4",
      "encoder                  pppppppppppppRRpppppRR  22 rows",
      "decoder, turn 1          .........ppppRR.......  6 rows",
      "encoder, turn 2, hit 14  ..........wwwwRpppppRR  12 rows",
      "decoder, turn 2          ................ppppRR  6 rows",
      "",
  ]
  assert json.loads(last) == {
      "examples": 1,
      "encoder": {"prompt": 23, "response": 7, "replayed": 4, "padding": 30},
      "decoder": {"prompt": 8, "response": 4, "padding": 20},
  }
  assert not list(tmp_path.iterdir())


def test_rows_without_a_simulation(talks, tmp_path):
  done = rows_of("sft", talks, tmp_path)
  assert done.returncode == 0, done.stderr
  *shown, last = done.stdout.splitlines()
  alone = ["22 tokens, 1 a column; W = 4", "both stacks              pppppppppppppRRpppppRR  22 rows"]
  assert shown == [*alone, "", *alone, ""]
  counts = {"prompt": 36, "response": 8, "replayed": 0, "padding": 20}
  assert json.loads(last) == {
      "examples": 2, "encoder": counts, "decoder": {k: counts[k] for k in counts if k != "replayed"},
  }  # fmt: skip
