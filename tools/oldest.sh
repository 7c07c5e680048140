#!/bin/sh
# Run the tests with the oldest supported version of each direct dependency, in a separate environment (.venv-oldest).
#
# tools/oldest.sh
# tools/oldest.sh tests/data -x
#
# uv selects the oldest versions that pyproject.toml allows; downloads several gigabytes.
set -eu
cd "$(dirname "$0")/.."
python3 -m venv .venv-oldest
.venv-oldest/bin/pip install --quiet uv
.venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python --resolution lowest-direct -e '.[test]'
exec .venv-oldest/bin/python -m pytest "$@"
