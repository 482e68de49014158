#!/usr/bin/env bash
# Runs this repository on every worker of a Cloud TPU VM slice. `run_tpu.sh --help` says how.
set -euo pipefail

readonly FOLDER=deepseek-jax

usage() {
  cat <<'TEXT'
run_tpu.sh ACTION --name=NAME --zone=ZONE [--project=PROJECT] [--dry_run] [-- PROGRAM ...]

Does the same thing on every worker of the TPU VM slice NAME, over `gcloud compute tpus tpu-vm ssh`.

  install   copies the committed files (git archive HEAD) and installs them into .venv
  check     joins all workers and prints versions and devices; an error where no TPU is found
  run       starts PROGRAM detached, its output in run.log of each worker
  resume    the same with --resume, after a stop, a preemption or a crash
  status    whether it runs, and the end of run.log
  logs      follows run.log of worker 0
  stop      SIGTERM: all workers finish the same step, write a checkpoint and end

PROGRAM is a script with its flags. Its workdir must be one folder that all workers see:

  run_tpu.sh run --name=pod --zone=us-east5-a -- scripts/finetune.py \
    --config=configs/flash.py --workdir=/mnt/runs/flash

Flags: --python=VERSION of .venv (3.12); --extras=LIST to install (tpu,data,text);
--dry_run prints the commands and runs none.
TEXT
}

fail() {
  printf 'error: %s; see run_tpu.sh --help\n' "$1" >&2
  exit 2
}

# Prints a command quoted, and runs it unless this is a dry run.
execute() {
  local quoted
  printf -v quoted '%q ' "$@"
  printf '%s\n' "${quoted% }"
  [[ -n "$dry_run" ]] || "$@"
}

# on WORKER COMMAND
on() {
  execute gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" "--worker=$1" "--command=$2"
}

install() {
  local archive="${TMPDIR:-/var/tmp}/$FOLDER.tar.gz"
  execute git -C "$(dirname "${BASH_SOURCE[0]}")/.." archive --format=tar.gz --output="$archive" HEAD
  execute gcloud compute tpus tpu-vm scp "$archive" "$name:$FOLDER.tar.gz" "${where[@]}" --worker=all
  # The images bring an older Python than 3.11; uv brings the one that is asked for. Since Debian 12
  # and Ubuntu 24.04 pip wants to be told that it may install for the user.
  local pip="python3 -m pip install --quiet --user"
  on all "set -e; mkdir -p $FOLDER; tar -xzf $FOLDER.tar.gz -C $FOLDER; cd $FOLDER
$pip uv || $pip --break-system-packages uv
python3 -m uv venv --quiet --allow-existing --python $python .venv
python3 -m uv pip install --quiet --python .venv/bin/python -e '.[$extras]'"
}

# The `tpu` first makes a missing TPU an error instead of a slow run on the CPU.
check() {
  on all "cd $FOLDER && JAX_PLATFORMS=tpu,cpu .venv/bin/python -c '
from deepseek_jax import distributed
distributed.initialize()
print(distributed.environment_check(expect_tpu=True))'"
}

# Detached from the connection, whose end would be a SIGHUP; exec keeps the number in run.pid.
start() {
  local program
  printf -v program '%q ' "$@"
  on all "cd $FOLDER || exit 1
if kill -0 \"\$(cat run.pid 2>/dev/null)\" 2>/dev/null; then echo 'a run is going on here' >&2; exit 1; fi
export JAX_PLATFORMS=tpu,cpu PYTHONUNBUFFERED=1
setsid bash -c 'echo \$\$ >run.pid; exec \"\$@\"' run .venv/bin/python ${program% } \
>>run.log 2>&1 </dev/null &"
}

status() {
  on all "cd $FOLDER && if kill -0 \"\$(cat run.pid)\" 2>/dev/null; then echo running; \
else echo ended; fi; tail -n 5 run.log"
}

main() {
  local action="" name="" zone="" project="" python=3.12 extras=tpu,data,text dry_run="" flag value
  while (($#)); do
    flag="$1"
    shift
    case "$flag" in
      --help | -h) usage; exit 0 ;;
      --dry_run) dry_run=yes; continue ;;
      --) break ;;
      --*=*) value="${flag#*=}"; flag="${flag%%=*}" ;;
      --*) (($#)) || fail "$flag has no value"; value="$1"; shift ;;
      *) [[ -z "$action" ]] || fail "unknown argument '$flag'"; action="$flag"; continue ;;
    esac
    case "$flag" in
      --name) name="$value" ;;
      --zone) zone="$value" ;;
      --project) project="$value" ;;
      --python) python="$value" ;;
      --extras) extras="$value" ;;
      *) fail "unknown flag $flag" ;;
    esac
  done
  [[ -n "$action" ]] || fail "an action is missing; give install, check, run, resume, status, logs or stop"
  [[ -n "$name" ]] || fail "--name is missing; give the name of the TPU VM slice"
  [[ -n "$zone" ]] || fail "--zone is missing; give the zone of the TPU VM slice, such as us-east5-a"
  [[ "$action" =~ ^(run|resume)$ || $# -eq 0 ]] || fail "$action takes no program, got '$1'"
  local where=("--zone=$zone")
  [[ -z "$project" ]] || where+=("--project=$project")
  case "$action" in
    run | resume)
      (($#)) || fail "$action needs a program after --, such as -- scripts/finetune.py --config=..."
      [[ "$action" == run ]] || set -- "$@" --resume
      start "$@"
      ;;
    install | check | status) "$action" ;;
    logs) on 0 "tail -n 50 -F $FOLDER/run.log" ;;
    stop) on all "kill -TERM \"\$(cat $FOLDER/run.pid)\"" ;;
    *) fail "unknown action '$action'" ;;
  esac
}

main "$@"
