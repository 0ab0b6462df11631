"""Exports a checkpoint as a drafter folder for vLLM, SGLang and z-lab's package.

    python launch/export.py runs/quickstart/checkpoints runs/quickstart/drafter
    python launch/export.py runs/quickstart/checkpoints/step000100 /data/drafter --dtype bfloat16

OUT holds config.json, model.safetensors and training.json (configuration, versions and data it came from). It must not
exist yet. The target's embedding and head are not in it: engines take them from the target.
"""
import argparse
import sys
from pathlib import Path

from data_prep.errors import UserError
from pipeline.export import DTYPES, export
from pipeline.runtime import fail


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="RUN/checkpoints (its newest complete one) or one of its folders")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: what the run computed in")
    parser.add_argument("--untrained", action="store_true", help="the same drafter before its first step, to compare with")
    args = parser.parse_args()
    try:
        taken = export(args.checkpoint, args.out, args.dtype, args.untrained)
    except UserError as error:
        return fail(error)
    print(f"{args.out}: drafter of {taken}{' before training' if args.untrained else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
