#!/bin/bash
# Slurm array: one GPU and one seed per array element, each with its own run directory; requeued like slurm.sh.
# Sets `seed` and `run` (runs/array_JOB/seed_N); those that are given are ignored.
#
# sbatch recipes/launch/slurm_array.sh pretrain_vit_tiny data.train=shards/train
#
# Status: tested once with mocks of srun and scontrol, on a CPU, not by the test suite.
#SBATCH --job-name=ssl-vit-seeds
#SBATCH --array=0-4
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
set -u
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-8}" # which srun does not inherit since Slurm 22.05
seed=$SLURM_ARRAY_TASK_ID
srun python -m ssl_vit train "$@" "seed=$seed" "run=runs/array_$SLURM_ARRAY_JOB_ID/seed_$seed"
code=$?
if [ "$code" -eq 75 ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$seed"
fi
exit "$code"
