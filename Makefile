# You need python3 (3.11 or later) and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is imported is compiled then; most files of most packages never are.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q --no-compile -c constraints.txt
# Before there is an environment, which another PYTHON would not replace.
TOO_OLD := Python %d.%d is too old for agentrl: install 3.11 or later, and name it, as in: make quickstart PYTHON=python3.12
NEW_ENOUGH := $(PYTHON) -c 'import sys; v = sys.version_info[:2]; v < (3, 11) and sys.exit("$(TOO_OLD)" % v)'
# The pip that comes with Python 3.11 takes half as long again as the newest; it does where that cannot be had.
NEWEST_PIP := -m pip --disable-pip-version-check install -q -U pip || true

# Packages that need other versions than ours run in separate Pythons, which the tests start.
OTHERS := $(VENV)/clients/.done $(VENV)/inspect/.done $(VENV)/nemo_gym/.done $(VENV)/openenv/.done $(VENV)/trackio/.done $(VENV)/verifiers/.done

.PHONY: quickstart quick test lint fix docs others clean

quickstart: $(VENV)/.train  ## install, then train a tool-calling policy on this machine
	$(BIN)/agentrl train examples/calculator/tools.yaml

quick: $(VENV)/.dev  ## the edit loop, under a minute: lint what changed, imports, types, quick unit tests
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/quick

# Tests wait for processes that they start; four at a time keep two cores busy.
JOBS ?= 4
unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes would each compile the same files
test: $(VENV)/.dev others  ## the whole test suite, in JOBS processes; the tests of a file stay together
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=20

others: $(OTHERS) $(OTHERS:done=rarely)  ## the Pythons of other packages that tests run

lint: $(VENV)/.dev  ## format, lint, types, imports
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

fix: $(VENV)/.dev  ## format, and fix what ruff can
	$(BIN)/ruff check --fix-only -q . && $(BIN)/ruff format -q .

docs: $(VENV)/.docs  ## the documentation site, into build/site; broken links are errors
	$(BIN)/python scripts/docs-site

# Programs that tests start import for seconds. With Python's thresholds, they would look for garbage all the while, and
# free every object at exit. agentrl's own commands must still find other thresholds than theirs; see agentrl/garbage.py.
RARELY := (gc.set_threshold(30_000, 20, 10), atexit.register(gc.freeze), atexit.register(gc.collect))
RARELY_IN_TESTS := import atexit, gc, os; "PYTEST_VERSION" in os.environ and $(RARELY)

$(VENV)/.train: pyproject.toml constraints.txt
	test -x $(BIN)/python || { $(NEW_ENOUGH) && $(PYTHON) -m venv $(VENV) && { $(BIN)/python $(NEWEST_PIP); }; }
	$(PIP) -e '.[train]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || { $(NEW_ENOUGH) && $(PYTHON) -m venv $(VENV) && { $(BIN)/python $(NEWEST_PIP); }; }
	$(PIP) -e '.[train,docker,hf,lora,mcp,mlflow,openenv,parquet,ray,reasoning-gym,serve,tensorboard,textarena,wandb,dev]'
	@# They pin older versions of packages that other extras need, and gem-llm declares Python up to 3.12.0.
	$(PIP) --no-deps --ignore-requires-python gem-llm==0.1.0 bfcl-eval==2026.3.23
	echo '$(RARELY_IN_TESTS)' >$$(echo $(VENV)/lib/python3*/site-packages)/collect_rarely.pth
	touch $@ $(VENV)/.train

# Installs into the other environments, which need no pip for it.
$(VENV)/pip/.done:
	$(PYTHON) -m venv $(VENV)/pip
	$(VENV)/pip/bin/python $(NEWEST_PIP)
	touch $@
$(OTHERS): | $(VENV)/pip/.done
INSTALL = $(VENV)/pip/bin/python -m pip --python $(@D)/bin/python --disable-pip-version-check install -q

# Agent frameworks pin other versions of the openai SDK than ours; `tests/serve` runs them as clients.
CLIENTS := 'anthropic==2.12.*' 'openai==2.54.*' 'openai-agents==0.20.*' 'litellm==1.106.*' 'pydantic-ai-slim[openai]==2.31.*' \
	'langchain-openai==1.7.*' 'langgraph==1.*'
$(VENV)/clients/.done:
	$(PYTHON) -m venv --without-pip $(@D)
	$(INSTALL) --prefer-binary $(CLIENTS)
	touch $@

# OpenEnv's servers pin other versions than ours, so the tests run them in a separate Python; no gradio.
OPENENV := fastapi uvicorn[standard] 'fastmcp>=3,<4' httpx openai pyyaml rich requests typer huggingface_hub jsonschema tomli tomli-w
$(VENV)/openenv/.done:
	$(PYTHON) -m venv --without-pip $(@D)
	$(INSTALL) $(OPENENV)
	$(INSTALL) --no-deps openenv==0.10.0
	touch $@

# Inspect needs an older fsspec than ours, so a separate Python plays its tasks.
$(VENV)/inspect/.done:
	$(PYTHON) -m venv --without-pip $(@D)
	$(INSTALL) inspect-ai==0.3.285
	touch $@

# NeMo Gym declares Python 3.12 and requires mlflow, datasets and more; its servers run on 3.11 with these.
NEMO_GYM := aiohttp fastapi gprof2dot hydra-core itsdangerous omegaconf 'openai<=2.7.2' orjson pandas psutil pydot ray requests rich \
	tqdm uvicorn uvloop wandb yappi
$(VENV)/nemo_gym/.done:
	$(PYTHON) -m venv --without-pip $(@D)
	$(INSTALL) $(NEMO_GYM)
	$(INSTALL) --no-deps --ignore-requires-python nemo-gym==0.4.0
	touch $@

# trackio needs an older Pillow than ours, so its test runs it in a separate Python.
$(VENV)/trackio/.done:
	$(PYTHON) -m venv --without-pip $(@D)
	$(INSTALL) trackio==0.43.0
	touch $@

# verifiers pins other versions of mcp and openai than ours.
$(VENV)/verifiers/.done:
	$(PYTHON) -m venv --without-pip $(@D)
	$(INSTALL) verifiers==0.4.0
	touch $@

$(VENV)/%/.rarely: $(VENV)/%/.done
	echo 'import atexit, gc; $(RARELY)' >$$(echo $(VENV)/$*/lib/python3*/site-packages)/collect_rarely.pth
	touch $@

$(VENV)/.docs: $(VENV)/.train
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV)
