# Two commands for a newcomer: `make demo` and `make test`. Both need only Python 3.11 (or newer) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo smoke test lint bench prediction reproduce docs clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test]"
	touch $@

demo: $(STAMP)  ## run the main job end to end on the bundled tiny-deepseek
	$(BIN)/smoe demo

smoke: $(STAMP)  ## the five commands on both bundled models, as a CI job would run them
	$(BIN)/python tests/e2e/smoke.py

test: $(STAMP) lint  ## everything that must hold before a change lands
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## ratios measured side by side; slower, not part of `make test`
	$(BIN)/python -m pytest tests/bench -o addopts= -q -s

prediction: $(STAMP)  ## what each predictor is worth, on ../shared/data (or SMOE_DATA); about twelve minutes
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.bench.prediction

reproduce: $(STAMP)  ## the published claims, measured on ../shared/data (or SMOE_DATA); under an hour. CLAIMS="lar size" for some
	OMP_NUM_THREADS=1 $(BIN)/python tests/bench/reproduce.py $(CLAIMS)

docs: $(STAMP)  ## rewrite the generated reference pages
	$(BIN)/python -m smoe_cli.reference docs/reference/cli.md

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
