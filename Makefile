# make quickstart   a tiny model learns small sums, on two CPU cores
# make test         the tests
# make lint         style
#
# Both make .venv and install into it first; nothing but Python 3.11 to 3.13, git and make is needed.
# PYTHON=...       the interpreter to make .venv with
# TORCH=...        what to install as torch, e.g. TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
# ARGS=...         more for the command, e.g. make quickstart ARGS="run.seed=1", make test ARGS="tests/ops -x"

PYTHON ?=
TORCH ?= torch==2.13.0
ARGS ?=
VENV := .venv
# Written last: without it an installation was cut short, and is started afresh.
STAMP := $(VENV)/.installed

.PHONY: quickstart test lint
.DEFAULT_GOAL := help
.PHONY: help
help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

# The launcher calls ranks "gpus" on every accelerator. No GPU is used, so that it is the same on every machine.
quickstart: $(STAMP)
	CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu PYTHONWARNINGS=ignore $(VENV)/bin/deepspeed -q --num_gpus 2 launch/train.py +experiment=quickstart $(ARGS)

test: $(STAMP)
	$(VENV)/bin/python -m pytest -q $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

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
