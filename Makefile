# Two commands do everything on a fresh machine: `make demo` and `make test`.
# The environment lies in .venv and is made anew only when what defines it has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# cpu: torch without CUDA, as laptops and CI use it. gpu: the set that SGLang pins.
SET ?= $(if $(shell command -v nvidia-smi 2>/dev/null),gpu,cpu)
CONSTRAINTS := constraints/$(SET).txt
TRANSFERQUEUE := transferqueue==0.1.11
SLOTS ?= 2
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test test-fast test-sglang prove lint format bench bench-trl bench-async clean

help:
	@echo "make setup   the environment in $(VENV) (nothing happens when it is current)"
	@echo "make demo    set up, then teach a small model addition with GRPO on $(SLOTS) CPU slots"
	@echo "make test    set up, then run the tests (under 8 minutes on 2 cores)"
	@echo "make test-fast  only the tests that start no processes together"
	@echo "make prove   the long proofs: seeds, soaks"
	@echo "make lint    ruff and mypy; make format mends what can be mended"
	@echo "make bench   speed, as ratios within one run"
	@echo "make bench-trl  beside TRL on the same model, task and cores, in an environment of its own"
	@echo "make bench-async  how near every pace comes to its bound, with an engine and a trainer that sleep (12 minutes)"
	@echo "make sglang  a second environment with real SGLang, in .venv-sglang"
	@echo "make test-sglang  set both up, then run the tests against real SGLang (about 6 minutes on 2 cores)"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS) Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Meshy needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TRANSFERQUEUE)
	@touch $@

demo: setup
	$(BIN)/torchrun --standalone --nproc-per-node $(SLOTS) -m meshy.ignitor recipes/grpo_sync.py $(ARGS)

# Two workers: most tests wait for processes. A file's tests stay together, for they share servers.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-fast: setup
	$(BIN)/python -m pytest -m "not e2e and not prove and not sglang" $(ARGS)

prove: setup
	$(BIN)/python -m pytest -m prove --timeout 3600 $(ARGS)

# Against the real program; `make test` covers what it shares with the embedded engine.
test-sglang: setup sglang
	$(BIN)/python -m pytest -m sglang $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	@for bench in $(filter-out scripts/bench/vs_trl.py,$(wildcard scripts/bench/*.py)); do echo "== $$bench"; $(BIN)/python $$bench || exit 1; done

# Installs TRL into .venv-trl the first time.
bench-trl: setup
	$(BIN)/python scripts/bench/vs_trl.py $(ARGS)

# Wants the machine for itself.
bench-async: setup
	$(BIN)/python -m scripts.bench.pace.measure $(ARGS)

# Real SGLang brings its own torch and transformers versions, so it has an environment of its own. PyPI has it built for
# GPUs; for a CPU, its few compiled parts have a stand-in (scripts/sglang_cpu).
SGLANG := .venv-sglang
SGLANG_PIP := $(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check
.PHONY: sglang
sglang: $(SGLANG)/.ready-$(SET)

$(SGLANG)/.ready-cpu: constraints/sglang-cpu.txt $(wildcard scripts/sglang_cpu/*.py)
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG_PIP) -r constraints/sglang-cpu.txt
	$(SGLANG_PIP) --no-deps sglang==0.5.23 torchvision==0.28.0
	cp scripts/sglang_cpu/*.py "$$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

$(SGLANG)/.ready-gpu:
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG_PIP) sglang==0.5.23
	@touch $@

clean:
	rm -rf $(VENV) $(SGLANG) runs build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
