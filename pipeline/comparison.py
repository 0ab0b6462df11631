"""Reports of several evaluations side by side, with differences taken prompt by prompt against the first."""

from __future__ import annotations

import json
from pathlib import Path

from data_prep.errors import UserError
from pipeline.bootstrap import tau_difference

# What has to be the same for a prompt-by-prompt difference to mean anything.
SAME = ("prompt_token_ids", "target.weights_sha256", "template", "settings.max_new_tokens", "settings.temperature",
        "settings.stop_token_ids", "settings.dtype")


def read_report(path: Path) -> dict:
    """A report.json, or the one in a folder. UserError when there is none, or it is of another format."""
    path = path / "report.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"there is no report {path}; make it with launch/evaluate.py")
    report = json.loads(path.read_text())
    missing = [name for name in ("emitted_per_step", "tau_interval", "settings") if name not in report]
    if missing:
        raise UserError(f"{path} has no {', '.join(missing)}; evaluate again with this version, results are reused")
    return report


def value(report: dict, name: str):
    for part in name.split("."):
        report = report[part]
    return report


def compare(paths: list[Path]) -> list[dict]:
    """One row per report: name, tau with its interval, difference to the first with its interval, speed-up, whether the
    output is the first one's, steps and how many of them accepted each slot."""
    reports = [read_report(path) for path in paths]
    for path, report in zip(paths[1:], reports[1:]):
        other = [name for name in SAME if value(report, name) != value(reports[0], name)]
        if other:
            raise UserError(f"{path} and {paths[0]} differ in {', '.join(other)}; compare evaluations of the same"
                            " prompts by the same target")
    accepted = [[[n - 1 for n in run] for run in report["emitted_per_step"]] for report in reports]
    rows = []
    for path, report, own in zip(paths, reports, accepted):
        paired = tau_difference(accepted[0], own) if path is not paths[0] else None
        rows.append({"name": str(path.parent if path.name == "report.json" else path), "tau": report["tau"],
                     "interval": report["tau_interval"], "difference": paired and paired[0],
                     "difference_interval": paired and paired[1], "speedup": report["speedup"],
                     "lossless": report["lossless"], "same_output": report["output_ids"] == reports[0]["output_ids"],
                     "accepted_per_slot_counts": report["accepted_per_slot_counts"],
                     "steps": report["verification_steps"]})
    return rows


def format_rows(rows: list[dict]) -> str:
    """The table of `compare`."""
    width = max(len(row["name"]) for row in rows)
    lines = [f"{'':<{width}}    tau        95 %   difference           95 %   speed-up  output"
             "  steps: accepted slot 1, 2, ..."]
    for row in rows:
        ends = "-" if row["interval"] is None else "{:.2f}..{:.2f}".format(*row["interval"])
        tau = "-" if row["tau"] is None else f"{row['tau']:.3f}"
        if row["difference"] is None:
            difference, around, star = "-", "-", ""
        else:
            low, high = row["difference_interval"]
            difference, around = f"{row['difference']:+.3f}", f"{low:+.3f}..{high:+.3f}"
            star = " *" if low > 0 or high < 0 else ""
        speed = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        output = "same" if row["same_output"] else "other"
        counts = f"{row['steps']}: {' '.join(map(str, row['accepted_per_slot_counts']))}"
        lines.append(f"{row['name']:<{width}}  {tau:>5}  {ends:>10}  {difference:>11}  {around:>13}  {speed:>9}  "
                     f"{output:>6}  {counts}{star}")
    return "\n".join(lines)
