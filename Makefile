# Needs Python 3.11 or newer and make, nothing else. Another Python: PYTHON=python3.12 make test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# A sound environment starts, loads torch, has our tools, and is of the Python asked for (if one was).
# It does not import growprune itself: a slip in the code must not cost a new environment.
ifeq ($(origin PYTHON),file)
WANTED := any
else
WANTED := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
endif
define SOUND
import sys, importlib.util, torch
assert "$(WANTED)" in ("any", "%d.%d" % sys.version_info[:2])
assert all(map(importlib.util.find_spec, "growprune typer rich pytest xdist hypothesis ruff mypy torchvision tensorboard onnx onnxscript onnxruntime".split()))
endef
export SOUND

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench tables clean venv python

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | while IFS="$$(printf '\t')" \
	read -r target text; do printf '  make %-8s %s\n' "$$target" "$$text"; done

demo: venv  ## base, prune, fine-tune and report on a small image set: no download, no GPU
	@$(BIN)/growprune demo $(ARGS)

test: lint  ## every check: lint, types, tests
	$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

lint: venv  ## style and types only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: venv  ## what the penalty adds to a training step on this machine
	@$(BIN)/python benchmarks/penalty.py --rounds 8 --steps 2 $(ARGS)

tables: venv  ## the tables and figures in README and docs from results
	@$(BIN)/python docs/tables.py $(ARGS)

clean:  ## remove what make and the checks built, never runs/ nor results/
	rm -rf $(VENV) dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv:  ## set up .venv, or mend it
	@if [ -e $(VENV) ] && ! $(BIN)/python -c "$$SOUND" 2>/dev/null; then $(MAKE) -s --no-print-directory python && \
	  echo "$(VENV) is incomplete, broken or of another Python: building it anew" >&2 && rm -rf $(VENV); fi
	@$(MAKE) -s --no-print-directory $(READY)

# The stamp is written last, so an interrupted set-up is never taken for a finished one.
$(READY): pyproject.toml constraints.txt
	@$(MAKE) -s --no-print-directory python
	@echo "Setting up $(VENV): some minutes and some gigabytes the first time (torch)" >&2
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' >&2
	@touch $@

# Each line names one thing that is wrong and what to do about it.
python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "$(PYTHON) not found: install Python 3.11 or newer, or name one: PYTHON=python3.12 make test" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: name a newer one: PYTHON=python3.12 make test" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make environments: run: apt-get install $(notdir $(PYTHON))-venv" >&2; exit 1; }
