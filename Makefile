# Every target sets up what it needs; `make test` and `make demo` work in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SITE := docs/_build/html
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-slow lint docs docs-pages bench soak release install clean

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

# The whole site, tutorials and figures computed: some minutes.
docs: $(INSTALLED)
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --keep-going --quiet docs $(SITE)
	$(BIN)/python docs/check_links.py $(SITE)

# The same without running the code of its pages.
docs-pages: $(INSTALLED)
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --keep-going --quiet -D plot_gallery=0 docs $(SITE)-pages
	$(BIN)/python docs/check_links.py $(SITE)-pages

# Wheel and source distribution, each tried in an environment of its own.
release: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m tests.release.smoke dist/*

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
