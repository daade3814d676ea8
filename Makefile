# Each target makes .venv with pinned versions first, if it is missing.
PYTHON ?= python3
BIN := .venv/bin
# Idle threads that spin would take the processor from the rest of the run.
export OMP_WAIT_POLICY := passive

.PHONY: demo test check format recipes clean

demo: .venv/ready
	$(BIN)/python examples/demo.py

test: .venv/ready
	$(BIN)/python -m pytest tests -n 2

check: .venv/ready
	$(BIN)/ruff format --check posttrain tests examples recipes
	$(BIN)/ruff check posttrain tests examples recipes
	$(BIN)/mypy
	$(BIN)/python -m pytest tests -m "not slow" -n 2

format: .venv/ready
	$(BIN)/ruff format posttrain tests examples recipes
	$(BIN)/ruff check --fix posttrain tests examples recipes

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch .venv/ready

clean:
	rm -rf .venv runs
