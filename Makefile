# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo serve test lint bench-cascade bench-engine bench-gpu family proto clean bench-door

demo: $(VENV)/.installed           ## start the cascade, stream one answer, compare, shut down
	$(BIN)/cascade demo

serve: $(VENV)/.installed          ## the same server, left running
	$(BIN)/cascade serve

test: $(VENV)/.installed-dev       ## all tests, in two processes of one thread each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

lint: $(VENV)/.installed-dev       ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-cascade: $(VENV)/.installed  ## speed against the full model alone; the last line is JSON
	$(BIN)/python -m benchmarks.cascade

bench-engine: $(VENV)/.installed   ## one tier against Transformers; the last line is JSON
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m benchmarks.engine

bench-gpu: $(VENV)/.installed      ## the same on a GPU, with weights made on the spot; the last line is JSON
	$(BIN)/python -m benchmarks.gpu

bench-door: $(VENV)/.installed     ## what the gRPC and HTTP doors add to the library; the last line is JSON
	$(BIN)/python -m benchmarks.door

family: $(VENV)/.installed         ## train the embedded models again
	$(BIN)/cascade family train

proto: $(VENV)/.installed-dev      ## generate cascade/v1 from protos
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --pyi_out=. --grpc_python_out=. protos/cascade/v1/*.proto

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:                             ## remove the virtual environment
	rm -rf $(VENV)
