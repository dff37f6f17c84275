# make demo    train the example GPT inside a small memory budget, and compare it with plain PyTorch
# make check   lint, types, quick tests
# make test    lint, types, all tests
# make long    some of them with more values, budgets and machines
# make soak    ten thousand steps, a hundred models, ten minutes of faults: does anything differ or grow? (ARGS="--minutes 60")
# make big     three steps of 3 billion parameters in 11 GiB, their state on disk, under two budgets: the same bits?
# make fuzz    ten minutes of inputs that nobody wrote, for every reader of files (ARGS="--minutes 60")
# make fuzz-loops  random training loops, each compared with plain PyTorch, until Ctrl-C (ARGS="--minutes 60")
# make coverage  other people's models, plainly and compiled, into docs/coverage.md (ARGS="--only 'causal/*'"): hours
# make docs    the documentation as a site, in build/site; a link that leads nowhere fails it
# make gpu     on a GPU: its tests, fixtures and benchmark (ARGS="tests"), by GPU_PYTHON, whose torch sees it
# make clean   remove what was built, .venv included
#
# PYTHON=python3.12 picks the interpreter, VENV=dir the environment, JOBS=n the test processes,
# ARGS="--layers 8" the flags of the demo. TORCH=2.14.1 takes another torch, in an environment of its own.

SHELL       := bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
GPU_PYTHON ?= $(PYTHON)
TORCH  ?=
VENV   ?= .venv$(addprefix -torch-,$(TORCH))
JOBS   ?= 2
ARGS   ?= --compare

BIN   := $(abspath $(VENV))/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check -qq
READY := $(VENV)/.ready

# constraints.txt with another torch, and a Triton of the releases that go with it, which only CUDA builds name themselves.
TRITON_2.11 := 3.6.*
TRITON_2.12 := 3.7.*
TRITON_2.13 := 3.7.*
TRITON_2.14 := 3.8.*
PINS := $(if $(TORCH),-e 's/^torch==.*/torch==$(TORCH)/' -e 's/^triton==.*/triton==$(or $(TRITON_$(basename $(TORCH))),3.*)/')

# Test processes share the cores, so each computes on one thread. They read no plans of earlier runs, and keep the bytecode of the
# tests, whatever the environment says, which each process would compile anew, and what Inductor's C++ compiler makes.
KEPT   := PYTHONDONTWRITEBYTECODE= TORCHINDUCTOR_CACHE_DIR=$(abspath $(VENV))/inductor
PYTEST := $(KEPT) MT_CACHE=$$(mktemp -d) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
# mtcompile/passes and mtcompile/runtime are links to ../passes and ../runtime, so the checkout is the package.
TYPES  := $(BIN)/mypy --cache-dir $(abspath $(VENV))/mypy-cache -p mtcompile | sed -E 's,^mtcompile/(passes|runtime)/,\1/,'
BOUNDED := -o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true

.PHONY: demo check test long soak big fuzz fuzz-loops coverage docs gpu env lint types clean
.DEFAULT_GOAL := check

# Its matrices are small: a second thread mostly spins, and on a busy machine it slows every step down many times.
demo: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python examples/train_gpt.py $(ARGS)

# Types are checked beside the tests, whose processes have no work at first and at the end.
check: lint
	@$(TYPES) & $(PYTEST) -m "not slow and not long" && wait $$!

# Ranks are forked, and what has run in a process before can hang its forks: they have a run of their own. A test that
# hangs prints its stacks and fails. A CUDA build of torch has no second device, so nothing of tests/device to run (pytest's 5).
test: lint
	@$(TYPES) & $(PYTEST) -m "not long" --ignore tests/ranks $(BOUNDED) && wait $$!
	@$(PYTEST) -m "not long" tests/ranks $(BOUNDED)
	@$(PYTEST) -m "not long" tests/device $(BOUNDED) || test $$? -eq 5

long: $(READY)
	@$(PYTEST) -m long

soak: $(READY)
	@OMP_NUM_THREADS=1 MT_CACHE=$$(mktemp -d) $(BIN)/python -m benchmarks.soak $(filter-out --compare,$(ARGS))

big: $(READY)
	@MT_CACHE=$$(mktemp -d) $(BIN)/python -m benchmarks.big $(filter-out --compare,$(ARGS))

fuzz: $(READY)
	@$(PIP) install atheris
	@MT_CACHE=$$(mktemp -d) nice $(BIN)/python -m benchmarks.fuzz $(filter-out --compare,$(ARGS))

fuzz-loops: $(READY)
	@OMP_NUM_THREADS=1 MT_PROGRESS=0 MT_CACHE=$$(mktemp -d) nice $(BIN)/python -m benchmarks.loops $(filter-out --compare,$(ARGS))

# Goes on where an earlier run of the same sources stopped.
coverage: $(READY)
	@nice $(BIN)/python -m benchmarks.coverage --jobs $(JOBS) $(filter-out --compare,$(ARGS))

# mkdocs-material needs nothing of mtcompile, and `make test` nothing of it. Not -q: it hides the warnings that strict mode counts.
docs:
	@test -x .venv-docs/bin/mkdocs || { $(PYTHON) -m venv .venv-docs && .venv-docs/bin/python -m pip --disable-pip-version-check -qq install \
		"$$(sed -nE 's/^docs = \["(.*)"\].*/\1/p' pyproject.toml)"; }
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

gpu:
	@MT_CACHE=0 $(GPU_PYTHON) -m benchmarks.gpu $(filter-out --compare,$(ARGS))

env: $(READY)

# What hashes.txt has comes first. Then torch, from constraints.txt: without build isolation nothing else can fetch another one.
$(READY): pyproject.toml constraints.txt hashes.txt setup.py runtime/optim/update.c $(wildcard passes/planning/figures/c/*)
	@echo "setting up $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if $(BIN)/python -c "import sys; sys.exit(sys.version_info < (3, 11))"; then \
		$(PIP) install --require-hashes --no-deps --only-binary :all: -r hashes.txt; fi
	@sed -e '' $(PINS) constraints.txt > $(VENV)/constraints.txt
	@$(PIP) install -c $(VENV)/constraints.txt torch setuptools wheel
	@$(PIP) install -c $(VENV)/constraints.txt --no-build-isolation -e ".[dev]"
	@$(BIN)/python -m compileall -q mtcompile passes runtime  # else each command compiles them anew where Python writes no bytecode
	@touch $@

lint: $(READY)
	@$(BIN)/ruff check

types: $(READY)
	@$(TYPES)

# Only the default environments: VENV may be one that was there before.
clean:
	rm -rf timeline*.html .venv .venv-docs .venv-torch-* build dist runtime/optim/*.so *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
