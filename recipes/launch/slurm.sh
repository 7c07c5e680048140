#!/bin/bash
# Slurm on one or more nodes, one process per GPU. When preempted, and two minutes before the time limit, the job saves a
# checkpoint, exits with code 75, is requeued and resumes.
#
# sbatch recipes/launch/slurm.sh pretrain_vit_tiny data.train=shards/train
# sbatch --nodes=2 recipes/launch/slurm.sh pretrain_vit_tiny data.train=shards/train
#
# All nodes must share the run directory. Status: tested with mocks of srun and scontrol, on CPU processes.
#SBATCH --job-name=ssl-vit
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
set -u
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-8}" # which srun does not inherit since Slurm 22.05
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
srun --kill-on-bad-exit=1 bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  exec python -m ssl_vit train "$@"' ssl-vit "$@"
code=$?
if [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
