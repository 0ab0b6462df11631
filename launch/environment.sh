# Sourced by quickstart.sh and tests/run.sh: the project's virtual environment, made on first use.
# Usage: source launch/environment.sh EXTRAS     with the repository's root as the current folder
# Sets PYTHON and puts the environment's commands (deepspeed) first in PATH.

environment() {
    local extras=$1 base stamp wanted
    base=${PYTHON:-python3}
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "error: $("$base" --version) found, Python 3.10 or newer is needed; set PYTHON=/path/to/python3" >&2; return 2; }
    command -v c++ >/dev/null || {
        echo "error: no C++ compiler (c++) found; DeepSpeed compiles a small operation with it. Debian: apt-get install g++" >&2
        return 2; }
    [ -x .venv/bin/python ] || "$base" -m venv .venv || return 2
    PYTHON=$PWD/.venv/bin/python
    export PATH=$PWD/.venv/bin:$PATH
    stamp=.venv/installed-$extras
    wanted=$(cat setup.cfg pyproject.toml launch/constraints.txt | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "== installing into .venv (extras: $extras)"
        "$PYTHON" -m pip install --quiet --upgrade pip setuptools wheel || return 2
        # torch first and by its exact version: an open range may pull gigabytes that a CPU does not need
        "$PYTHON" -m pip install --quiet -c launch/constraints.txt torch || return 2
        "$PYTHON" -m pip install --quiet -c launch/constraints.txt -e ".[$extras]" || return 2
        echo "== compiling DeepSpeed's shared-memory operation (once, one to two minutes)"
        "$PYTHON" -c 'from pipeline.runtime import keep_compiled_operations as keep; keep()
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().load(verbose=False)' || return 2
        echo "$wanted" > "$stamp"
    fi
}

environment "$1"
