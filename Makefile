# `make demo` and `make test` need Python 3.11 or newer and make; each does its own set-up in .venv.

PYTHON ?= python3
UV ?= uv
PYTEST_ARGS ?=
MUTANTS_ARGS ?= --sample 20
MATRIX_ARGS ?=
MACHINES ?= $(shell uname -m)
SECONDS ?= inf
SEED ?= 0
ATTACK_ARGS ?=
N ?= 200

# Images of containers often set it. Then every worker and every command of the tests compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

# Each core has a test of its own. The threads of OpenBLAS would wait beside it, which takes a quarter of the time.
test test-all coverage: export OPENBLAS_NUM_THREADS = 1

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet
INSTALL := $(PIP) install --require-hashes --no-deps --only-binary :all:
COMPILE := $(UV) --quiet pip compile --universal --python-version 3.11 --fork-strategy fewest --only-binary :all: \
	--generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"

# Three stamps: the environment with the run-time lock, the development tools on top, the package itself.
RUN := $(VENV)/.run
DEV := $(VENV)/.dev
PACKAGE := $(VENV)/.package
SITE := $(VENV)/.site
CHROMIUM := $(VENV)/.chromium
NATIVE := $(VENV)/.native

# An environment that no longer starts, or belongs to another checkout (a copied folder), is made again.
MINE := import os; from importlib.util import find_spec; os.path.samefile(find_spec("requant").origin, "__init__.py") or 1/0
ifneq ($(wildcard $(PACKAGE)),)
ifneq ($(shell $(BIN)/python -c '$(MINE)' >/dev/null 2>&1 && echo mine),mine)
$(RUN): again
endif
endif

.NOTPARALLEL:
.PHONY: again attack chromium clean coverage demo docs format help kills lint lock mutants native reference release sanitize \
	screenshots sdist test test-all test-matrix wheel

help:  ## list the targets (this)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

demo: $(RUN) $(PACKAGE) $(NATIVE)  ## quantize the digits network to build/demo/digits_int8.onnx and compare it with the float one
	@mkdir -p build/demo
	$(BIN)/requant quantize sample_models/digits.onnx --data sample_models/digits.npz:calib \
		-o build/demo/digits_int8.onnx --force
	$(BIN)/requant compare sample_models/digits.onnx build/demo/digits_int8.onnx \
		--data sample_models/digits.npz --batch 128

test: $(DEV) $(PACKAGE) $(CHROMIUM) $(NATIVE)  ## run the tests, without the slow ones
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(PYTEST_ARGS)

coverage: $(DEV) $(PACKAGE) $(CHROMIUM) $(NATIVE)  ## print the share of lines and branches that the tests run; fails below 95 % and 90 %
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -n auto --dist worksteal -m "not slow" $(PYTEST_ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m benchmarks.covered

mutants: $(DEV) $(PACKAGE)  ## change the arithmetic in many places, and count which changes the tests notice (hours; MUTANTS_ARGS)
	$(BIN)/python -m benchmarks.mutants --survivors $(MUTANTS_ARGS)

test-matrix: $(DEV) $(PACKAGE) $(NATIVE)  ## run INT8 models in every supported ONNX Runtime, and a part of the tests with the oldest and newest dependencies (needs uv; 1 h)
	UV=$(UV) $(BIN)/python -m benchmarks.versions $(MATRIX_ARGS)

test-all: $(DEV) $(PACKAGE) $(CHROMIUM) $(NATIVE)  ## run every test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

attack: $(DEV) $(PACKAGE)  ## run commands on broken and hostile input, without end (SECONDS=600 SEED=1 ATTACK_ARGS)
	nice $(BIN)/python -m tests.attack --seconds $(SECONDS) --seed $(SEED) $(ATTACK_ARGS)

kills: $(DEV) $(PACKAGE)  ## kill N runs at random moments, and run them again (N=200 SEED=1)
	nice $(BIN)/python -m tests.attack.kills --count $(N) --seed $(SEED)

native: $(DEV) $(PACKAGE)  ## build the native operators for this machine
	@rm -f $(NATIVE)
	@$(MAKE) --no-print-directory $(NATIVE)

sanitize: $(DEV) $(PACKAGE)  ## compare the native kernels with their definition, and stop at undefined behaviour
	$(BIN)/python -m requant.quantize.kernels.build --check 500 --sanitize

docs: $(RUN) $(SITE)  ## build the documentation site into build/site; fails at a broken link
	@$(BIN)/python -m website.pages
	@rm -rf build/site
	$(VENV)/site/bin/zensical build --clean --strict

reference: $(RUN) $(PACKAGE)  ## write the pages of docs/ again that are made of the program: commands, options, Python, transforms
	$(BIN)/python -m website.reference
	$(BIN)/python -m website.figures

lint: $(DEV) $(PACKAGE)  ## ruff, formatting, mypy strict
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

chromium:  ## install Chromium for the browser tests, if there is none
	@rm -f $(CHROMIUM)
	@$(MAKE) --no-print-directory $(CHROMIUM)

screenshots: $(DEV) $(PACKAGE) $(CHROMIUM) docs  ## take the pictures of docs/images again
	$(BIN)/python -m benchmarks.screenshots

format: $(DEV)  ## format the source and fix what ruff can fix
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

lock:  ## write requirements/*.txt again (needs uv; LOCK_ARGS=--upgrade for the newest versions)
	@command -v $(UV) >/dev/null || { echo "make lock needs uv: put it on the PATH or set UV=" >&2; exit 2; }
	$(COMPILE) $(LOCK_ARGS) pyproject.toml --group build -o requirements/run.txt
	$(COMPILE) $(LOCK_ARGS) pyproject.toml --group build --group dev -c requirements/run.txt -o requirements/dev.txt
	$(COMPILE) $(LOCK_ARGS) --group docs -o requirements/docs.txt
	$(COMPILE) $(LOCK_ARGS) --group release -c requirements/dev.txt -o requirements/release.txt

# Each wheel has the native operators of one machine; without a compiler there is one wheel for any machine, without them.
wheel: $(DEV) $(PACKAGE)  ## build dist/requant-*.whl for this machine (MACHINES="x86_64 aarch64"), with the locked build backend
	@rm -rf dist
	@set -e; for machine in $(MACHINES); do \
		rm -rf build/tree; mkdir -p build/tree; \
		tar -c --exclude=./.[a-z]* --exclude=./build --exclude=./dist --exclude=./quantize/kernels/lib . | tar -x -C build/tree; \
		platform=manylinux_2_17_$$machine; \
		$(BIN)/python -m requant.quantize.kernels.build $$machine \
			--output build/tree/quantize/kernels/lib/$$machine/librequant_kernels.so || platform=any; \
		$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist \
			--config-settings=--build-option=--plat-name=$$platform ./build/tree; \
	done; rm -rf build/tree; ls dist

sdist: $(DEV) $(PACKAGE)  ## build dist/requant-*.tar.gz, with the locked build backend
	@rm -rf build/tree; mkdir -p build/tree dist
	@tar -c --exclude=./.venv --exclude=./.git --exclude=./build --exclude=./dist --exclude=./quantize/kernels/lib . | tar -x -C build/tree
	@cd build/tree && ../../$(BIN)/python -c 'from setuptools.build_meta import build_sdist; build_sdist("../../dist")' \
		>../sdist.log 2>&1 || { cat ../sdist.log >&2; exit 1; }
	@rm -rf build/tree; ls dist

release:  ## wheels and source distribution, checked in clean environments; uploads nothing (MACHINES)
	@.ci/release

clean:  ## remove everything that was made, the environment too
	rm -rf $(VENV) build dist quantize/kernels/lib *.egg-info .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN): requirements/run.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "requant needs Python 3.11 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1)." \
			"Choose another with 'make PYTHON=python3.12 ...'" >&2; exit 2; }
	@echo "setting up $(VENV)" >&2
	@$(PYTHON) -m venv --clear $(VENV)
	@$(INSTALL) -r $<
	@touch $@

# The first stamp is put aside meanwhile: a set-up that was cut short starts over.
$(DEV): requirements/dev.txt $(RUN)
	@echo "adding the development tools to $(VENV)" >&2
	@mv $(RUN) $(RUN).aside
	@$(INSTALL) -r $<
	@mv $(RUN).aside $(RUN)
	@touch $@

# The site generator has an environment of its own: nothing of it is needed to use or to test the package.
$(SITE): requirements/docs.txt $(RUN)
	@echo "setting up $(VENV)/site for the documentation" >&2
	@rm -f $@
	@$(BIN)/python -m venv --clear $(VENV)/site
	@$(VENV)/site/bin/python -m pip --disable-pip-version-check --no-input --quiet install \
		--require-hashes --no-deps --only-binary :all: -r $<
	@touch $@

# The browser of the tests of reports. Where it cannot be had these tests are skipped, but not where CI is set: they fail.
BROWSERS := chromium chromium-browser google-chrome
AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo -n) env DEBIAN_FRONTEND=noninteractive
$(CHROMIUM): $(RUN)
	@for name in $(BROWSERS); do command -v $$name >/dev/null && exit 0; done; \
	echo "installing Chromium for the browser tests" >&2; \
	{ command -v apt-get && $(AS_ROOT) apt-get update -qq && \
		$(AS_ROOT) apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 || \
	echo "Chromium cannot be installed here (apt-get, as root or by sudo -n): the browser tests want one on the PATH," \
		"and are skipped without it" >&2
	@touch $@

# The native operators. Where they cannot be built their tests are skipped, and requant uses the runtime's operators.
$(NATIVE): $(DEV) $(PACKAGE) quantize/kernels/build.py $(wildcard quantize/kernels/native/*)
	@echo "building the native operators (once, about two minutes)" >&2
	@$(BIN)/python -m requant.quantize.kernels.build || \
		echo "the native operators cannot be built here: requant uses those of ONNX Runtime" >&2
	@touch $@

$(PACKAGE): pyproject.toml $(RUN)
	@$(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@
