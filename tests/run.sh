#!/usr/bin/env bash
# Sets up the project's .venv and runs all tests; further arguments go to pytest:
#   bash tests/run.sh
#   bash tests/run.sh tests/pipeline -k golden
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh test
# Tiny models run fastest on one thread; a real one asks for more itself. Two processes share the test files.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
echo "== python -m pytest -n 2 --dist loadfile $*"
exec python -m pytest -n 2 --dist loadfile "$@"
