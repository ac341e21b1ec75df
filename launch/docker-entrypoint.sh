#!/usr/bin/env bash
# Runs deepspeed launch/train.py "$@" so that `docker stop` ends it with a checkpoint.
# SIGTERM ends the deepspeed command at once, but not its ranks; and when the first process of a container
# ends, the kernel kills all others. Therefore this script, the first process, passes the signal on to the
# deepspeed command and the ranks, and waits until the last of them has ended.
set -u
cd "$(dirname "$0")/.." || exit 1

shm=$(df -k --output=size /dev/shm 2>/dev/null | tail -n 1)
if [ "${shm:-0}" -lt 1048576 ]; then
    echo "warning: /dev/shm has $((${shm:-0} / 1024)) MB, too little for several GPUs: docker run --ipc=host (or --shm-size=16g)" >&2
fi

set -m # runs the job in its own process group
# shellcheck disable=SC2086 # DEEPSPEED_ARGS holds several options of deepspeed, for a run on several nodes
deepspeed ${DEEPSPEED_ARGS:-} launch/train.py "$@" &
job=$!
stopped=
trap 'stopped=1; kill -TERM -- "-$job" 2>/dev/null' TERM INT

wait "$job"
status=$?
while kill -0 -- "-$job" 2>/dev/null; do # until the ranks have saved and ended
    sleep 0.2
done
[ -z "$stopped" ] || status=143
exit "$status"
