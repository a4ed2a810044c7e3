# The README's commands. Each one installs first, once, into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test check bench clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,test]'
	@touch $@

demo: install
	$(BIN)/neuclip train

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -m 'not slow'

bench: install
	$(BIN)/python benchmarks/inner_loop.py
	$(BIN)/python benchmarks/loader/against_open_clip.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
