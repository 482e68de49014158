"""scripts/run_tpu.sh: what it asks of gcloud, and what its commands do on two stand-in workers."""

import os
import pathlib
import shlex
import subprocess
import time

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "run_tpu.sh"
SLICE = ("--name=pod", "--zone=us-east5-a")
PROGRAM = ("--", "scripts/finetune.py", "--config=configs/flash.py", "--config.data.source=my own")


def run_tpu(*arguments, **options):
  return subprocess.run(
      [str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60, check=False, **options
  )


def planned(*arguments):
  """Commands of a dry run, each as its words."""
  done = run_tpu(*SLICE, "--dry_run", *arguments)
  assert (done.returncode, done.stderr) == (0, "")
  # bash writes a word with line ends as $'...', which its own parser understands.
  words = 'eval "set -- $1"; printf "%s\\0" "$@"'
  split = lambda line: subprocess.run(
      ["bash", "-c", words, "bash", line], capture_output=True, text=True, check=True
  ).stdout.split("\0")[:-1]
  return [split(line) for line in done.stdout.splitlines()]


def remote(command):
  """The worker and the command line of a `gcloud ... ssh`."""
  assert command[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod"]
  assert "--zone=us-east5-a" in command
  flags = dict(word.split("=", 1) for word in command[6:])
  return flags["--worker"], flags["--command"]


def test_install_copies_the_committed_files_to_all_workers():
  archive, copy, install = planned("install", "--extras=tpu", "--python=3.13")
  assert archive[0] == "git"
  assert "archive" in archive
  assert archive[-1] == "HEAD"
  assert copy[:5] == ["gcloud", "compute", "tpus", "tpu-vm", "scp"]
  assert copy[6] == "pod:deepseek-jax.tar.gz"
  assert "--worker=all" in copy
  worker, command = remote(install)
  assert worker == "all"
  assert "--python 3.13 .venv" in command
  assert "-e '.[tpu]'" in command


def test_a_run_refuses_to_fall_back_to_the_cpu():
  ((worker, command),) = map(remote, planned("run", *PROGRAM))
  assert worker == "all"
  assert "JAX_PLATFORMS=tpu,cpu" in command
  assert "--resume" not in command


def test_resume_is_the_run_with_resume():
  ((_, run),) = map(remote, planned("run", *PROGRAM))
  ((_, resume),) = map(remote, planned("resume", *PROGRAM))
  assert resume.replace(" --resume", "") == run
  assert "--resume" in shlex.split(resume.splitlines()[-1])


def test_the_project_is_named_if_given():
  (command,) = planned("stop", "--project", "ours")
  assert "--project=ours" in command
  assert remote(command) == ("all", 'kill -TERM "$(cat deepseek-jax/run.pid)"')


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "an action is missing"),
        (("run", "--zone=z", *PROGRAM), "--name is missing"),
        (("run", "--name=pod", *PROGRAM), "--zone is missing"),
        (("run", "--name", *PROGRAM[:1]), "--zone is missing"),
        (("run", "--name"), "--name has no value"),
        (("run", *SLICE), "run needs a program after --"),
        (("resume", *SLICE, "--"), "resume needs a program after --"),
        (("stop", *SLICE, *PROGRAM), "stop takes no program, got 'scripts/finetune.py'"),
        (("walk", *SLICE), "unknown action 'walk'"),
        (("run", "stop", *SLICE), "unknown argument 'stop'"),
        (("run", *SLICE, "--nmae=x", *PROGRAM), "unknown flag --nmae"),
    ],
)
def test_bad_flags_are_one_sentence(arguments, told):
  done = run_tpu(*arguments)
  assert done.returncode == 2
  assert done.stdout == ""
  assert done.stderr.startswith(f"error: {told}")
  assert len(done.stderr.splitlines()) == 1


def test_help_names_every_action():
  done = run_tpu("--help")
  assert done.returncode == 0
  for action in ("install", "check", "run", "resume", "status", "logs", "stop"):
    assert f"\n  {action} " in done.stdout


@pytest.fixture
def workers(tmp_path):
  """Two folders in place of the homes of two workers, and a gcloud that runs commands in each."""
  python = "trap 'echo stopped; exit 0' TERM\nprintf '<%s>' \"$JAX_PLATFORMS\" \"$@\"; echo\n"
  python += "while :; do sleep 0.05; done\n"
  homes = [tmp_path / name for name in ("worker0", "worker1")]
  for home in homes:
    folder = home / "deepseek-jax" / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").write_text(f"#!/usr/bin/env bash\n{python}")
    (folder / "python").chmod(0o755)
  gcloud = tmp_path / "bin" / "gcloud"
  gcloud.parent.mkdir()
  gcloud.write_text(
      "#!/usr/bin/env bash\nset -e\n"
      'for word in "$@"; do case "$word" in --command=*) command="${word#*=}";; esac; done\n'
      + "".join(f'(cd {shlex.quote(str(home))} && bash -c "$command")\n' for home in homes)
  )
  gcloud.chmod(0o755)
  environment = os.environ | {"PATH": f"{gcloud.parent}:{os.environ['PATH']}"}
  yield homes, environment
  run_tpu(*SLICE, "stop", env=environment)


def until(condition):
  deadline = time.monotonic() + 20
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.05)


def test_a_run_is_detached_shows_its_status_and_stops(workers):
  homes, environment = workers
  logs = [home / "deepseek-jax" / "run.log" for home in homes]
  assert run_tpu(*SLICE, "run", *PROGRAM, env=environment).returncode == 0
  until(lambda: all(log.exists() and log.read_text() for log in logs))
  told = "<tpu,cpu><scripts/finetune.py><--config=configs/flash.py><--config.data.source=my own>\n"
  assert [log.read_text() for log in logs] == [told, told]
  again = run_tpu(*SLICE, "run", *PROGRAM, env=environment)
  assert again.returncode != 0
  assert "a run is going on here" in again.stderr
  assert run_tpu(*SLICE, "status", env=environment).stdout.count("running\n") == 2
  assert run_tpu(*SLICE, "stop", env=environment).returncode == 0
  until(lambda: all(log.read_text() == f"{told}stopped\n" for log in logs))
  until(lambda: run_tpu(*SLICE, "status", env=environment).stdout.count("ended\n") == 2)
