# You need python3 (3.11 or later) and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt

.PHONY: quickstart quick test lint fix docs clean

quickstart: $(VENV)/.train  ## install, then train a tool-calling policy on this machine
	$(BIN)/agentrl train examples/calculator/tools.yaml

quick: $(VENV)/.dev  ## the edit loop, under a minute: lint what changed, imports, types, quick unit tests
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/quick

JOBS ?= 3
test: $(VENV)/.dev  ## the whole test suite, in JOBS processes; the tests of a file stay together
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lint: $(VENV)/.dev  ## format, lint, types, imports
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

fix: $(VENV)/.dev  ## format, and fix what ruff can
	$(BIN)/ruff check --fix-only -q . && $(BIN)/ruff format -q .

docs: $(VENV)/.docs  ## the documentation site, into build/site; broken links are errors
	$(BIN)/python scripts/docs-site

$(VENV)/.train: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[train]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[train,docker,hf,lora,mcp,parquet,ray,serve,dev]'
	touch $@ $(VENV)/.train

$(VENV)/.docs: $(VENV)/.train
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV)
