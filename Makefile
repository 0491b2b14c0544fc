# SPDX-License-Identifier: Apache-2.0
#
# The front door: `make help` lists what can be done. Every target first lets scripts/setup.sh put
# in what is missing on this machine, which takes a moment when nothing is. The targets only name
# the commands; presets (CMakePresets.json), pyproject.toml and scripts/ hold the settings.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# The tools below use all cores themselves.
.NOTPARALLEL:

# Options, to be set on the command line. They are listed by `make help`.
PYTHON ?=
PREFIX ?= /usr/local
CTEST_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=
LINT_STEPS ?=
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= zip_directory pickle safetensors contents

VENV_PYTHON := $(CURDIR)/.venv/bin/python

# The first CMake that runs and knows our presets: one from pip may shadow Debian's, or be broken.
# Looked up when used, for it may be installed by `setup`.
CMAKE = $(or $(shell for cmake in cmake /usr/bin/cmake; do \
    "$$cmake" --version 2>/dev/null | awk 'NR == 1 { split($$3, v, "."); \
        ok = v[1] > 3 || (v[1] == 3 && v[2] >= 25) } END { exit !ok }' \
    && echo "$$cmake" && break; done),cmake)
CTEST = $(patsubst %cmake,%ctest,$(CMAKE))

.PHONY: help
help:  ## List the targets (this text)
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'Options: PYTHON=interpreter (3.10 or newer)   PREFIX=folder for install ($(PREFIX))'
	@echo "         CTEST_ARGS='-R engine'   PYTEST_ARGS='-k alias -x'   BENCH_ARGS='--quick --json out.json'"
	@echo "         DEMO_ARGS=...            LINT_STEPS='ruff mypy'      CMAKE=cmake to use"
	@echo "         FUZZ_SECONDS=60          FUZZ_TARGETS='$(FUZZ_TARGETS)'"

# --- Set-up and build ---

.PHONY: setup
setup:  ## Install what is missing: Debian packages, .venv with the Python packages
	@PYTHON='$(PYTHON)' scripts/setup.sh
	@$(if $(filter setup,$(MAKECMDGOALS)),echo 'Ready: $(VENV_PYTHON)',:)

# Empty recipe: whether it is newer than a build folder decides about configuring again.
.venv/.installed-dev: setup ;

# Each preset builds into build/PRESET. Presets without the extension ignore the interpreter.
build/%/build.ninja: CMakePresets.json .venv/.installed-dev
	$(CMAKE) --preset $* --no-warn-unused-cli -DPython_EXECUTABLE=$(VENV_PYTHON)
	@touch $@

.PHONY: build
build: setup build/release/build.ninja  ## Build library, C++ tests and Python extension (build/release)
	$(CMAKE) --build --preset release
	@ln -sfn build/release/compile_commands.json compile_commands.json

.PHONY: install
install: build  ## Install the C++ library and its headers to PREFIX
	$(CMAKE) --install build/release --prefix '$(PREFIX)'

.PHONY: clean
clean:  ## Remove everything built; .venv stays
	rm -rf build compile_commands.json python/fastpersist/_core*.so

# --- Tests ---

.PHONY: test test-cpp test-python
test: test-cpp test-python  ## Run all tests: CTest, then pytest

# What setup and build wrote goes to the disk first: the first test that syncs a file would wait for
# all of it, and take the blame.
test-cpp: build  ## Run the C++ tests only
	@sync
	$(CTEST) --preset release --output-on-failure $(CTEST_ARGS)

test-python: build  ## Run the Python tests only
	$(VENV_PYTHON) -m pytest tests/python $(PYTEST_ARGS)

.PHONY: interop
interop: build  ## Compare files with those of other PyTorch versions
	scripts/interop.sh

.PHONY: asan tsan ubsan
asan:  ## Run the C++ tests under AddressSanitizer
tsan:  ## Run the C++ tests under ThreadSanitizer
ubsan:  ## Run the C++ tests under UndefinedBehaviorSanitizer
asan tsan ubsan: %: setup build/%/build.ninja
	$(CMAKE) --build --preset $*
	$(CTEST) --preset $* --output-on-failure $(CTEST_ARGS)

.PHONY: fuzz fuzz-canary
fuzz: setup build/fuzz/build.ninja  ## Fuzz the readers, FUZZ_SECONDS in all (build/fuzz/findings)
	$(CMAKE) --build --preset fuzz
	fuzz/run.sh '$(FUZZ_SECONDS)' $(FUZZ_TARGETS)

fuzz-canary: setup build/fuzz/build.ninja  ## Show that the fuzzer finds a planted fault in a minute
	$(CMAKE) --build --preset fuzz
	fuzz/run.sh --canary '$(FUZZ_SECONDS)'

# --- Show and measure ---

.PHONY: demo
demo: build  ## Train a small GPT, kill it, resume it; compare what each checkpoint costs
	$(VENV_PYTHON) examples/demo/demo.py $(DEMO_ARGS)

.PHONY: bench bench-ram bench-load bench-load-ram bench-overlap bench-overlap-ram bench-packages
bench: build bench-packages  ## Compare saving with other writers and with the limit of this disk
	$(VENV_PYTHON) -m bench.save $(BENCH_ARGS)

bench-ram: build bench-packages  ## The same on a loop device over RAM (root; made and removed)
	$(VENV_PYTHON) -m bench.save --ram $(BENCH_ARGS)

bench-load: build bench-packages  ## Compare loading with other loaders and with the limit of this disk
	$(VENV_PYTHON) -m bench.load $(BENCH_ARGS)

bench-load-ram: build bench-packages  ## The same on a loop device over RAM (root; made and removed)
	$(VENV_PYTHON) -m bench.load --ram $(BENCH_ARGS)

bench-overlap: build  ## Measure what a checkpoint after every training step costs on this disk
	$(VENV_PYTHON) -m bench.overlap $(BENCH_ARGS)

bench-overlap-ram: build  ## The same on a loop device over RAM (root; made and removed)
	$(VENV_PYTHON) -m bench.overlap --ram $(BENCH_ARGS)

bench-packages:
	@PYTHON='$(PYTHON)' scripts/setup.sh bench

# --- Check and document ---

.PHONY: lint
lint: setup build/lint/build.ninja  ## Check format, clang-tidy, ruff, mypy, shellcheck and style rules
	scripts/lint.sh $(LINT_STEPS)

.PHONY: format
format: setup  ## Format C++ and Python in place
	scripts/lint.sh --fix

.PHONY: coverage
coverage: setup build/coverage/build.ninja  ## Measure the C++ tests' coverage (build/coverage/index.html)
	$(CMAKE) --build --preset coverage
	CTEST='$(CTEST)' scripts/coverage.sh

# Doxygen takes its settings from here; everything else is its default.
define DOXYFILE
PROJECT_NAME         = FastPersist
INPUT                = include
RECURSIVE            = YES
OUTPUT_DIRECTORY     = build/docs
STRIP_FROM_INC_PATH  = include
MACRO_EXPANSION      = YES
EXPAND_ONLY_PREDEF   = YES
PREDEFINED           = FASTPERSIST_EXPORT=
GENERATE_LATEX       = NO
EXTRACT_ALL          = NO
JAVADOC_AUTOBRIEF    = YES
QUIET                = YES
WARN_AS_ERROR        = FAIL_ON_WARNINGS
endef
export DOXYFILE

.PHONY: docs
docs: setup  ## Make the C++ reference (build/docs) and check the links in the documents
	$(VENV_PYTHON) scripts/check_links.py
	@mkdir -p build/docs
	@if command -v doxygen >/dev/null; then \
	    printf '%s\n' "$$DOXYFILE" | doxygen - && echo 'C++ reference: build/docs/html/index.html'; \
	else echo 'docs: no doxygen here, so no C++ reference'; fi
