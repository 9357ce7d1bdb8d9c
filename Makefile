# Each target first makes the environment it needs, in .venv. Nothing here needs root, a GPU or a CUDA toolkit.
#   make verify PYTHON=/path/to/python3.12    chooses the interpreter
#   make verify CUDA=cu12 | cu13 | none       overrides what the NVIDIA driver suggests

SHELL := /bin/bash
VENV  ?= .venv
BIN   := $(VENV)/bin

# Interpreters that numba has wheels for. A name on PATH may be a stub, so each is run.
PYTHONS := $(or $(PYTHON),python3.13 python3.12 python3.11 python3.14 python3 python)
FITS    := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))

# The CUDA major version that the NVIDIA driver serves; empty without a driver. WSL2 keeps nvidia-smi off PATH.
DRIVER := $(shell PATH="$$PATH:/usr/lib/wsl/lib" nvidia-smi 2>/dev/null | sed -nE 's/.*CUDA [A-Za-z ]*Version: *([0-9]+).*/\1/p' | head -n 1)
CUDA   ?= $(if $(DRIVER),$(if $(filter 12,$(DRIVER)),cu12,$(if $(filter 1 2 3 4 5 6 7 8 9 10 11,$(DRIVER)),none,cu13)),none)

comma := ,
# cu12 and the offline checks' CUDA 13 toolchain exclude each other.
TOOLS := $(if $(filter cu12,$(CUDA)),test$(comma)cu12,dev)$(comma)notebooks
GPU   := $(if $(filter none,$(CUDA)),,[$(CUDA)])

# Stamps: what was installed, for which driver.
BASE := $(VENV)/.verify-$(CUDA)
FULL := $(VENV)/.test-$(CUDA)

.PHONY: help verify test test-slow notebooks figures lint clean
help:
	@echo "make verify     judge every kernel against fp64 and print the table"
	@echo "make test       the test suite"
	@echo "make test-slow  the tests that make test leaves out"
	@echo "make notebooks  run the notebooks and write their .ipynb"
	@echo "make figures    draw every figure into figures/out, and the README's table"
	@echo "make lint       ruff"
	@echo "make clean      remove the environment and what was built"

verify: $(BASE)
	$(BIN)/python -m verify

test: $(FULL)
	$(BIN)/python -m pytest -n auto -m "not slow"

test-slow: $(FULL)
	$(BIN)/python -m pytest -n auto -m slow

notebooks: $(FULL)
	$(BIN)/python notebooks/build.py

figures: $(BASE)
	$(BIN)/python -m figures
	$(BIN)/python -m figures readme

lint: $(FULL)
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@for p in $(PYTHONS); do "$$p" -c '$(FITS)' 2>/dev/null && { python="$$p"; break; }; done; \
	test -n "$$python" || { found=$$(for p in $(PYTHONS); do "$$p" --version; done 2>/dev/null | sort -u | paste -sd,); \
	    echo "flashproof needs Python 3.11 to 3.14 and found $${found:-none}:" \
	    "install one, or say make PYTHON=/path/to/python3.12"; exit 1; }; \
	"$$python" -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "$$python could not make a virtual environment (Debian, Ubuntu: install python3-venv)"; exit 1; }

$(BASE): pyproject.toml | $(BIN)/python
	@echo "installing flashproof$(GPU) into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".$(GPU)"
	@touch $@

$(FULL): pyproject.toml | $(BIN)/python
	@echo "installing flashproof[$(TOOLS)] into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(TOOLS)]"
	@touch $(BASE) $@
