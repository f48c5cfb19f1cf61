# Everything runs in .venv, which is made and kept up to date as needed.
#   make demo ARGS="--ranks 4 --steps 10"      another Python: make test PYTHON=python3.12

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

# One thread a process: the ranks of a test or of the demo share the cores.
export OMP_NUM_THREADS ?= 1
# Compiled planner kernels; beside the sources would do, but not where those are read-only.
export NUMBA_CACHE_DIR ?= $(CURDIR)/$(VENV)/numba-cache

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench clean

help:  ## Show this list
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/:[^#]*## /|/' | awk -F'|' '{printf "make %-8s%s\n", $$1, $$2}'

demo: $(STAMP)  ## Train on real photographs, as loaded and balanced, and show the difference
	$(BIN)/evenload demo $(ARGS)

test: $(STAMP)  ## Run all tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)  ## Check style, types, import rules and the rules of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_house.py

bench: $(STAMP)  ## Measure: the planner, reordering alone, the loader, training steps
	$(BIN)/python -m benchmarks.plan --times $(ARGS)
	$(BIN)/python -m benchmarks.reorder $(ARGS)
	$(BIN)/python -m benchmarks.loader $(ARGS)
	$(BIN)/python -m benchmarks.step $(ARGS)
	$(BIN)/python -m benchmarks.hf $(ARGS)

clean:  ## Remove .venv and everything else that was made here
	rm -rf $(VENV) build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  f"Python 3.11 or later is needed, found {sys.version.split()[0]}: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
