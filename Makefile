# Everything runs in .venv, made by the first target that needs it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test lowest check site gpu clean

run: .venv/installed  ## answer a few questions with the bundled model
	$(BIN)/python example.py

test: .venv/tested  ## the default tests: CPU, offline, about three minutes on two cores
	$(BIN)/python -m pytest -n auto --dist worksteal

lowest:  ## the default tests with the lowest version of every dependency that pyproject.toml allows
	$(PYTHON) -m venv .venv/lowest
	.venv/lowest/bin/pip install --quiet 'uv>=0.9'
	.venv/lowest/bin/uv pip install --quiet --python .venv/lowest/bin/python --resolution lowest-direct \
	  --editable '.[test]' 'setuptools>=77'
	.venv/lowest/bin/python -m pytest -n auto --dist worksteal

check: .venv/developed  ## what CI runs besides the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

site: .venv/site  ## the lessons, the guide, the page of a run and the live page for a host of static files: site/index.html
	$(BIN)/nanoengine run --trace docs/run.html
	$(BIN)/nanoengine trace -o docs/live.html
	$(BIN)/mkdocs build --strict

# VLLM=path/to/python, of an environment with vLLM, adds it to the comparison; likewise NANO_VLLM.
gpu: .venv/tested  ## everything that only a GPU can prove, into gpu-report/report.md (benchmarks/gpu.md)
	nvidia-smi || true
	$(BIN)/python -m benchmarks.gpu $(PIECES) $(if $(VLLM),--python vllm=$(VLLM)) \
	  $(if $(NANO_VLLM),--python nano-vllm=$(NANO_VLLM))

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

.venv/site: .venv/installed
	$(BIN)/pip install --quiet 'mkdocs-material>=9.6,<10'
	touch $@

clean:
	rm -rf .venv site docs/run.html docs/live.html .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
