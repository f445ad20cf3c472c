# Every target sets up what it needs; `make test` and `make demo` work in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-slow lint bench soak install clean

demo: $(INSTALLED)
	$(BIN)/rvrs demo

test: $(INSTALLED)
	$(BIN)/pytest -n auto --dist loadfile

test-slow: $(INSTALLED)
	$(BIN)/pytest -n auto -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(INSTALLED)
	$(BIN)/rvrs bench

soak: $(INSTALLED)
	$(BIN)/python -u -m rvrs.bench.soak

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
