# make demo   a faster silu kernel from the real loop, on this machine, without accounts or accelerators
# make test   the tests, as continuous integration runs them
# Each target that needs a Python environment makes it when there is none (VENV, from PYTHON).

VENV ?= .venv
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3.10 python3,$(if $(shell $(p) -c 'import sys; print((3, 10) <= sys.version_info[:2] < (3, 14) or "")' 2>/dev/null),$(p))))
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

# Tests and demo run on a Ray cluster of their own; no token file or usage report is to come of it.
export RAY_AUTH_MODE ?= disabled
export RAY_USAGE_STATS_ENABLED ?= 0

DEMO_OUTPUT ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: demo test test-slow lint bench clean install

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/accelopt-ray optimize silu --beam-width 2 --plans-per-candidate 3 --attempts-per-plan 1 --iterations 3 --output $(DEMO_OUTPUT)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m experiments.benchmark

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.10 to 3.13 found: install one, or name it with make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): setup.py constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,analysis]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
