# Every target sets up what it needs: PYTHON >= 3.10 and make are enough to start from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check lint format bench fuzz clean
.DEFAULT_GOAL := check

demo: $(STAMP)
	$(BIN)/python examples/torch/llama3/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest tests

# What CI and pre-commit run.
check: lint test

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# The property tests again, with many more examples and new ones each time; those of one file with
# TESTS=path. A failure prints the command that tries its example again.
TESTS ?= tests
fuzz: $(STAMP)
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest $(TESTS) -m hypothesis

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# The stamp is touched last, so an interrupted installation starts over.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	    "Expected Python 3.10 or newer, got " + sys.version.split()[0] + \
	    " ($(PYTHON)). Name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[test]'
	@touch $@
