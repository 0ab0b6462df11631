"""What the batch scripts need to know of a run file, as assignments for bash: out, target and data.

    eval "$(python launch/slurm/run_values.py my_run.yaml out=/scratch/try)"
"""
import shlex
import sys
from pathlib import Path

from data_prep.errors import UserError
from pipeline.config import load_run
from pipeline.runtime import fail


def main() -> int:
    try:
        run = load_run(sys.argv[1], sys.argv[2:])
    except UserError as error:
        return fail(error)
    for name, value in (("OUT", run.out), ("TARGET", run.target_path), ("DATASET", run.data_path)):
        print(f"{name}={shlex.quote(str(Path(value).absolute() if isinstance(value, Path) else value))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
