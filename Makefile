# Two commands set everything up: `make demo` runs the main job on recorded measurements, `make test` passes the tests.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --retries 10 --timeout 60
JOBS ?= 3
PYTEST := $(BIN)/python -m pytest -q --reruns 1 -r fERsx

.PHONY: demo test test-parallel test-light test-untimed test-serial test-ui test-submitit test-layouts test-families test-frameworks test-vllm test-sglang test-open-loop test-soak test-gpu gpu-bundle check lint types format docs screenshots bench fuzz-native clean

demo: $(VENV)/.installed  ## set up, then search wl2 on its recording (nothing is submitted anywhere)
	$(BIN)/ccl-search run --workload wl2 --budget 15 --launcher replay

test: test-parallel test-serial  ## set up what tests need, then run them all

# Without bytecode each worker and each started command compiles every module again.
test-parallel test-light test-untimed test-serial: export PYTHONDONTWRITEBYTECODE :=
# Threads of OpenBLAS wait for each other where workers share the cores: small matrices took minutes on a busy machine.
test-parallel test-light test-untimed: export OPENBLAS_NUM_THREADS := 1

test-parallel: $(VENV)/.installed-dev  ## light and untimed tests together: the untimed ones mostly wait for servers, and begin
	$(PYTEST) -n $(JOBS) --no-loadscope-reorder --durations=25 tests/untimed tests/light

test-light: $(VENV)/.installed-dev
	$(PYTEST) -n $(JOBS) tests/light

test-untimed: $(VENV)/.installed-dev  ## Slurm clusters, sshd, LLM servers, killed searches, losses: one file a worker
	$(PYTEST) -n $(JOBS) --no-loadscope-reorder --durations=15 tests/untimed

test-serial: $(VENV)/.installed-dev  ## what is timed runs alone
	$(PYTEST) -n 0 --durations=15 tests/serial

SUBMITIT := $(shell sed -n 's/.*"\(submitit>=\([0-9.]*\),[^"]*\)".*/\1 submitit==\2/p' pyproject.toml)

define SUBMITIT_CHECK
import sys, submitit
from packaging.requirements import Requirement
version, asked = submitit.__version__, sys.argv[1]
ok = "build/submitit" in submitit.__file__ and version in Requirement(asked).specifier
sys.exit(print("submitit", version) if ok else f"{asked}: got {version} of {submitit.__file__}")
endef
test-submitit: export SUBMITIT_CHECK := $(value SUBMITIT_CHECK)
test-submitit: $(VENV)/.installed-dev  ## the newest and the lowest submitit that pyproject.toml allows, on a real Slurm
	@test $(words $(SUBMITIT)) -eq 2 || { echo "test-submitit: pyproject.toml must have submitit>=LOWEST,<BOUND"; exit 1; }
	set -e; for version in $(foreach version,$(SUBMITIT),'$(version)'); do \
	  rm -rf build/submitit; $(PIP) install --quiet --no-deps --target build/submitit "$$version"; \
	  PYTHONPATH="$(CURDIR)/build/submitit:$(CURDIR)" $(BIN)/python -c "$$SUBMITIT_CHECK" "$$version"; \
	  PYTHONPATH="$(CURDIR)/build/submitit:$(CURDIR)" $(PYTEST) -n 0 tests/light/test_slurm_script.py tests/light/test_slurm_node.py tests/untimed/test_slurm_submitit.py; \
	done

test-layouts: $(VENV)/.installed-dev  ## every layout of each framework that trains on CPUs
	$(PYTEST) -n 0 --durations=0 tests/named/test_layouts.py

test-families: $(VENV)/.installed-dev  ## parameters of every decoder family that transformers builds, beside `card from-hf`
	$(PYTEST) -n 0 -s tests/named/test_hf_families.py

test-frameworks: .venv-frameworks/.installed  ## DeepSpeed, torchtitan and aiconfigurator, beside the packages of $(VENV)
	PATH="$(CURDIR)/.venv-frameworks/bin:$$PATH" .venv-frameworks/bin/python -m pytest -q -r fEsx \
	  tests/named/test_frameworks.py tests/named/test_kernel_estimates.py

test-vllm: $(VENV)/.installed-dev  ## install vLLM's CPU build (3.7 GB, its own environment) and serve with it
	$(BIN)/python tests/vllm/install.py .venv-vllm
	CCL_VLLM_PYTHON="$(CURDIR)/.venv-vllm/bin/python" $(PYTEST) -n 0 tests/named/test_vllm.py

test-sglang: $(VENV)/.installed-dev  ## install SGLang without its kernels for GPUs (3.3 GB, its own environment) and serve with it
	$(BIN)/python tests/sglang/install.py .venv-sglang
	CCL_SGLANG_PYTHON="$(CURDIR)/.venv-sglang/bin/python" $(PYTEST) -n 0 tests/named/test_sglang.py

test-soak: $(VENV)/.installed-dev  ## ledgers of up to a million events, and 200 interruptions of searches (half an hour)
	$(PYTEST) -n 0 -s tests/named/test_large_ledgers.py
	$(BIN)/python benchmarks/reliability.py --moments 200 --together 10

test-open-loop: $(VENV)/.installed-dev  ## ten searches of the CPU server at a rate of requests, their winners measured again
	$(PYTEST) -n 0 tests/named/test_open_loop.py

docs: $(VENV)/.installed-dev  ## the site of the documentation, in site/; a broken link is an error
	$(BIN)/mkdocs build --strict --quiet --site-dir site

bench: $(VENV)/.installed-dev  ## one benchmark of benchmarks/README.md: make bench NAME=traces ARGS="TRACE --size-mb 100"
	@test -f "benchmarks/$(NAME).py" || { echo "make bench NAME=... ARGS=...: there is no benchmark '$(NAME)'; benchmarks/README.md lists the names"; exit 2; }
	$(BIN)/python benchmarks/$(NAME).py $(ARGS)

screenshots: $(VENV)/.installed-dev  ## the pictures of README and docs, from real runs (needs Chromium)
	$(BIN)/python docs/make_pictures.py

test-ui: $(VENV)/.installed-dev  ## the web application in Chromium, and its times and memory with 10,000 trials
	$(PYTEST) -n 0 tests/untimed/test_ui.py tests/untimed/test_ui_browser.py
	$(BIN)/python benchmarks/ui.py

test-gpu:  ## check the product on this machine's GPU (ten minutes, no internet; PYTHON has torch)
	$(PYTHON) benchmarks/gpu.py

gpu-bundle:  ## collect what test-gpu needs as wheels, for a machine without internet: make gpu-bundle PYTHON=3.12
	python3 benchmarks/gpu_bundle.py collect --python $(PYTHON)

check: lint types test  ## what CI runs

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	@echo "making a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)

SCANNER := hatch_build.py cclsearch/trace/readers/native/build.py cclsearch/trace/readers/native/kineto_scan.c

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml $(SCANNER)
	@echo "installing ccl-search"
	$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml $(SCANNER) tests/constraints.txt
	@echo "installing ccl-search with what its tests need (torch for CPU, JAX, transformers: a minute or two)"
	$(PIP) install --quiet --constraint tests/constraints.txt --editable '.[dev,torch,jax,hf]'
	@touch $@ $(VENV)/.installed

SITE := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
FRAMEWORKS := .venv-frameworks/bin/pip --disable-pip-version-check --retries 10 --timeout 60 install --quiet

.venv-frameworks/.installed: $(VENV)/.installed-dev
	@echo "installing DeepSpeed, torchtitan and aiconfigurator (1.4 GB, a few minutes)"
	$(BIN)/python -m venv .venv-frameworks
	$(BIN)/python $(SITE) >"$$(.venv-frameworks/bin/python $(SITE))/tested.pth"
	$(FRAMEWORKS) --no-deps torchtitan==0.3.0 spmd_types==0.2.3 torchdata torch_checkpointing triton
	$(FRAMEWORKS) 'datasets<4.8' tokenizers tensorboard tyro einops 'aiconfigurator>=0.12,<0.13'
	$(FRAMEWORKS) --no-build-isolation --constraint tests/constraints.txt deepspeed==0.19.8  # a source package, built with torch
	@touch $@

fuzz-native: $(VENV)/.installed-dev  ## damaged traces through the scanner in C, built with sanitizers (3 minutes); ARGS="--traces FOLDER" for real ones
	$(BIN)/python tests/fuzz_native.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-frameworks .mypy_cache .ruff_cache .pytest_cache build dist
