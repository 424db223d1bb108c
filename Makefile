# Every target installs its requirements. `make help` lists the targets.
SHELL := /bin/bash
PORT ?= 8000
DATA ?= data
MODEL ?=
PYTEST_ARGS ?=
# Tests start Python hundreds of times. Without a bytecode cache, each start would compile all of Spillway again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help run agents unit test test-gpu check format docs reference bench bench-engine-peers leaks chaos compose flakes fuzz fuzz-api fleet-kills conformance-llamacpp conformance-lm-eval conformance-ray conformance-skypilot conformance-transformers conformance-triton conformance-vllm coverage drill mutants notices planted simulate limits lock clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 22

run: ## Run all of Spillway on this machine: make run [PORT=8000] [DATA=data] [MODEL=folder-or-hub-name]
	@scripts/setup.sh run
	@exec .venv/bin/spillway up --port $(PORT) --data $(DATA) $(if $(MODEL),--model $(MODEL))

unit: ## Run the fast tests, which need no server, no apt and no browser (45 s on two cores)
	@scripts/setup.sh unit
	.venv/bin/python -m pytest -n 2 --dist loadfile -m "not servers and not slow" --ignore tests/unit/engine \
	  tests/unit $(PYTEST_ARGS)

test: check ## Run the checks and all tests (8 to 10 minutes on two cores)
	.venv/bin/python -m pytest -p tests.forked_workers.plugin -p tests.flakes.confirm -n 6 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-gpu: ## Run the tests that need an NVIDIA GPU (docs/how-to/gpu.md)
	@scripts/setup.sh test
	TRITON_INTERPRET=0 CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES-0} .venv/bin/python -m pytest -n 0 -m gpu tests/unit/engine $(PYTEST_ARGS)

check: ## Check formatting, lint and strict types, and build the site of the docs
	@scripts/setup.sh test
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	@# mypy gives its two workers 3 s to start. On a busy machine it then fails with exit code 2: rerun it with one process.
	.venv/bin/mypy || { test $$? -eq 2 && .venv/bin/mypy --num-workers 0; }
	$(BUILD_DOCS)

BUILD_DOCS = NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict
docs: ## Build the site of docs/ into build/site; a broken link, anchor or entry of the navigation fails it
	@scripts/setup.sh test
	$(BUILD_DOCS)

reference: ## Write the generated pages of docs/: configuration, command line, HTTP operations, errors, log messages, engines, decisions
	@scripts/setup.sh test
	.venv/bin/python -m scripts.reference
	.venv/bin/python -m tests.conformance.matrix
	.venv/bin/python -m tests.reference

format: ## Format the code and fix what ruff can fix
	@scripts/setup.sh test
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

bench: ## Run the benchmarks on an idle machine; record results in benchmarks/LOG.md
	@scripts/setup.sh test
	.venv/bin/python -m benchmarks.engine_throughput
	.venv/bin/python -m benchmarks.engine_memory
	.venv/bin/python -m benchmarks.engine_quality
	.venv/bin/python -m benchmarks.gateway_overhead
	.venv/bin/python -m benchmarks.ledger_ingest

PICTURE ?=
bench-engine-peers: ## Compare Spillway's engine with transformers and vLLM on CPUs (installed on demand): make bench-engine-peers [PICTURE=file.png]
	@scripts/setup.sh test
	.venv/bin/python -m benchmarks.engine_throughput --systems generate continuous vllm spillway spillway-int8 \
	  $(if $(PICTURE),--picture $(PICTURE))

TESTS ?=
TIMES ?= 8
LOAD ?= 8
FOLDER ?=
flakes: ## Repeat tests in random order under load and list every failure: make flakes [TESTS=tests/fleet] [TIMES=8] [LOAD=8] [FOLDER=one-to-continue]
	@scripts/setup.sh test
	.venv/bin/python -m tests.flakes $(TESTS) --times $(TIMES) --load $(LOAD) $(if $(FOLDER),--folder $(FOLDER))

REQUESTS ?= 10000
leaks: ## Cancel requests at random moments and check that the engine frees everything: make leaks [REQUESTS=10000] [SEED=1]
	@scripts/setup.sh test
	.venv/bin/python -m tests.unit.engine.leaks --requests $(REQUESTS) --seed $(SEED)

SCENARIO ?= kill
SEED ?= 1
ENGINE ?= scripted
chaos: ## Kill parts of Spillway mid-stream and compare every answer: make chaos [SCENARIO=kill|…|all] [KILLS=1000] [SEED=1] [ENGINE=scripted|spillway]
	@scripts/setup.sh test
	.venv/bin/python -m tests.chaos $(SCENARIO) --seed $(SEED) --engine $(ENGINE) $(if $(KILLS),--faults $(KILLS))

compose: ## Test docker-compose.yml and the commands of its docs on a real Docker: make compose [FOLDER=one-that-it-can-mount] [COMPOSE_BUILD_ARGS=…]
	@scripts/setup.sh test
	.venv/bin/python -m tests.compose $(if $(FOLDER),--folder $(FOLDER))

drill: ## Lose a home region, restore it by the runbook, and print what was restored, RPO and RTO
	@scripts/setup.sh test
	.venv/bin/python -m pytest -s -n 0 tests/drill/home_lost.py

SEEDS ?= 1000
FIRST_SEED ?= 1
simulate: ## Simulate the whole request path under faults, deterministic by seed: make simulate [SEEDS=1000] [FIRST_SEED=1] [FAULTS=host,power]
	@scripts/setup.sh test
	.venv/bin/python -m tests.simulation --seeds $(SEEDS) --first-seed $(FIRST_SEED) $(if $(FAULTS),--faults $(FAULTS))

conformance-llamacpp: ## Run the engines' conformance suite against a real llama.cpp server (installed on demand)
	@scripts/setup.sh test
	.venv/bin/python -m tests.conformance.real_servers llamacpp
	.venv/bin/python -m tests.conformance.real_servers llamacpp-completions

conformance-lm-eval: ## Run lm-evaluation-harness over completions and chats, and compare its scores with transformers
	@scripts/setup.sh test
	.venv/bin/python -m tests.conformance.real_lm_eval

conformance-vllm: ## Run the conformance suite against vLLM for CPUs, over HTTP and in the worker's process
	@scripts/setup.sh test
	.venv/bin/python -m tests.conformance.real_servers vllm
	.venv/bin/python -m tests.conformance.real_servers vllm-completions
	.venv/bin/python -m tests.conformance.real_servers vllm-chat
	.venv/bin/python -m tests.conformance.real_servers vllm-inprocess

conformance-transformers: ## Run the conformance suite against `transformers serve`
	@scripts/setup.sh test
	.venv/bin/python -m tests.conformance.real_servers transformers

conformance-ray: ## Run the conformance suite against Ray Serve with Spillway's engine
	@scripts/setup.sh test
	.venv/bin/python -m tests.conformance.real_servers ray-chat
	.venv/bin/python -m tests.conformance.real_servers ray-completions

conformance-triton: ## Run the conformance suite against a real Triton with Spillway's engine
	@scripts/setup.sh test
	.venv/bin/python -m tests.conformance.real_servers triton

conformance-skypilot: ## Run a fleet with the real SkyPilot on a real Slurm (as root; about eight minutes)
	@scripts/setup.sh test
	.venv/bin/python -m tests.conformance.real_skypilot

AGENT_KILLS ?= 2
agents: ## Run coding agents while their workers are killed in the middle of tool calls: make agents [AGENT_KILLS=2] [AGENT_RULES=alternating]
	@scripts/setup.sh test
	.venv/bin/python scripts/install_node_packages.py tests/agents
	AGENT_KILLS=$(AGENT_KILLS) AGENT_SEED=$(or $(AGENT_SEED),1) $(if $(AGENT_RULES),AGENT_RULES="$(AGENT_RULES)") .venv/bin/python -m pytest -v -n 0 tests/agents/agents.py $(PYTEST_ARGS)

KILLS_OF_CONTROLLERS ?= 200
fleet-kills: ## Kill the fleet controller at every step of launching and ending machines at a simulated EC2: make fleet-kills [KILLS_OF_CONTROLLERS=200]
	@scripts/setup.sh test
	FLEET_KILLS=$(KILLS_OF_CONTROLLERS) .venv/bin/python -m pytest -q tests/fleet/test_crashes.py --timeout 1800

CANCELS ?= 10000
limits: ## Test each key limit at its boundary over three gateways, with a killed gateway and 10,000 cancels: make limits [CANCELS=10000] [SEED=1]
	@scripts/setup.sh test
	.venv/bin/python -m tests.chaos.limits --seed $(SEED) --cancels $(CANCELS)

FUZZ_EXAMPLES ?= 100
FUZZ_SEED ?= 1
fuzz-api: ## Fuzz the API with valid and invalid requests from its OpenAPI document: make fuzz-api [FUZZ_EXAMPLES=100] [FUZZ_SEED=1]
	@scripts/setup.sh test
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) FUZZ_SEED=$(FUZZ_SEED) .venv/bin/python -m pytest -q -n 0 tests/integration/gateway/fuzzed --timeout 3600 $(PYTEST_ARGS)

FUZZ_SECONDS ?= 60
TARGETS ?=
fuzz: ## Fuzz the parsers of untrusted bytes, guided by coverage, one minute per target: make fuzz [FUZZ_SECONDS=60] [TARGETS="wire frames …"]
	@scripts/setup.sh test
	@.venv/bin/uv sync --quiet --frozen --inexact --only-group fuzzing
	.venv/bin/python -m tests.fuzz --seconds $(FUZZ_SECONDS) $(TARGETS)

MUTANTS ?= 40
PACKAGES ?=
BEFORE ?=
mutants: ## Mutation testing: change the code and check that a test fails: make mutants [MUTANTS=40] [SEED=1] [PACKAGES="limits …"] [BEFORE=results.jsonl]
	@scripts/setup.sh test
	@.venv/bin/uv sync --quiet --frozen --inexact --only-group mutation
	.venv/bin/python -m tests.mutants --mutants $(MUTANTS) --seed $(SEED) $(if $(BEFORE),--before $(BEFORE)) $(PACKAGES)

NAMES ?=
STEPS ?=
planted: ## Plant known faults one at a time and list the tests that detect them: make planted [NAMES="refund-twice …"] [STEPS=named] [BEFORE=results.jsonl]
	@scripts/setup.sh test
	.venv/bin/python -m tests.planted $(NAMES) $(if $(BEFORE),--before $(BEFORE)) $(if $(STEPS),--steps $(STEPS))

COVERED = gateway/dispatch gateway/request gateway/admission gateway/limits ledger engine
coverage: ## Measure the branch coverage of the code that `make mutants` changes: make coverage [PYTEST_ARGS=…]
	@scripts/setup.sh test
	@.venv/bin/uv sync --quiet --frozen --inexact --only-group mutation
	.venv/bin/python -m pytest -n 6 --dist loadfile --no-loadscope-reorder $(COVERED:%=--cov=%) --cov-report=term-missing:skip-covered \
	  $(or $(PYTEST_ARGS),tests/unit tests/integration tests/simulation)

lock: ## Update uv.lock from pyproject.toml: make lock [UPGRADE=1 to upgrade all packages]
	@[ -x .venv/bin/uv ] || scripts/setup.sh run
	.venv/bin/uv lock --default-index https://pypi.org/simple $(if $(UPGRADE),--upgrade)

notices: ## Write the licenses of the images' Python packages to build/THIRD_PARTY_NOTICES.txt
	@[ -x .venv/bin/uv ] || scripts/setup.sh run
	UV_PROJECT_ENVIRONMENT=build/notices .venv/bin/uv sync --frozen --no-install-project --quiet \
	  --extra aws --extra kubernetes --extra otel --extra s3 --extra worker --group torch
	.venv/bin/uv tool run --from pip-licenses==5.5.5 pip-licenses --python build/notices/bin/python --with-urls \
	  --with-license-file --no-license-path --format plain-vertical --output-file build/THIRD_PARTY_NOTICES.txt

clean: ## Remove the virtual environment and caches (never the data folder)
	rm -rf tests/agents/node_modules tests/clients/node/node_modules .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
