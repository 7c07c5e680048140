#!/bin/sh
# One TPU chip with torch_xla: pip install 'torch==2.9.*' 'torchvision==0.24.*' 'torch_xla[tpu]==2.9.*' -e .
#
# sh recipes/launch/tpu.sh pretrain_vit_tiny data.train=shards/train training.precision=bf16
#
# One process per run; several XLA processes are refused. auto_batch and FSDP need GPUs. Status: tested with torch_xla on a CPU
# (PJRT_DEVICE=CPU); it has not been run on a TPU.
set -eu
export PJRT_DEVICE="${PJRT_DEVICE:-TPU}"
python -c "import torch_xla" || exit 2 # without it, training would use the CPU
exec python -m ssl_vit train "$@"
