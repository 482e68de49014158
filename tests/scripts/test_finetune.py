"""The fine-tuning command: what it shows of the rows of a configuration."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def write_talks(path):
  """Conversations of two turns and 22 tokens, with the ends 13, 15, 20 and 22."""
  say = lambda role, content: {"role": role, "content": content}
  talk = lambda c: [
      say("user", f"what next {c}"[-10:]), say("assistant", "a"),
      say("user", "yes"), say("assistant", "b"),
  ]  # fmt: skip
  path.write_text("".join(json.dumps({"messages": talk(c)}) + "\n" for c in "abcdefghij"))


def test_rows_are_shown_and_nothing_is_written(tmp_path):
  talks = tmp_path / "talks.jsonl"
  write_talks(talks)
  command = [
      sys.executable, str(ROOT / "scripts" / "finetune.py"), "--rows", "--json",
      f"--config={ROOT / 'configs' / 'sft_replay_full.py'}", f"--config.data.source={talks}",
      "--config.data.eval_fraction=0.2", "--config.model.sliding_window=4",
      "--config.train.seq_len=64", "--config.train.replay.decoder_len=32",
      "--config.train.replay.encoder=1", "--config.train.replay.hits=turn",
  ]  # fmt: skip
  done = subprocess.run(
      command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}, check=False,
      capture_output=True, text=True,
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
  assert list(tmp_path.iterdir()) == [talks]
