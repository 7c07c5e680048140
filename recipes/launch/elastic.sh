#!/bin/sh
# Elastic training with torchrun: after a failure, all processes restart from the last checkpoint on the remaining machines.
#
# sh recipes/launch/elastic.sh pretrain_vit_tiny data.train=/shared/shards/train run=/shared/runs/big
#
# Run it on every machine with these environment variables: NODES (min:max), GPUS (per machine), MAIN (host:port of one
# machine). It restarts after any failure, a wrong key included, up to RESTARTS times (10). If the machine in MAIN is lost, start
# the command again on all machines.
# data.lanes must be a multiple of every possible number of processes.
# Status: tested once with CPU processes, not by the test suite.
set -eu
# Without this, a restart reads the addresses of the previous attempt from the shared store (torch 2.9 to 2.15).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes "${NODES:-1}" --nproc-per-node "${GPUS:-8}" --max-restarts "${RESTARTS:-10}" \
  --rdzv-backend c10d --rdzv-endpoint "${MAIN:-localhost:29400}" --rdzv-id "${JOB:-ssl-vit}" \
  -m ssl_vit train "$@"
