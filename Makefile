# Two commands matter: `make demo` and `make test`. Both create .venv by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test test-slow test-faults lint types clean

demo: $(VENV)/installed
	$(BIN)/python examples/one_device.py

test: lint types
	$(BIN)/pytest --numprocesses 2 --dist loadscope -m "not slow and not faults"

test-slow: $(VENV)/installed
	$(BIN)/pytest --numprocesses 2 --dist loadscope -m "not faults"

test-faults: $(VENV)/installed
	$(BIN)/pytest -m faults -s tests/test_flower_faults.py

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis
