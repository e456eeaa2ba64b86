# Everything a developer needs; `make help` lists it. CI runs the same commands.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

# Python 3.11 or newer makes the environment; inside it everything is called by path.
BOOTSTRAP_PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest
SOURCES := operator/src trainer-sidecar/src

.PHONY: help install lock demo test-fast test test-oldest lint format bench bench-interval storm clean

help: ## Show this list
	@grep -hE '^[a-zA-Z_-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

install: .venv/.installed ## Create .venv with the locked versions and both distributions

.venv/.installed: requirements.lock operator/pyproject.toml trainer-sidecar/pyproject.toml
	$(BOOTSTRAP_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: set BOOTSTRAP_PYTHON")'
	[ -x $(PYTHON) ] || $(BOOTSTRAP_PYTHON) -m venv .venv
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e ./trainer-sidecar -e ./operator
	touch $@

lock: ## Write requirements.lock anew from requirements.in (a fresh environment; takes minutes)
	rm -rf build/lock-venv && mkdir -p build
	$(BOOTSTRAP_PYTHON) -m venv build/lock-venv
	build/lock-venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.in
	{ sed -n '1,/^$$/p' requirements.lock; build/lock-venv/bin/python -m pip freeze; } > build/requirements.lock
	mv build/requirements.lock requirements.lock
	rm -rf build/lock-venv

demo: install ## Train a small GPT, kill a rank, lose a worker, hang a rank, and prove that nothing was lost
	$(PYTHON) examples/demo/demo.py

test-fast: install ## The quick tests: under two minutes
	$(PYTEST) -m "not slow and not storm"

test: lint ## Lint and every test but the long storm: under twenty minutes
	$(PYTEST) -m "not storm" --durations=40

.venv-oldest/.installed: requirements-oldest.lock trainer-sidecar/pyproject.toml
	[ -x .venv-oldest/bin/python ] || $(BOOTSTRAP_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-oldest.lock
	touch $@

test-oldest: .venv-oldest/.installed ## The tests of library, agent and launcher with the oldest supported torch
	PYTHONPATH=trainer-sidecar/src .venv-oldest/bin/python -m pytest -p no:cacheprovider \
		tests/unit/protocol tests/unit/trainer tests/unit/storage tests/unit/launcher tests/processes/trainer

lint: install ## ruff, mypy --strict, and the import contracts
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy --strict $(SOURCES)
	.venv/bin/lint-imports

format: install ## Format the code and fix what ruff can fix
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

bench: install ## Measure stall, persist and restart beside their baselines; writes build/bench/*.json
	$(PYTHON) -m tests.bench

bench-interval: install ## Replay the interval tuner on real failures beside other policies; writes build/bench/interval.json
	$(PYTHON) -m tests.bench interval

storm: install ## The long runs: 200 random kills on a state of 200 MB; lost workers and sharded state
	$(PYTHON) tests/storm/run.py --kills 200
	$(PYTHON) tests/storm/run.py --kills 60 --per-window 0 --width 1000 --lose-workers
	$(PYTHON) tests/storm/run.py --kills 60 --per-window 0 --width 1000 --lose-workers --fsdp

clean: ## Remove the environment, caches and what runs left in build/
	rm -rf .venv .venv-oldest build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .lastwords runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
