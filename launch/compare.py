"""Several evaluations side by side: a table and a plot, with paired differences of tau against the first.

    python launch/compare.py REPORT_A/report.json REPORT_B/report.json ... [--out comparison.png]

The reports have to be of the same prompts and the same target: their differences are then taken prompt by prompt and
bootstrapped over prompts (95 %), which tells apart drafters whose own intervals overlap. A difference whose interval
does not hold 0 is marked with a star. Exits 2 on a user's error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from data_prep.errors import UserError
from pipeline.comparison import compare, format_rows
from pipeline.plots import plot_comparison


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="report.json files, or their folders")
    parser.add_argument("--out", type=Path, metavar="PICTURE.png", help="draw the taus with their intervals")
    args = parser.parse_args(argv)
    try:
        rows = compare(args.reports)
        print(format_rows(rows))
        if args.out:
            plot_comparison(rows, args.out)
            print(args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
