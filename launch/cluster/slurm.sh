#!/usr/bin/env bash
# Trains on Slurm: sbatch launch/cluster/slurm.sh +experiment=rlhf run.dir=/shared/run
# Submit it from the repository, which must be at the same path on all nodes, as must run.dir.
#
# Slurm itself starts the ranks, since torchrun and deepspeed would kill them 30 s after a signal, which may
# be before they have saved a checkpoint. Five minutes before the time limit, the ranks save and end, and the
# job is queued again. The same happens on preemption, if the partition has PreemptMode=REQUEUE and a
# GraceTime that is long enough for a checkpoint. The next start resumes from the last checkpoint. `scancel`
# ends the job without queueing it again. docs/several_nodes.md describes signals and time limits.
#SBATCH --job-name=ppo_ds
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" || exit 1

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export MASTER_ADDR MASTER_PORT

requeue=
trap 'requeue=1; kill -USR1 $! 2>/dev/null' USR1 # srun passes it on to the ranks
trap : TERM                                      # Slurm sends it to the ranks too; wait for them

# One task is one rank. Every rank sees all GPUs of its node and uses the one whose index is its local rank.
# Since Slurm 22.05, srun does not take --cpus-per-task from the job; each rank would have one CPU.
# shellcheck disable=SC2016 # the variables are those of each task
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --gpu-bind=none --kill-on-bad-exit=0 bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
    export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    exec python launch/train.py "$@"' rank "$@" &
step=$!

wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do # a signal ended the wait, not the ranks
    wait "$step"
    code=$?
done

# 143: a signal stopped the run, and a checkpoint was saved
if [ "$code" -eq 143 ] && [ -n "$requeue" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
