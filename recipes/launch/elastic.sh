#!/bin/sh
# Machines that come and go (torchrun elastic): after a failure all processes start again and go on from the last
# checkpoint, with as many machines as are left.
#
# sh recipes/launch/elastic.sh pretrain_vit_tiny data.train=/shared/shards/train run=/shared/runs/big training.precision=bf16
#
# Run it on every machine. Set these in the environment: NODES (fewest:most), GPUS of each machine, MAIN (host:port of
# one of them). Every number of processes that can come about must divide data.lanes. Run by the tests on CPU processes.
set -eu
# Else all attempts share one store, and processes look for each other where those of the attempt before were
# (torch 2.9 to 2.15).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes "${NODES:-1}" --nproc-per-node "${GPUS:-8}" --max-restarts "${RESTARTS:-10}" \
  --rdzv-backend c10d --rdzv-endpoint "${MAIN:-localhost:29400}" --rdzv-id "${JOB:-ssl-vit}" \
  -m ssl_vit train "$@"
