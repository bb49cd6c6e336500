# Everything that a person or CI does here.  Each target does its own set-up; none needs root.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Compiled files are worth a quarter of a second at every start of an agent; some machines switch them off.
unexport PYTHONDONTWRITEBYTECODE
unexport PIP_NO_COMPILE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- set-up

# The programs and what they need to run, nothing else: what a first `make demo` waits for.
$(VENV)/.runtime: pyproject.toml
	@scripts/setup "$(VENV)"
	@touch $@

# The same and the tools of a contributor.
$(VENV)/.dev: pyproject.toml
	@scripts/setup "$(VENV)" dev
	@touch $(VENV)/.runtime $@

.PHONY: setup
setup: $(VENV)/.dev ## virtual environment with all tools, and the pre-commit hook
	@if [ -d .git ]; then $(BIN)/pre-commit install >/dev/null; fi
	@echo "ready: $(BIN)/kici $$($(BIN)/kici --version 2>/dev/null || true)"

# --- run it

.PHONY: demo
demo: $(VENV)/.runtime ## a coordinator, agents and a dozen jobs, for real; nothing is left behind
	@$(BIN)/kici demo $(ARGS)

.PHONY: up
up: $(VENV)/.runtime ## a coordinator with its status page (ARGS="--port 4001")
	@$(BIN)/kici up $(ARGS)

# --- judge it

PYTEST := $(BIN)/python -m pytest
CHECKED_TESTS := $(wildcard tests/tidy tests/unit tests/property tests/contract tests/sim)

.PHONY: fmt
fmt: $(VENV)/.dev ## format, and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: lint
lint: $(VENV)/.dev ## format, lint and layers, without changing anything
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

.PHONY: types
types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy

.PHONY: types-twice
types-twice: $(VENV)/.dev
	$(BIN)/basedpyright

.PHONY: check-tests
check-tests: $(VENV)/.dev
	$(PYTEST) -q -n 2 --dist loadgroup -m "not engine" $(CHECKED_TESTS)

.PHONY: check
check: lint types check-tests ## lint, types, tidy, unit, property, in-process contracts, simulation: before every push

.PHONY: test
test: $(VENV)/.dev ## the whole suite on the engines of this machine (REQUIRE_ENGINES=postgres: fail without it)
	$(PYTEST) -n 2 --dist loadgroup $(ARGS) tests

.PHONY: sim
sim: $(VENV)/.dev ## simulated clusters: SEED=7 replays one with its story, N=500 tries that many
	@$(BIN)/python -m kici.testing.sim $(if $(SEED),--seed $(SEED)) $(if $(N),--count $(N)) $(ARGS)

.PHONY: storm
storm: $(VENV)/.dev ## a real cluster while its parts are killed and cut off, a quarter of an hour (root; ARGS=--short: two minutes)
	@$(BIN)/python -m kici.testing.storm $(ARGS)

.PHONY: soak
soak: $(VENV)/.dev ## real programs under kill -9 and reloads, in full: one of three killed for two minutes, ten edits, ten warm
	KICI_TEST_POOL_SECONDS=120 $(PYTEST) -q -rP $(ARGS) tests/integration/test_machine_pool.py tests/e2e/test_reload.py tests/e2e/test_warm_pool.py

.PHONY: bench
bench: $(VENV)/.dev ## measure, on both stores, and print how
	PYTHONPATH=. $(BIN)/python -m tests.bench $(ARGS)

.PHONY: ci
ci: lint types types-twice test ## what .ci/run runs: lint, types, basedpyright, the whole suite

# --- write about it

.PHONY: docs
docs: $(VENV)/.dev ## write the generated pages of docs/reference anew
	$(BIN)/python scripts/docs.py

.PHONY: fragment
fragment: $(VENV)/.dev ## a change note: NAME=log-offsets TYPE=feature|fix|breaking|doc|internal TEXT="…"
	@scripts/fragment "$(or $(NAME),)" "$(or $(TYPE),feature)" "$(or $(TEXT),)"

.PHONY: adr
adr: ## a decision record from the template: TITLE="Queue in its own table"
	@scripts/adr "$(or $(TITLE),)"
