PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EVALS  := $(VENV)/.installed-evals
WORKERS ?= auto

.PHONY: install run test lint types clean

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

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
