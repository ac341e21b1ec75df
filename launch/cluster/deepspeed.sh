#!/usr/bin/env bash
# Trains on the nodes of a hostfile, which need ssh without a password, pdsh, and the same paths:
#   launch/cluster/deepspeed.sh launch/cluster/hostfile +experiment=rlhf run.dir=/shared/run
# Ranks get the variables of this shell that launch/cluster/environment.py lists, but no keys. Write keys as
# `export HF_TOKEN=...` lines into a file with mode 600 at the same path on every node, and set
# PPO_DS_NODE_SCRIPT to that path: each node sources the file before it starts its ranks. DEEPSPEED_ARGS adds
# options of deepspeed.
set -euo pipefail
hostfile=$(realpath "$1")
shift
cd "$(dirname "$0")/../.."

if [ -z "${DS_ENV_FILE:-}" ]; then
    file=$(mktemp)
    python launch/cluster/environment.py "$file" "$@"
    # DeepSpeed reads one file only
    if [ -f ~/.deepspeed_env ]; then cat ~/.deepspeed_env >>"$file"; fi
    exec 3<"$file"
    rm "$file" # deepspeed reads it through the descriptor, so no file remains
    export DS_ENV_FILE=/dev/fd/3
fi
options=()
if [ -n "${PPO_DS_NODE_SCRIPT:-}" ]; then options+=(--venv_script "$PPO_DS_NODE_SCRIPT"); fi
# shellcheck disable=SC2086 # DEEPSPEED_ARGS holds several words
exec deepspeed --hostfile "$hostfile" "${options[@]}" ${DEEPSPEED_ARGS:-} launch/train.py "$@"
