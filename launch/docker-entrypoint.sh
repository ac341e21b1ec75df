#!/usr/bin/env bash
# deepspeed launch/train.py "$@", so that `docker stop` ends it with a checkpoint: the deepspeed command dies of a SIGTERM at once and leaves its
# ranks behind, and as soon as the first process of a container has ended, so have all. So this one passes the signal on and waits for the last.
set -u
cd "$(dirname "$0")/.."

shm=$(df -k --output=size /dev/shm 2>/dev/null | tail -n 1)
if [ "${shm:-0}" -lt 1048576 ]; then
    echo "warning: /dev/shm has $((${shm:-0} / 1024)) MB, too little for several GPUs: docker run --ipc=host (or --shm-size=16g)" >&2
fi

set -m # a process group of its own for the job
deepspeed launch/train.py "$@" &
job=$!
stopped=
trap 'stopped=1; kill -TERM -- "-$job" 2>/dev/null' TERM INT

wait "$job"
status=$?
while kill -0 -- "-$job" 2>/dev/null; do # ranks that are still saving
    sleep 0.2
done
[ -z "$stopped" ] || status=143
exit "$status"
