# Every target makes .venv first (deploy/setup.sh), which takes no time once it is there.
# Settings for the set-up: PYTHON, TORCH, MOONCAKE, EXTRAS (see deploy/setup.sh).
TORCH ?= torch==2.13.0
export TORCH PYTHON MOONCAKE EXTRAS

# What is passed on: make test PYTEST_ARGS="-k pool", make demo DEMO_ARGS="--model mla"
PYTEST_ARGS ?=
DEMO_ARGS ?= --require mooncake --require nixl
BENCH_ARGS ?=

.PHONY: help setup demo test test-vllm check bench
.DEFAULT_GOAL := help

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## make .venv with everything; then .venv/bin/kvconnect works
	@deploy/setup.sh

demo: setup ## prove it: every engine with every model, token-exact against a single node
	@echo "demo: prefill node, decode node and router as processes, compared with a single node"
	@.venv/bin/kvconnect demo $(DEMO_ARGS)

test: setup ## all tests
	@echo "test: pytest over tests/"
	@.venv/bin/python -m pytest $(PYTEST_ARGS)

test-vllm: setup ## a prefill and a decode server of real vLLM (CPU build), in an environment of its own
	@deploy/setup-vllm.sh
	@echo "test-vllm: pytest over tests/vllm_contract/, and tests/vllm/ with real servers"
	@.venv-vllm/bin/python -m pytest tests/vllm_contract tests/vllm $(PYTEST_ARGS)

check: setup ## lint, format, types
	@echo "check: ruff check"
	@.venv/bin/ruff check .
	@echo "check: ruff format"
	@.venv/bin/ruff format --check .
	@echo "check: mypy"
	@.venv/bin/mypy kvconnect

bench: setup ## how long the planning of a large transfer takes
	@echo "bench: planning, one core, no network"
	@.venv/bin/kvconnect bench plan $(BENCH_ARGS)
