# make quickstart   a tiny model learns small sums, on two CPU cores
# make test         the fast tests and one test of each promise from end to end; at most 12 minutes on two cores
# make test-all     all tests but the nightly ones, the fast ones included; at most 45 minutes on two cores
# make lint         style and types
#
# Each makes .venv and install into it first; nothing but Python 3.11 to 3.13, git and make is needed.
# PYTHON=...       the interpreter to make .venv with
# TORCH=...        what to install as torch, e.g. TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
# ARGS=...         more for the command, e.g. make quickstart ARGS="run.seed=1", make test ARGS="tests/ops -x"
# WORKERS=2        how many processes share the tests

PYTHON ?=
TORCH ?= torch==2.13.0
ARGS ?=
WORKERS ?= 2
VENV := .venv
# Written last: without it an installation was cut short, and is started afresh.
STAMP := $(VENV)/.installed

.PHONY: quickstart test test-all lint
.DEFAULT_GOAL := help
.PHONY: help
help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

# The launcher calls ranks "gpus" on every accelerator. No GPU is used, so that it is the same on every machine.
quickstart: $(STAMP)
	CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu PYTHONWARNINGS=ignore $(VENV)/bin/deepspeed -q --num_gpus 2 launch/train.py +experiment=quickstart $(ARGS)

# Tests of one group (see tests/conftest.py) run in one process, groups in the order in which they were collected.
PYTEST = $(VENV)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(PYTEST) -m "not slow and not nightly" $(ARGS)

test-all: $(STAMP)
	$(PYTEST) -m "not nightly" $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m mypy

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@set -e; \
	fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; \
	python="$(PYTHON)"; \
	for candidate in python3 python3.13 python3.12 python3.11 python; do \
		if [ -z "$$python" ] && "$$candidate" -c "$$fits" 2>/dev/null; then python="$$candidate"; fi; \
	done; \
	if [ -z "$$python" ]; then echo "error: no Python from 3.11 to 3.13 found; name one with PYTHON=/path/to/python" >&2; exit 2; fi; \
	if [ ! -f $(STAMP) ]; then echo "making $(VENV) with $$python"; "$$python" -m venv --clear $(VENV); fi
	@rm -f $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)
