#!/usr/bin/env bash
# What needs a GPU: numerics of every attention implementation, the fused loss and kernels against float64, then the
# measurements at Qwen3-8B's shape, written to one JSON. Nothing is installed: PYTHON (default python3) has the packages.
#
#   bash tests/gpu/run.sh OUT.json              at most 8 minutes on an H200
#   bash tests/gpu/run.sh OUT.json --device cpu  rehearsal on a small shape, where there is no GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
case ${1:-} in ""|-*) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;; esac
out=$1; shift
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
case " $* " in *" --device cpu "*) export GPU_TESTS_DEVICE=cpu ;; esac
set -x
"$python" -m pytest -q -p no:cacheprovider tests/gpu
"$python" tests/gpu/measure.py --json "$out" "$@"
