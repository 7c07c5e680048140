#!/bin/sh
# Run the xla tests with torch_xla on a CPU, in a separate environment: tools/test_xla.sh [FOLDER]
#
# Installs torch 2.9 and torch_xla 2.9 into FOLDER (default: .venv-xla; 3 GB).
set -eu
cd "$(dirname "$0")/.."
folder=${1:-.venv-xla}
if [ ! -e "$folder/installed" ]; then
  "${PYTHON:-python3}" -m venv "$folder"
  "$folder/bin/pip" install "torch==2.9.*" "torchvision==0.24.*" "torch_xla==2.9.*" -e ".[test]"
  touch "$folder/installed"
fi
export PJRT_DEVICE=CPU OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$folder/bin/python" -m pytest -m xla tests/xla
