# Every target that needs the virtual environment makes it first; a second run skips what is done.

PYTHON ?= python3
BIN := .venv/bin
SET_UP := .venv/.set-up

.DEFAULT_GOAL := help
.PHONY: help setup model demo serve test test-slow oracle chaos gpu-check
.PHONY: lint bench bench-claims bench-peers bench-http bench-scheduler

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(SET_UP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; name one with make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(SET_UP)  ## make .venv with everything in it

model: $(SET_UP)  ## fetch and convert the demo model, once, into your cache
	@$(BIN)/python -m worker.demo_model

demo: model  ## start a server, ask it a question, print the streamed answer, stop
	@$(BIN)/python -m deployments.cli.demo

serve: model  ## serve the demo model until Ctrl-C
	@$(BIN)/stallfree serve --model demo

lint: $(SET_UP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint model  ## lint, types and the fast tests
	$(BIN)/python -m pytest -m "not slow"

test-slow: model  ## the long checks
	$(BIN)/python -m pytest -m slow

oracle: model  ## the whole model oracle against plain Transformers, with its counts
	$(BIN)/python -m pytest -m oracle -s

chaos: model  ## kill, stop and redeploy workers under load; the last line is JSON
	@$(BIN)/python -m tests.chaos

gpu-check:  ## on a machine with a GPU: is everything right there, and how fast (ten minutes)
	@tests/gpu/run.sh

bench: model  ## the main table: speed, distance from memory, the gap of a long prompt, Python per step
	@$(BIN)/python -m benchmarks

bench-claims: model  ## the longer measurements: capacity, governor, preemption (about half an hour, a quiet machine)
	$(BIN)/python -m benchmarks.governor
	$(BIN)/python -m benchmarks.preemption
	$(BIN)/python -m benchmarks.capacity

PEERS ?= ../peers
bench-peers: model  ## other engines beside ours; PEERS is the folder that benchmarks/peers/setup.sh filled
	$(BIN)/python -m benchmarks.engine --json --peers --environments $(PEERS)

bench-http: model  ## whole servers side by side through HTTP; PEERS as above
	$(BIN)/python -m benchmarks.http --environments $(PEERS)

bench-scheduler: $(SET_UP)  ## what one scheduler step costs for each running answer, in microseconds
	@$(BIN)/python -m benchmarks.bench_scheduler
