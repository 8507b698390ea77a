# Every target sets itself up: a virtual environment in $(VENV), renewed when pyproject.toml changes.
#   make run | space | test | lint | clean
# Variables: PYTHON (3.10 or newer), VENV, TORCH (what to give pip for torch, options included), PYTEST_ARGS, RUN_ARGS.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PYTEST_ARGS ?= -n 2 --dist loadfile
RUN_ARGS ?= --samples --compare --repeats 3 --max-new-tokens 96 --json

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.DEFAULT_GOAL := help
.PHONY: help run space test lint clean

help:
	@sed -n '1,3s/^# *//p' Makefile

run: $(VENV)/.installed
	$(BIN)/blockpilot generate $(RUN_ARGS) </dev/null

# http://127.0.0.1:7860, or where PORT, GRADIO_SERVER_PORT and GRADIO_SERVER_NAME say.
space: $(VENV)/.installed-demo
	GRADIO_ANALYTICS_ENABLED=False $(BIN)/python demo/app.py

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or newer is needed, $(PYTHON) is older. Try: make PYTHON=python3.12"; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }  # half a venv would pass for a whole one next time

# Linux without a CUDA device gets the tested torch; elsewhere pip takes the newest one that pyproject.toml allows.
# A torch that is already there stays.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@if ! $(BIN)/python -c 'import torch' 2>/dev/null && [ "$$(uname -s)" = Linux ] && ! nvidia-smi >/dev/null 2>&1; then \
		echo "Installing $(TORCH)"; $(PIP) install $(TORCH); fi
	@echo "Installing blockpilot-hf and what it needs"
	@$(PIP) install -e '.[train]'
	@touch $@

$(VENV)/.installed-demo: $(VENV)/.installed
	@echo "Installing what the Space needs"
	@$(PIP) install -e '.[demo]'
	@touch $@

# dflash is the peer that tests compare with; its own requirements are for serving on GPUs.
$(VENV)/.installed-test: $(VENV)/.installed
	@echo "Installing the test tools"
	@$(PIP) install -e '.[test]'
	@$(PIP) install --no-deps dflash==0.1.0
	@touch $@
