# Needs Python 3.11 or newer with venv, Node 20 or newer with npm, and make. Installs nothing globally.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
ENVIRONMENT := $(VENV)/.stamp
NODE_MODULES := contracts/node_modules/.stamp
READY := $(ENVIRONMENT) $(NODE_MODULES)
SOURCES := splitup node oracle deploy tests bench contracts/compile.py

.DEFAULT_GOAL := demo
.PHONY: demo up test lint bench contracts clean

demo: $(READY)  ## a network, a model, an execution: everything once, in a minute
	$(BIN)/splitup demo

up: $(READY)  ## a network that stays, in .splitup
	$(BIN)/splitup up

test: lint  ## everything that CI checks
	$(BIN)/pytest -n auto --maxprocesses 4

lint: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy splitup node/splitup_node oracle/splitup_oracle deploy/splitup_deploy

bench: $(READY)  ## every bar, measured; one object on stdout
	$(BIN)/python -m bench

contracts: $(READY)  ## compile the contracts into the package again
	$(BIN)/python contracts/compile.py

$(ENVIRONMENT): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[devnet,dev]'
	touch $@

$(NODE_MODULES): contracts/package.json contracts/package-lock.json
	cd contracts && npm ci --ignore-scripts --no-audit --no-fund
	touch $@

clean:  ## what tools left behind; keeps .venv, node_modules and .splitup
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis contracts/out contracts/cache dist
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
