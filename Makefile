# Needs Python 3.11 or newer with venv, Node 20 or newer with npm, and make. Installs nothing globally.

MAKEFLAGS += --jobs=2  # npm installs while pip does, and lint runs beside the tests
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
ENVIRONMENT := $(VENV)/.stamp
DOCS := $(VENV)/.docs.stamp
MORE := $(VENV)/.test-all.stamp
EDGE := .edge/.stamp
HALMOS := $(CURDIR)/.halmos/bin/halmos
NODE_MODULES := contracts/node_modules/.stamp
SWIFTSHADER := $(VENV)/.swiftshader.stamp
NODE_CLIENTS := tests/npm/node_modules/.stamp
PAGE_MODULES := page/node_modules/.stamp
BROWSER := page/node_modules/.chromium/.stamp
PACKED_BROWSER := page/node_modules/@sparticuz/chromium/bin
READY := $(ENVIRONMENT) $(NODE_MODULES)
FOR_TESTS := $(READY) $(SWIFTSHADER) $(NODE_CLIENTS) $(BROWSER)
SOURCES := conftest.py splitup node oracle deploy extras tests bench contracts/compile.py
PACKAGES := splitup node/splitup_node oracle/splitup_oracle deploy/splitup_deploy extras
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
UNBROTLI := node -e 'process.stdout.write(require("zlib").brotliDecompressSync(require("fs").readFileSync(process.argv[1])))'

.DEFAULT_GOAL := demo
unexport PYTHONDONTWRITEBYTECODE  # the tests start ninety programs, which would all compile our modules
.PHONY: demo up check-machine test test-all run-tests test-edge faults mutants lint coverage bench gpu contracts page proto symbolic docs constraints clean

demo: $(READY) $(if $(DEVICE),$(SWIFTSHADER))  ## start a network, run a model on it, verify, pay, stop; about a minute; DEVICE=CL, MODEL=smollm2
	$(if $(DEVICE),DEV=$(DEVICE)) $(BIN)/splitup demo $(if $(MODEL),--model $(MODEL))

up: $(READY)  ## start a network that keeps running, in .splitup
	$(BIN)/splitup up

check-machine:  ## say in one line what must be installed before anything else works
	@.ci/check-machine "$(PYTHON)"

test: $(FOR_TESTS)  ## everything that CI checks
	$(MAKE) --no-print-directory lint run-tests

test-all: $(FOR_TESTS) $(MORE)  ## that, and what takes long: marked so, and exported models
	$(MAKE) --no-print-directory lint run-tests MARKED='-m ""'
	$(MAKE) --no-print-directory test-edge

run-tests: $(FOR_TESTS)
	$(BIN)/python -m tests.passes --durations 25 $(MARKED)

test-edge: $(EDGE)  ## the tests of exported models, in an environment of their own of 1.9 GB
	.edge/bin/python -m pytest extras/edge/edge_tests

faults: $(FOR_TESTS)  ## run the tests of each known fault and attack; a table of the results
	$(BIN)/python -m tests.faults -nauto --maxprocesses=4

lint: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy conftest.py $(PACKAGES) bench tests

mutants: $(FOR_TESTS)  ## take out each protection of docs/security.md in a copy; its test must fail
	$(BIN)/python -m tests.mutants

coverage: $(FOR_TESTS) $(MORE)  ## the tests that start no network, with branch coverage
	$(BIN)/pytest -n auto --maxprocesses 4 --ignore tests/e2e --cov --cov-report term

bench: $(READY)  ## measure everything in docs/benchmarks.md; one JSON object on stdout
	$(BIN)/python -m bench

gpu: $(READY)  ## measure a GPU, DEV's or CUDA: gpu-report/report.md; goes on where it stopped
	$(BIN)/python -m bench.gpu

contracts: $(READY)  ## compile the contracts into the package again
	$(BIN)/python contracts/compile.py

page: $(PAGE_MODULES)  ## build the page of splitup serve into the package again
	cd page && node_modules/.bin/tsc --noEmit && node build.mjs

proto:  ## generate the messages of draft and target workers again, in an environment of its own
	test -x .grpc/bin/python || $(PYTHON) -m venv .grpc
	.grpc/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.85.1
	cd extras/speculation/splitup_speculation && ../../../.grpc/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. speculation.proto

symbolic: $(READY) $(HALMOS)  ## prove properties of the contracts for all values; a few minutes
	cd contracts && FOUNDRY_OPTIMIZER=true PATH="$$PWD/node_modules/.bin:$$PATH" $(HALMOS) --contract SymbolicTest

docs: $(DOCS)  ## build the site into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

constraints: $(READY) $(DOCS)  ## write the installed versions of all dependencies to constraints.txt
	sed -n '/^#/p' constraints.txt > constraints.new
	$(BIN)/python -m pip freeze --exclude-editable >> constraints.new
	mv constraints.new constraints.txt

$(ENVIRONMENT): pyproject.toml constraints.txt | check-machine
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[devnet,serve,dev]'
	touch $@

$(EDGE): pyproject.toml constraints.txt | check-machine
	test -x .edge/bin/python || $(PYTHON) -m venv .edge
	.edge/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[edge]' hypothesis pytest pytest-asyncio safetensors
	touch $@

$(DOCS): $(ENVIRONMENT)
	$(INSTALL) --editable '.[docs]'
	touch $@

$(MORE): $(ENVIRONMENT)
	$(INSTALL) --editable '.[test-all]'
	touch $@

$(HALMOS):  # in an environment of its own, because it pins other versions than ours
	$(PYTHON) -m venv .halmos
	.halmos/bin/python -m pip install --quiet --disable-pip-version-check halmos==0.3.3
	touch $@

$(NODE_MODULES): contracts/package.json contracts/package-lock.json | check-machine
	cd contracts && npm ci --ignore-scripts --no-audit --no-fund
	touch $@

$(SWIFTSHADER): $(ENVIRONMENT) $(PAGE_MODULES)  # Vulkan without a GPU, for tests on WebGPU
	folder=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/swiftshader && \
	mkdir -p $$folder && $(UNBROTLI) $(PACKED_BROWSER)/swiftshader.tar.br | tar -x -C $$folder
	touch $@

$(NODE_CLIENTS): tests/npm/package.json tests/npm/package-lock.json | check-machine
	cd tests/npm && npm ci --ignore-scripts --no-audit --no-fund
	touch $@

$(PAGE_MODULES): page/package.json page/package-lock.json | check-machine
	cd page && npm ci --ignore-scripts --no-audit --no-fund
	touch $@

$(BROWSER): $(PAGE_MODULES)  # with its libraries and fonts, which a bare machine lacks
	rm -rf $(@D) && mkdir $(@D)
	$(UNBROTLI) $(PACKED_BROWSER)/al2023.tar.br | tar -x -C $(@D) --no-same-owner
	$(UNBROTLI) $(PACKED_BROWSER)/fonts.tar.br | tar -x -C $(@D) --no-same-owner
	$(UNBROTLI) $(PACKED_BROWSER)/chromium.br > $(@D)/chromium
	chmod +x $(@D)/chromium
	touch $@

clean:  ## remove what tools left behind; keeps .venv, node_modules and .splitup
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage contracts/out contracts/cache dist site
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
