# Each target makes .venv with pinned versions first, if it is missing.
PYTHON ?= python3
BIN := .venv/bin
# Idle threads that spin would take the processor from the rest of the run.
export OMP_WAIT_POLICY := passive
# Tests start hundreds of interpreters: what they import is compiled once, also where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test slow-tests test-long test-vllm test-verifiers test-openenv test-trackers mutants fuzz sanitize wheel resolve versions bench gpu golden real-model docs check format clean

demo: .venv/ready
	$(BIN)/posttrain demo

# Three at once on two cores: a third of the tests' time is waiting.
test: .venv/ready
	$(BIN)/python -m pytest tests -m "not long" -n 3 --dist worksteal

# Further cases of what shorter tests prove too: other targets of the compiler, other architectures, a cluster of Ray.
test-long: .venv/ready
	$(BIN)/python -m pytest tests -m long

# Rewrites tests/slow_tests.txt, which `make check` leaves out.
slow-tests: .venv/ready
	mkdir -p runs/slow-tests && rm -f runs/slow-tests/*
	SLOW_TESTS=$(CURDIR)/runs/slow-tests PYTHONPATH=tools $(BIN)/python -m pytest tests -m "not long" -n 3 --dist worksteal -p slow_tests
	$(BIN)/python tools/slow_tests.py runs/slow-tests

test-vllm: .venv-vllm/ready
	.venv-vllm/bin/python -m pytest tests/engines/test_vllm.py tests/engines/test_vllm_adapters.py tests/engines/test_vllm_experts.py \
		tests/engines/test_vllm_pictures.py tests/engines/test_vllm_transfer.py

test-verifiers: .venv/ready .venv-verifiers/ready
	$(BIN)/python -m pytest tests/envs/test_verifiers_library.py

test-openenv: .venv/ready .venv-openenv/ready
	$(BIN)/python -m pytest tests/envs/test_bridge_servers.py

# Each tracker with its real library, offline. A skipped test names the library that is missing.
test-trackers: .venv-trackers/ready
	.venv-trackers/bin/python -m pytest tests/runs/test_tracker_libraries.py -rs
	@.venv-trackers/bin/pip list --format freeze | grep -E "^(wandb|trackio|mlflow-skinny|swanlab|tensorboard|prometheus_client)=="

# An hour or two on one core: some 800 small mistakes, one at a time, each against the tests that run its line.
mutants: .venv/ready
	mkdir -p runs
	-$(BIN)/python tools/mutants.py --log runs/mutants.jsonl --resume
	$(BIN)/python tools/mutants.py --log runs/mutants.jsonl --report docs/results/mutation.md

# 10,000 malformed inputs, some 15 minutes on two idle cores.
fuzz: .venv/ready
	$(BIN)/python tools/fuzz.py

# The tests of the compiled code under the address and undefined-behaviour sanitizers.
sanitize: .venv/ready
	$(BIN)/python tools/sanitize.py

# Wheel and source distribution of the tracked files, checked as PyPI does, each used in a new environment.
wheel: .venv/ready
	$(BIN)/python tools/wheel.py

# Does every extra resolve on every supported Python? Asks the index, with uv, and installs nothing but that.
resolve: .venv-uv/ready
	$(PYTHON) tools/resolve.py --uv .venv-uv/bin/uv

.venv-uv/ready:
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/pip install --quiet uv
	touch .venv-uv/ready

# The fast tests with the oldest and the newest torch that pyproject.toml allows. PyTorch's own index has the builds for
# processors; those of PyPI bring CUDA.
TORCH_OLDEST := 2.11.0
TORCH_NEWEST := 2.15.0
PYTHON_OLDEST ?= $(PYTHON)
PYTHON_NEWEST ?= $(PYTHON)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
versions: .venv-oldest/ready .venv-newest/ready
	.venv-oldest/bin/python -m pytest tests -m "not long" -n 2
	.venv-newest/bin/python -m pytest tests -m "not long" -n 2

.venv-oldest/ready: pyproject.toml constraints.txt
	$(PYTHON_OLDEST) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --index-url $(TORCH_INDEX) "torch==$(TORCH_OLDEST)"
	grep -v "^torch==" constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install --quiet --constraint .venv-oldest/constraints.txt --editable ".[dev]"
	touch .venv-oldest/ready

.venv-newest/ready: pyproject.toml constraints.txt
	$(PYTHON_NEWEST) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --index-url $(TORCH_INDEX) "torch==$(TORCH_NEWEST)"
	grep -v "^torch==" constraints.txt > .venv-newest/constraints.txt
	.venv-newest/bin/pip install --quiet --constraint .venv-newest/constraints.txt --editable ".[dev]"
	touch .venv-newest/ready

# Begins no further part after 40 minutes; appends what it finds to docs/results/speed.md, part by part.
bench: .venv/ready .venv-vllm/ready
	$(MAKE) -C benchmarks/peers ../../runs/peers/env-trl/ready
	$(BIN)/python benchmarks/speed/bench.py

# At most 25 minutes on a machine with a CUDA card: does posttrain compute there what it computes on a processor, and how
# fast? Writes docs/results/gpu.md. Needs no .venv where python3 has PyTorch and transformers. GPU="--only steps" for parts.
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu/gpu.py $(GPU)

# Two minutes: fourteen short runs equal those of BASE bit for bit (metrics, rollouts, weights).
BASE ?= HEAD
golden: .venv/ready
	$(BIN)/python tools/golden.py --base $(BASE)

# SmolLM2-135M-Instruct as a GGUF file (98 MB, Apache-2.0) into ~/.cache/posttrain, for the recipes and tests that need it.
real-model: .venv/ready
	$(BIN)/python -m posttrain.cli.real_model

# The documentation site, with strict links, into site/: open site/index.html.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

check: .venv/ready
	$(BIN)/ruff format --check posttrain experiments tests tools recipes benchmarks setup.py
	$(BIN)/ruff check posttrain experiments tests tools recipes benchmarks setup.py
	$(BIN)/mypy
	$(BIN)/python -m pytest tests -m "not slow and not long" -n 2

format: .venv/ready
	$(BIN)/ruff format posttrain experiments tests tools recipes benchmarks setup.py
	$(BIN)/ruff check --fix posttrain experiments tests tools recipes benchmarks setup.py

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch .venv/ready

# vLLM for machines without a GPU. It asks for versions of its own, so it does not share .venv.
.venv-vllm/ready: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --constraint constraints-vllm.txt "torch==2.13.0"
	.venv-vllm/bin/pip install --quiet --no-deps --requirement constraints-vllm.txt
	.venv-vllm/bin/pip install --quiet --no-deps --editable .
	.venv-vllm/bin/pip install --quiet --no-deps --target .venv-vllm/torchvision torchvision==0.28.0
	touch .venv-vllm/ready

# The `verifiers` library asks for versions of its own, too.
.venv-verifiers/ready: constraints-verifiers.txt
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/pip install --quiet --requirement constraints-verifiers.txt
	touch .venv-verifiers/ready

# OpenEnv's servers bring a web framework and a user interface, and run in processes of their own.
.venv-openenv/ready: constraints-openenv.txt
	$(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/pip install --quiet --requirement constraints-openenv.txt
	touch .venv-openenv/ready

# Trackers, within the ranges of pyproject.toml.
.venv-trackers/ready: pyproject.toml
	$(PYTHON) -m venv .venv-trackers
	.venv-trackers/bin/pip install --quiet "torch==2.13.0"
	.venv-trackers/bin/pip install --quiet "torch==2.13.0" --editable ".[wandb,trackio,mlflow,swanlab]" \
		tensorboard prometheus_client pytest pytest-timeout
	touch .venv-trackers/ready

clean:
	rm -rf .venv .venv-vllm .venv-verifiers .venv-openenv .venv-trackers .venv-uv .venv-oldest .venv-newest runs site
