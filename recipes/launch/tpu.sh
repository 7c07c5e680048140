#!/bin/sh
# One TPU chip through torch_xla (2.9 with torch 2.9; tools/test_xla.sh installs them).
#
# sh recipes/launch/tpu.sh pretrain_vit_tiny data.train=shards/train training.precision=bf16
#
# Run by the tests through torch_xla on a CPU (PJRT_DEVICE=CPU); on a TPU it has not been run by us. One process drives
# one chip; several XLA processes are refused. auto_batch and FSDP are for GPUs.
set -eu
export PJRT_DEVICE="${PJRT_DEVICE:-TPU}"
exec python -m ssl_vit train "$@"
