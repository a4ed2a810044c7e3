# The README's commands. Each first installs what it needs into .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/pip install --disable-pip-version-check -c constraints.txt
# Two workers with one thread each. Each takes whole files, in the order of the tree: sorted by number of tests, the longest
# file would run last, alone. Waiting threads sleep instead of spinning.
PYTEST := OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
# mypy runs in parallel with the tests, because it uses one core only. Its output is shown last.
TYPES := types=$$(mktemp); $(BIN)/mypy > $$types 2>&1 & checking=$$!
AND_TYPES := tested=$$?; wait $$checking; checked=$$?; echo "mypy:"; cat $$types; rm $$types; exit $$((tested || checked))
DEMO := $(VENV)/.demo
INSTALLED := $(VENV)/.installed

.PHONY: install demo test check bench picture clean

install: $(INSTALLED)

$(DEMO): pyproject.toml constraints.txt
	@echo "Installing neuclip and the packages of the demo into $(VENV): 1.3 GB with a CPU build of torch, more with CUDA."
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[demo]'
	@touch $@

$(INSTALLED): $(DEMO)
	@echo "Installing the packages of the tests into $(VENV): 1.0 GB."
	$(PIP_INSTALL) -e '.[test]'
	@touch $@

demo: $(DEMO)
	$(BIN)/neuclip train

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(TYPES); $(PYTEST); $(AND_TYPES)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(TYPES); $(PYTEST) -m 'not slow'; $(AND_TYPES)

bench: install
	$(BIN)/python -m benchmarks

# Makes docs/report.png from a new run of the demo and docs/comparison.png from results/. Needs chromium.
picture: install
	$(BIN)/python scripts/picture.py docs/report.png
	$(BIN)/python scripts/picture.py docs/comparison.png comparison 'photos, batch 32'

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
