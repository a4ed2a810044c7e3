# The README's commands. Each one first installs what it needs, once, into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/pip install --disable-pip-version-check -c constraints.txt
# Two workers, each with files of its own. Waiting threads sleep: workers that spin would keep each other from running.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -n 2 --dist loadfile
DEMO := $(VENV)/.demo
INSTALLED := $(VENV)/.installed

.PHONY: install demo test check bench clean

install: $(INSTALLED)

$(DEMO): pyproject.toml constraints.txt
	@echo "Installing neuclip and what the demo needs into $(VENV): 1.3 GB with a CPU build of torch, more with CUDA."
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[demo]'
	@touch $@

$(INSTALLED): $(DEMO)
	@echo "Installing what the tests need into $(VENV): 1.0 GB."
	$(PIP_INSTALL) -e '.[test]'
	@touch $@

demo: $(DEMO)
	$(BIN)/neuclip train

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m 'not slow'

bench: install
	$(BIN)/python -m benchmarks.objectives
	$(BIN)/python benchmarks/loader/against_open_clip.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
