PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
OUT ?= out/demo

.DEFAULT_GOAL := help
.PHONY: help setup lock dist demo federation figures notebooks lab lists docs test coverage mutants test-slow test-federation clean

help:            ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 17

setup: $(READY)  ## the environment in .venv, with pinned versions; UV=1: by uv, sooner; LOCKED=1: with pinned contents, too (Linux, Python 3.11)

# uv unpacks on all cores and pip on one. It does not read pip's configuration: .ci/run tells it.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ifdef UV
INSTALL := $(PIP) -c constraints.txt uv && $(BIN)/uv pip install --quiet --python $(BIN)/python
else
INSTALL := $(PIP)
endif
ifdef LOCKED
$(READY): requirements.lock
endif
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedlayers needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(BIN)/python -c 'import sys; sys.exit((sys.version_info[:2], sys.platform) != ((3, 11), "linux") and "LOCKED=1 is for Python 3.11 on Linux; leave it out, or set PYTHON=")'
	$(PIP) --only-binary :all: --require-hashes -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e .
else
	$(INSTALL) -c constraints.txt -e '.[dev]'
endif
	touch $@

LOCKING := $(BIN)/uv pip compile --constraint constraints.txt --generate-hashes --upgrade --quiet --no-header --no-annotate \
	--no-emit-index-url --no-emit-find-links --python-version 3.11.7 --python-platform x86_64-manylinux_2_28

lock:            ## write requirements.lock from pyproject.toml and constraints.txt
	$(LOCKING) pyproject.toml --extra dev --output-file requirements.lock

dist: $(READY)   ## the wheel and its source, in dist
	$(BIN)/python -m build --no-isolation --outdir dist .

# What two examples need, without the tools of developers. CPU wheels of torch, where their index can be reached.
CPU := --index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout 15
$(DEMO): pyproject.toml constraints.txt
	@echo "make demo installs fedlayers in $(VENV): about 1.5 GB and some minutes. Its three decisions take some minutes."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedlayers needs Python 3.11 or newer; set PYTHON=")'
	@test -e $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -e $(READY) || $(PIP) $(CPU) -c constraints.txt torch torchvision 2>/dev/null \
		|| echo "The index of CPU wheels cannot be reached. torch with CUDA makes it about 5.5 GB."
	@test -e $(READY) || $(PIP) -c constraints.txt -e .
	@touch $@

demo: $(DEMO)    ## three decisions: share all layers, share some, do not federate: out/demo
	$(BIN)/fedlayers demo --out $(OUT)

federation: $(READY) ## four hospitals as processes on this machine: out/federation/report.html; ROUNDS=1: short
	$(BIN)/python -m examples.four_hospitals out/federation $(ROUNDS)

figures: $(READY) ## the figures and tables that have rows, drawn again: figures/pictures, some minutes
	$(BIN)/python -m figures all

notebooks: $(READY) ## the notebooks executed again and stored, some minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m notebooks

lab: $(READY)    ## the notebooks in JupyterLab
	$(BIN)/jupyter lab notebooks

lists: $(READY)  ## the pages' lists and the papers' scorecard, written again
	$(BIN)/python -m docs.lists
	$(BIN)/python -m figures scorecard

docs: $(READY)   ## the site: scorecard, figures, notebooks, interface; out/site/index.html, its links checked; CI=1: runs each notebook
	OMP_NUM_THREADS=1 $(BIN)/python -m docs $(if $(CI),--execute)

# Compiled files are kept, whatever the shell says: tests start many processes. A worker has whole files, with what they share.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
ALL := $(PYTEST) -n auto --dist worksteal

test: $(READY)   ## style, types and tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; $(ALL); tests=$$?; wait $$types || { echo "mypy failed: see above"; exit 1; }; exit $$tests

coverage: $(READY) ## lines and branches that the tests reach, in out/coverage
	$(ALL) --cov=fl_core --cov=diagnostics --cov=fedlayers --cov-branch \
		--cov-report=term:skip-covered --cov-report=html:out/coverage

mutants: $(READY) ## The stored mutations of the code, each against the tests that reach it, some minutes
	$(BIN)/python -m tests.mutants

test-slow: $(READY) ## the tests that take long, some minutes
	$(ALL) -m slow

test-federation: $(READY) ## federations of real processes, with kills
	$(PYTEST) -n 0 -m federation tests/fedlayers/flower

clean:           ## remove the environment and the caches; runs and reports stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
