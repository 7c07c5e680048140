#!/bin/sh
# The suite with the oldest versions that pyproject.toml allows, in an environment of its own (.venv-oldest).
#
# tools/oldest.sh
# tools/oldest.sh tests/data -x
#
# uv picks the oldest version of each direct dependency and the newest of what those need; some gigabytes to download.
set -eu
cd "$(dirname "$0")/.."
python3 -m venv .venv-oldest
.venv-oldest/bin/pip install --quiet uv
.venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python --resolution lowest-direct -e '.[test]'
exec .venv-oldest/bin/python -m pytest "$@"
