# make demo   zoo → profile → estimate → place → serve → load on this machine, with nothing but git and Python
# make test   everything that must hold: format, lint, types, tests, wheel
# make check FAST=1   without the tests that are marked slow, and those that wait for other processes by the clock
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test lint types check docs clean constraints

demo: $(VENV)/.demo
	$(BIN)/python -m bench.demo

test: $(VENV)/.test $(VENV)/.tools lint types check

lint:
	$(BIN)/ruff format --check gpuprof tests bench
	$(BIN)/ruff check gpuprof tests bench

types:
	$(BIN)/mypy

# Tests start the program hundreds of times, and each of their processes imports all tests: where an environment forbids
# bytecode, all of them would compile every module anew.
check: export PYTHONDONTWRITEBYTECODE :=

# Tests of servers come last, two files at a time, and those that measure latencies alone: more at a time would measure
# one another. What is left of them with FAST=1 measures nothing: the marks slow and flaky (tests/reruns.py) leave out
# whatever starts servers, workers or profilers and waits for them.
check:
ifdef FAST
	$(BIN)/pytest -n auto --dist worksteal -m "not slow and not flaky"
else
	bash .ci/compile.sh
	@failed=0; \
	$(BIN)/pytest -n auto --dist worksteal --ignore tests/serving --ignore tests/load || failed=1; \
	$(BIN)/pytest -n 2 --dist loadfile tests/serving || failed=1; \
	$(BIN)/pytest tests/load || failed=1; \
	exit $$failed
endif

# Each environment is rebuilt when what it is made from changes.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gpuprof needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "cannot make a virtual environment: on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install --quiet --constraint constraints.txt --editable '.[cpu,serve]'
	touch $@

# Only a CPU build of PyTorch will do (the +cpu pin never takes the CUDA one, of gigabytes); where none can be had, the tests
# that export from it are skipped.
$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install --quiet --constraint constraints.txt --editable '.[cpu,serve,edge,ray,learn,docs,dev]'
	$(PIP) install --quiet --constraint constraints.txt 'torch==2.13.0+cpu' && \
	  $(PIP) install --quiet --constraint constraints.txt --editable '.[export]' || \
	  echo "no CPU build of torch can be had: the tests that export from it are skipped"
	touch $@

# Programs of others that some tests start: nsys, perf_analyzer, grpc-js. Each script ends well where its program cannot be
# had. Those of hundreds of megabytes come when asked for: ONNX Runtime for GPUs and Triton's server.
$(VENV)/.tools: $(VENV)/bin/python
	bash .ci/install-nsys.sh
	bash .ci/install-perf-analyzer.sh
	bash .ci/install-grpc-js.sh
	[ -z "$$GPUPROF_ORT_GPU_TESTS" ] || bash .ci/install-onnxruntime-gpu.sh
	[ -z "$$GPUPROF_TRITON_TESTS" ] || bash .ci/install-triton.sh
	touch $@

# The site, in site/; tests/test_site.py builds it, too.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Pins what the environment holds now; run it after an upgrade that passed the tests.
constraints:
	$(PIP) freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
