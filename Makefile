# The two commands that do everything on a machine with Python 3.10+, Rust and a C compiler: `make serve` and
# `make test`. Each names its steps, repeats only what changed, and may follow any other. `make help` lists all.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX_URL ?=
EXTRAS ?=
MODEL ?= default
ARGS ?=
TEST_PROCESSES ?= 2

.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

comma := ,
BIN := $(abspath $(VENV))/bin
STAMPS := $(VENV)/.stamps
DEV_EXTRAS := $(if $(EXTRAS),$(EXTRAS)$(comma))dev
EXTENSION := python/strata/_core.abi3.so
# cargo test has no limit of its own; pytest's is in pyproject.toml.
RUST_TEST_SECONDS := 1500
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust cuda -type f \( -name '*.rs' -o -name '*.toml' -o -name '*.h' \) 2>/dev/null)
LOOM_TARGET := $(or $(CARGO_TARGET_DIR),target)/loom

# A wheel runs where torch's does. It names no folder of this machine and holds nothing for debuggers.
WHEEL_PLATFORM := manylinux_2_28
CARGO_SOURCES = $(wildcard $(or $(CARGO_HOME),$(HOME)/.cargo)/registry/src/*)
WHEEL_ENVIRONMENT = CARGO_ZIGBUILD_PYTHON_PATH=$(BIN)/python CARGO_PROFILE_RELEASE_DEBUG=0 \
	RUSTFLAGS="$(RUSTFLAGS) $(CARGO_SOURCES:%=--remap-path-prefix=%=)"

# What was asked for only while the environment is made must not be passed over in silence afterwards.
ifeq ($(MAKELEVEL),0)
ifneq ($(wildcard $(STAMPS)/environment),)
$(foreach name,PYTHON TORCH_INDEX_URL,$(if $(filter command,$(firstword $(origin $(name)))),\
	$(info note: $(name) counts when $(VENV) is made, and it is there: `make distclean` removes it)))
endif
endif

# Idle OpenMP threads sleep instead of spinning, so that copies and the server get the cores; `strata` sets the
# same for itself. PYO3_PYTHON is the one interpreter for maturin and for plain cargo.
export OMP_WAIT_POLICY := PASSIVE
export PYO3_PYTHON := $(BIN)/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1

step = @printf '\n[%s] %s\n' '$(1)' '$(2)'

## serve: set up, build, and serve the default model on http://127.0.0.1:8000 (flags: ARGS="--port 8001")
.PHONY: serve
serve:
	$(call step,1/5,Python environment in $(VENV))
	@$(MAKE) -s $(STAMPS)/environment
	$(call step,2/5,Dependencies)
	@$(MAKE) -s $(STAMPS)/dependencies-$(EXTRAS)
	$(call step,3/5,Extension strata._core$(comma) release build)
	@$(MAKE) -s $(STAMPS)/extension
	$(call step,4/5,Model: $(MODEL))
	@$(BIN)/python -m strata.cli.fetch_model --model '$(MODEL)'
	$(call step,5/5,Server)
	@exec $(BIN)/python -m strata.serve --model '$(MODEL)' $(ARGS)

## test: set up, build, and run the whole suite (one Python test: ARGS="-k name")
.PHONY: test
test:
	$(call step,1/6,Python environment in $(VENV))
	@$(MAKE) -s $(STAMPS)/environment
	$(call step,2/6,Dependencies with test tools)
	@$(MAKE) -s $(STAMPS)/dependencies-$(DEV_EXTRAS)
	@$(MAKE) -s $(STAMPS)/nvrtc || test -z "$$CI"
	@$(BIN)/python tools/chromium.py
	$(call step,3/6,Extension strata._core$(comma) release build)
	@$(MAKE) -s $(STAMPS)/extension
	$(call step,4/6,Rust tests)
	@timeout --foreground $(RUST_TEST_SECONDS) cargo test --workspace || { code=$$?; test $$code -ne 124 \
		|| echo 'error: the Rust tests did not end within $(RUST_TEST_SECONDS) s; the last one named hangs' >&2; exit $$code; }
	$(call step,5/6,Rust concurrency models (loom))
	@$(MAKE) loom
	$(call step,6/6,Python tests)
	@$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile $(ARGS)

## lint: formats, warnings, types, layers and stubs of the whole tree
.PHONY: lint
lint: setup
	$(call step,1/8,cargo fmt)
	@cargo fmt --all --check
	$(call step,2/8,cargo clippy)
	@cargo clippy --workspace --all-targets --quiet -- -D warnings -D clippy::undocumented_unsafe_blocks
	$(call step,3/8,ruff check)
	@$(BIN)/ruff check .
	$(call step,4/8,ruff format)
	@$(BIN)/ruff format --check .
	$(call step,5/8,mypy)
	@$(BIN)/mypy
	$(call step,6/8,import layers)
	@$(BIN)/lint-imports --no-logo
	$(call step,7/8,stub of strata._core)
	@$(BIN)/python -m mypy.stubtest strata._core --mypy-config-file pyproject.toml
	$(call step,8/8,all clean)

## docs: build the guides and the API reference as a site, site/index.html
.PHONY: docs
docs: setup
	@$(MAKE) -s $(STAMPS)/dependencies-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

## cubins: build the GPU kernels for sm_80, sm_90 and sm_100; needs no GPU
.PHONY: cubins
cubins: setup
	@$(MAKE) -s $(STAMPS)/nvrtc
	@$(BIN)/python tools/build_cubins.py

## wheel: build a wheel and a source distribution into dist/, install the wheel into a bare environment, and serve from it
.PHONY: wheel
wheel: setup
	$(call step,1/4,Zig$(comma) which links for older Linuxes$(comma) and auditors)
	@$(MAKE) -s $(STAMPS)/dependencies-wheel
	$(call step,2/4,GPU kernels)
	@$(MAKE) -s $(STAMPS)/nvrtc
	@$(BIN)/python tools/build_cubins.py
	$(call step,3/4,Wheel and source distribution in dist/)
	@rm -f dist/strata_kv-*
	@$(BIN)/maturin sdist --out dist
	@$(WHEEL_ENVIRONMENT) $(BIN)/maturin build --release --zig --compatibility $(WHEEL_PLATFORM) --out dist
	$(call step,4/4,Bare environment)
	@$(BIN)/python -m pytest -m wheel tests/wheel

## format: rewrite Rust and Python sources in the project's format
.PHONY: format
format: setup
	@cargo fmt --all
	@$(BIN)/ruff check --fix --quiet . && $(BIN)/ruff format .

## bench: run the benchmarks of benches/ and keep the result under .benchmarks/
.PHONY: bench
bench: setup
	@$(MAKE) run-benchmarks BENCHMARK_FLAGS=--benchmark-autosave

## bench-compare: run the benchmarks again and compare with the last kept result
.PHONY: bench-compare
bench-compare: setup
	@test -n "$$(find .benchmarks -name '*.json' 2>/dev/null)" \
		|| { echo 'error: .benchmarks/ holds no result to compare with; run `make bench` first' >&2; exit 1; }
	@$(MAKE) run-benchmarks BENCHMARK_FLAGS=--benchmark-compare

.PHONY: run-benchmarks
run-benchmarks:
	@test -n "$(wildcard benches/test_*.py)" \
		|| { echo 'error: benches/ holds no test_*.py, so there is nothing to measure' >&2; exit 1; }
	@$(BIN)/python -m pytest benches --benchmark-only --benchmark-storage=.benchmarks --timeout=1800 $(BENCHMARK_FLAGS) $(ARGS)

## soak: the long versions of the tests, Rust and Python
.PHONY: soak
soak: setup
	$(call step,1/2,Rust soak tests)
	@STRATA_SOAK=1 STRATA_SOAK_CASES=20000 PROPTEST_CASES=10000 cargo test --workspace --release --quiet
	$(call step,2/2,Python soak tests)
	@STRATA_SOAK=1 $(BIN)/python -m pytest -m soak --timeout=7200 $(ARGS)

## loom: every interleaving of the load ticket's threads
.PHONY: loom
loom:
	@RUSTFLAGS="$(RUSTFLAGS) --cfg loom" CARGO_PROFILE_DEV_DEBUG=0 cargo test -p strata-types --lib --quiet --target-dir $(LOOM_TARGET) loom

## setup: environment, dependencies with the development tools, and the extension; no more
.PHONY: setup
setup:
	@$(MAKE) -s $(STAMPS)/environment
	@$(MAKE) -s $(STAMPS)/dependencies-$(DEV_EXTRAS)
	@$(MAKE) -s $(STAMPS)/extension

$(STAMPS)/environment: tools/environment.py
	@command -v $(PYTHON) >/dev/null || { \
		echo 'error: there is no $(PYTHON); install Python 3.10 or newer, or name one with PYTHON=...' >&2; exit 1; }
	@$(PYTHON) tools/environment.py $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dependencies-%: $(STAMPS)/environment pyproject.toml tools/dependencies.py
	@$(BIN)/python tools/dependencies.py --extras "$*" --torch-index-url "$(TORCH_INDEX_URL)"
	@touch $@

$(STAMPS)/dependencies-: $(STAMPS)/environment pyproject.toml tools/dependencies.py
	@$(BIN)/python tools/dependencies.py --torch-index-url "$(TORCH_INDEX_URL)"
	@touch $@

$(STAMPS)/nvrtc: $(STAMPS)/environment tools/nvrtc.py
	@$(BIN)/python tools/nvrtc.py
	@touch $@

# Also rebuilt where the module itself was deleted; cargo decides what there is to do.
$(STAMPS)/extension: $(RUST_SOURCES) pyproject.toml $(if $(wildcard $(EXTENSION)),,missing-extension)
	@VIRTUAL_ENV=$(abspath $(VENV)) PIP_QUIET=1 $(BIN)/maturin develop --release
	@touch $@

.PHONY: missing-extension
missing-extension:

## clean: remove what was built; the environment and the benchmarks' results stay
.PHONY: clean
clean:
	@cargo clean --quiet
	@rm -rf $(EXTENSION) $(STAMPS)/extension python/strata/device/cubins dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find python tests benches tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

## distclean: clean, and remove the environment too
.PHONY: distclean
distclean: clean
	@rm -rf $(VENV)

## help: this list
.PHONY: help
help:
	@sed -n 's/^## \([a-z-]*\): /\1\t/p' $(firstword $(MAKEFILE_LIST)) | awk -F'\t' '{ printf "  make %-14s %s\n", $$1, $$2 }'
	@echo
	@echo '  PYTHON=python3        the interpreter to start from; a torch that it has is reused'
	@echo '  TORCH_INDEX_URL=URL   the package index of torch; the selector on pytorch.org shows that of the CPU build'
	@echo '  EXTRAS=cuda           extras of pyproject.toml to install too'
	@echo '  MODEL=default         what `make serve` loads: `default`, a Hugging Face folder, a hub name or a .gguf file'
	@echo '  TEST_PROCESSES=2      Python tests side by side, by files; 0: in one process'
	@echo '  VENV=.venv            the virtual environment to make or to use'
