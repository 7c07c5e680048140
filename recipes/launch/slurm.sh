#!/bin/bash
# Slurm, one node or many, one process a GPU. Preempted, or two minutes before its time is up, the job saves, ends with
# exit code 75, is put back into the queue, and goes on from there.
#
# sbatch recipes/launch/slurm.sh pretrain_vit_tiny data.train=shards/train training.precision=bf16
# sbatch --nodes=2 recipes/launch/slurm.sh pretrain_vit_tiny data.train=shards/train training.precision=bf16
#
# The nodes must share the run directory. Run by the tests with stand-ins for srun and scontrol, on CPU processes.
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
