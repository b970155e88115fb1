# Two commands make the book: `make book` and `make test`. `make help` lists the others.
#
# PYTHON       the interpreter to build .venv with; found by itself where it is 3.11 or newer
# PIP_ARGS     extra arguments for pip, e.g. "--extra-index-url <CPU wheel index listed on pytorch.org>"
# CONSTRAINTS  the file of pinned versions; empty installs the newest that pyproject.toml allows
# JOBS         chapters, and tests, that run side by side

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
CANDIDATES := python3 python3.13 python3.12 python3.11 python
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	$$p -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)
PIP_ARGS ?=
CONSTRAINTS ?= constraints.txt
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
BENCH_READY := $(VENV)/.bench-installed
MHABOOK := $(BIN)/mhabook

.PHONY: help setup book pages pdf test lint bench clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make book       run the chapters, check them, build the pages"
	@echo "make test       every test: library, pipeline, notebooks, pages"
	@echo "make pdf        the whole book as one PDF (needs Chromium)"
	@echo "make bench      measure ours against the naive way, for the speed page"
	@echo "make setup      only create $(VENV) and install"
	@echo "make clean      remove what was made (_build); make distclean: and $(VENV)"

setup: $(READY)

$(READY): pyproject.toml $(wildcard constraints.txt)
	@$(if $(PYTHON),,echo "The book needs Python 3.11 or newer, and found none: \
	install it, or name it as in: make book PYTHON=/path/to/python3.12" >&2; exit 1)
	@$(PYTHON) -c '$(NEW_ENOUGH)' || { \
	echo "$(PYTHON) is too old: the book needs Python 3.11 or newer" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	echo "$(PYTHON) cannot make virtual environments: install its venv module" \
	"(python3-venv on Debian and Ubuntu)" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	$(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[book,test]'
	@touch $@

$(BENCH_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	$(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[bench]'
	@touch $@

pages: $(READY)
	@$(MHABOOK) run --jobs $(JOBS)
	@$(MHABOOK) check --jobs $(JOBS)
	@$(MHABOOK) build

book: pages

pdf: pages
	@$(MHABOOK) pdf

lint: $(READY)
	@$(BIN)/ruff check .

test: $(READY) lint pages
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

bench: $(BENCH_READY)
	@$(BIN)/python -m benchmarks

clean:
	rm -rf _build mhabook_output .pytest_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf $(VENV) mhabook.egg-info
