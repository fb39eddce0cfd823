# Everything runs in .venv, made by the first target that needs it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test check clean

run: .venv/installed  ## answer a few questions with the bundled model
	$(BIN)/python example.py

test: .venv/tested  ## the default tests: CPU, offline, two minutes on two cores
	$(BIN)/python -m pytest -n auto --dist worksteal

check: .venv/developed  ## what CI runs besides the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/tested: .venv/installed
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

.venv/developed: .venv/tested
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
