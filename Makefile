# Two commands matter: `make demo` and `make test`. Both create .venv by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

SUDO   := $(if $(filter 0,$(shell id -u)),,sudo)

# In the order of tests/conftest.py; left alone, xdist keeps the files with few but long tests for last.
IN_TWO := --numprocesses 2 --dist loadscope --no-loadscope-reorder

.PHONY: demo league test test-slow test-faults test-hostile test-docs test-install test-arm test-flower-newest test-without-legacy lint types docs reference browser audit lock clean

# Minutes later: a report to open. What there is of an earlier demo is continued or shown again.
demo: $(VENV)/installed
	$(BIN)/cocofl run --resume --out runs/demo
	@echo "Open $(CURDIR)/runs/demo/report.html"

# Every strategy under one budget (docs/league.md): a quarter of an hour on two cores. It needs Fashion-MNIST.
league: $(VENV)/installed
	$(BIN)/python bench/league.py runs/league

test: lint types
	$(BIN)/pytest $(IN_TWO) -m "not slow and not faults"

# As if PyTorch had dropped its quantized tensors already, which it has announced.
test-without-legacy: $(VENV)/installed
	COCOFL_WITHOUT=legacy $(BIN)/pytest $(IN_TWO) -m "not slow and not faults"

test-slow: $(VENV)/installed
	$(BIN)/pytest $(IN_TWO) -m "not faults"

test-faults: $(VENV)/installed
	$(BIN)/pytest -m faults -s tests/test_flower_faults.py

# What attackers try: hostile files, devices and networks, within 15 minutes.
test-hostile: $(VENV)/installed
	$(BIN)/python bench/hostile.py

# Wheel, sdist and the install page's commands in a clean environment: `make test-install PYTHON=python3.13`.
test-install: $(VENV)/installed
	PYTHON=$(PYTHON) $(BIN)/pytest tests/test_package.py -m "slow or not slow"

# The documentation's longer commands, at reduced size.
test-docs: $(VENV)/installed
	$(BIN)/pytest tests/test_docs.py -m "slow or not slow"

# On emulated ARM cores; makes the emulator first, 5.5 GB in .arm/.
test-arm: $(VENV)/installed
	bash tools/arm/test.sh .arm

# The tests of deployments with the newest Flower that pip offers, on top of all else in .venv. Its
# dependencies stay as they are locked; `pip check` says where it wants others.
NEWEST := .venv-flower
test-flower-newest: $(VENV)/installed
	$(PYTHON) -m venv --clear $(NEWEST)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(NEWEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/locked.pth
	newest=$$($(NEWEST)/bin/pip index versions flwr 2>/dev/null | sed -n 's/^flwr (\(.*\))/\1/p'); \
	  $(NEWEST)/bin/pip install --quiet --no-deps "flwr==$$newest"
	-$(NEWEST)/bin/pip check
	$(NEWEST)/bin/pip install --quiet --no-deps --editable .
	$(NEWEST)/bin/python -m pytest -m "not faults" tests/test_flower_*.py

# Pages and API reference into site/; a warning is an error.
docs: $(VENV)/installed
	$(BIN)/mkdocs build --strict

# What the reference and the tests hold of the code: commands, keys, the public API.
reference: $(VENV)/installed
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/public_api.py

# What the tests of the report look with; they say so where it is missing.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  { $(SUDO) apt-get update && \
	    $(SUDO) apt-get install --yes --no-install-recommends chromium chromium-driver; }

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

# Python compiles what is imported, which is a tenth of what is installed.
$(VENV)/installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint requirements.lock --editable '.[dev]'
	touch $@

# Known holes in what the tests run with.
audit: $(VENV)/installed
	$(BIN)/python tools/audit.py requirements.lock

# The newest versions that go together, as the tests are to run with from now on.
lock:
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	{ echo "# Made by \`make lock\`: what the tests run with."; \
	  $(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//'; } > requirements.lock
	touch $(VENV)/installed

clean:
	rm -rf $(VENV) $(NEWEST) dist build site .mypy_cache .pytest_cache .ruff_cache .hypothesis
