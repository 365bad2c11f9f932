# Two commands for a newcomer: `make demo` and `make test`. Both need only Python 3.11 (or newer) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

unexport PYTHONDONTWRITEBYTECODE  # the tests start a hundred interpreters

.PHONY: help demo smoke test thorough lint fuzz type matrix audit ranks ray shots bench prediction reproduce docs clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test]"
	touch $@

demo: $(STAMP)  ## run the main job end to end on the bundled tiny-deepseek
	$(BIN)/smoe demo

smoke: $(STAMP)  ## the five commands on both bundled models, as a CI job would run them
	$(BIN)/python tests/e2e/smoke.py

test: $(STAMP) lint type  ## everything that must hold before a change lands
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

thorough: $(STAMP)  ## what the gate has no time for: trained models' structure, the Slurm example, a killed early-gate run
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

lint: $(STAMP)  ## ruff, its rules and its form
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP)  ## mypy --strict on the three packages
	$(BIN)/mypy

matrix: $(STAMP)  ## wheel and sdist in clean environments, oldest and newest versions of everything; downloads about 6 GB once
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,release]"
	$(BIN)/python tests/packaging/matrix.py $(CELLS)

audit: $(STAMP)  ## known vulnerabilities of what constraints.txt pins (asks the registry), and docs/dependencies.md anew
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,ray,release]"
	$(BIN)/python tests/packaging/dependencies.py docs/dependencies.md
	$(BIN)/python -m pip_audit --strict --no-deps --disable-pip --requirement constraints.txt

ranks: $(STAMP)  ## the run time with four and eight ranks on the CPU; ref-deepseek-v2 of ../shared/data (or SMOE_DATA) generates
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/runtime/many_ranks.py -s --durations=0

ray: $(STAMP)  ## layers on two Ray nodes of this machine, nodes and processes killed on the way; about five minutes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,ray]"
	$(BIN)/python -m pytest tests/ray -o addopts= --import-mode=importlib -q

fuzz: $(STAMP)  ## 110,000 damaged files through every reader; about twenty minutes on one core. FUZZ="--seed 1 --only trace"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(FUZZ)

shots: $(STAMP)  ## the report in a real Chromium: all tests, load time, pictures in docs/images; of ref-deepseek-v2 (SMOE_DATA) or SMOE_FOLDER
	SMOE_SHOTS=1 $(BIN)/python -m pytest tests/browser
	PYTHONPATH=. $(BIN)/python -m tests.browser.shots

bench: $(STAMP)  ## ratios measured side by side; slower, not part of `make test`
	$(BIN)/python -m pytest tests/bench -o addopts= -q -s

prediction: $(STAMP)  ## what each predictor is worth, on ../shared/data (or SMOE_DATA); about six minutes
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.bench.prediction

reproduce: $(STAMP)  ## the published claims, measured on ../shared/data (or SMOE_DATA); about fifteen minutes. CLAIMS="lar size" for some
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.bench.claims $(CLAIMS)

docs: $(STAMP)  ## rewrite the generated reference page, then build the site into docs/_build/html; a warning is an error
	$(BIN)/python -m smoe_cli.reference docs/reference/cli.md
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

clean:  ## remove what make made here
	rm -rf $(VENV) docs/_build .pytest_cache .mypy_cache .ruff_cache
