# Every target prepares the virtual environment by itself. A second one, for another Python:
#   make test VENV=.venv313 PYTHON=python3.13
PYTHON ?= python3
VENV ?= .venv
# Two processes, each with whole files: fixtures compile once.
PYTEST_ARGS ?= -n 2 --dist loadfile

BIN := $(VENV)/bin
FINETUNE_READY := $(VENV)/.finetune-ready
NOTEBOOKS_READY := $(VENV)/.notebooks-ready
TEST_READY := $(VENV)/.test-ready

.PHONY: finetune test test-fast tpu-compile notebooks experiment-quick lint format clean

finetune: $(FINETUNE_READY)
	$(BIN)/python scripts/finetune.py --config=configs/tiny.py --workdir=runs/finetune \
	  $(if $(wildcard runs/finetune/checkpoints),--resume)

test: $(TEST_READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: $(TEST_READY)
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

# Executed in kernels and left as they are. The suite's options are for its own modules.
notebooks: $(NOTEBOOKS_READY)
	$(BIN)/python -m pytest -o addopts= -p no:cacheprovider --nbmake --nbmake-timeout=300 notebooks

# The small form of docs/replay_experiment.md; fails if what is trained is not what is served.
experiment-quick: $(TEST_READY)
	rm -rf runs/replay_quick
	$(BIN)/python scripts/experiment_replay.py --quick --json

# Compiles a step for a TPU slice, without a TPU:
#   make tpu-compile TOPOLOGY=v6e:16x16 MODE=decode CONFIG=configs/flash.py
CONFIG ?= configs/flash.py
TOPOLOGY ?= v5p:4x4x8
MODE ?= train
tpu-compile: $(TEST_READY)
	$(BIN)/python scripts/compile_tpu.py --config=$(CONFIG) --topology=$(TOPOLOGY) --mode=$(MODE)

lint: $(TEST_READY)
	$(BIN)/ruff check .
	$(BIN)/pyink --check --quiet .

format: $(TEST_READY)
	$(BIN)/ruff check --fix .
	$(BIN)/pyink --quiet .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

$(FINETUNE_READY): EXTRAS := data
$(NOTEBOOKS_READY): EXTRAS := data,text,tpu,notebooks
$(TEST_READY): EXTRAS := data,text,tpu,dev

# The stamp is written last, so an interrupted installation starts again.
$(FINETUNE_READY) $(NOTEBOOKS_READY) $(TEST_READY): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("deepseek-jax needs Python 3.11 or newer and $(PYTHON) is %d.%d: set PYTHON to a newer one." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	@touch $@
