#!/usr/bin/env bash
# Kills a 2-rank run at random moments with SIGKILL or SIGTERM, resumes it every time, and compares it with the run that
# nobody touched: losses, held-out numbers and final weights must be equal bit for bit. Not part of the tests.
#
#   bash tests/soak.sh                30 kills, 10 to 30 minutes on two CPU cores
#   bash tests/soak.sh --kills 5      fewer; --seed N: other moments; --out DIR: keep the runs there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh test
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
echo "== python -m tests.soak $*"
exec python -m tests.soak "$@"
