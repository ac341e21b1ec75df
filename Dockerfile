# Image of a GPU node that runs `deepspeed launch/train.py "$@"`.
#
#   docker build -t ppo_ds .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 --stop-timeout 300 --user "$(id -u):$(id -g)" \
#       -v ppo_ds_cache:/cache -v "$PWD/outputs":/workspace/outputs -e WANDB_API_KEY \
#       ppo_ds +experiment=rlhf run.name=first
#
# --ipc=host: NCCL passes data between the GPUs of a node through /dev/shm, which has only 64 MB in a
# container by default (--shm-size=16g also works).
# --stop-timeout: seconds that the run has after `docker stop` to save a checkpoint and end.

# The base image's torch (2.11, CUDA 12.8) is kept, since it is in the range that setup.cfg allows.
# For another version of CUDA or torch, give --build-arg BASE=pytorch/pytorch:...
# A tag can be moved to another image; a digest cannot: --build-arg BASE=pytorch/pytorch@sha256:...
# docs/installation.md says how to find the digest, and what a base must have.
ARG BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-devel
FROM ${BASE}

# The base image has the Python of its Linux distribution. pip installs packages into it only with
# PIP_BREAK_SYSTEM_PACKAGES.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    TORCH_EXTENSIONS_DIR=/cache/torch_extensions

WORKDIR /workspace

# A command with a pipe fails if any part of it fails.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# The dependencies are installed first, with an empty package, so that a change of the code does not repeat
# this layer. Only files whose hashes are in requirements.lock are installed. torch, torchvision, Triton,
# NVIDIA's libraries and setuptools come from the base image. The build fails if the installation has changed
# one of them, or if the requirements of torch, torchvision or ppo_ds are not met.
COPY setup.py setup.cfg pyproject.toml requirements.lock LICENSE ./
RUN mkdir ppo_ds launch conf && touch ppo_ds/__init__.py \
    && given() { python -m pip list --format=freeze | grep -E '^(torch|triton|nvidia|cuda|setuptools)'; } \
    && before="$(given)" \
    && python -m pip install --require-hashes --no-deps -r requirements.lock \
    && python -m pip install --no-deps --no-build-isolation -e . \
    && diff <(echo "$before") <(given) \
    && { python -m pip check || true; } | { ! grep -E '^(torch|ppo.ds)'; }

COPY . .

# The files keep the modes of the checkout, which may let every user write, or only its owner read.
RUN chmod -R u=rwX,go=rX /workspace

# The run does not run as root. With --user it runs as the owner of outputs/, a user who has no name and no
# home in the image; therefore any user may write to /cache.
RUN useradd --uid 10001 --no-create-home ppo_ds \
    && mkdir -p /cache /workspace/outputs \
    && chmod 1777 /cache \
    && chown ppo_ds /workspace/outputs
ENV HOME=/cache USER=ppo_ds
# A numeric user, so that a cluster can verify that it is not root.
USER 10001

VOLUME ["/cache", "/workspace/outputs"]
# Unhealthy if a run in this container has not renewed the lock of its run directory for some minutes.
HEALTHCHECK --interval=1m --timeout=30s --start-period=1m --retries=3 \
    CMD ["python", "/workspace/launch/healthcheck.py"]
ENTRYPOINT ["/workspace/launch/docker-entrypoint.sh"]
CMD ["--help"]
