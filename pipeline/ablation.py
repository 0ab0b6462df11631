"""The finished cells of a grid beside one another: taus with intervals over prompts, seeds averaged, differences to the
first cell prompt by prompt, held-out numbers and weight shares over the steps.
"""

from __future__ import annotations

import json
from pathlib import Path

from data_prep.errors import UserError
from pipeline.bootstrap import seeds_difference, seeds_interval
from pipeline.comparison import SAME, read_report, value
from pipeline.grid import Cell, Grid

# Shares of the run whose mean weight per slot is kept: its first steps, and quarters of it.
STAGES = {
    "first 2 %": (0.0, 0.02),
    "to 25 %": (0.02, 0.25),
    "to 50 %": (0.25, 0.5),
    "to 75 %": (0.5, 0.75),
    "to the end": (0.75, 1.0),
}


def collect(grid: Grid, cells: list[Cell]) -> dict:
    """Everything that the table and the pictures show, from the reports and logs of `cells` (finished ones)."""
    if not cells:
        raise UserError("no cell is finished yet; run the same command without --collect")
    reports = {(cell.name, cell.seed): read_report(cell.folder / "report") for cell in cells}
    _check_pairs(cells, reports)
    first = next(iter(reports.values()))
    runs = {key: [[n - 1 for n in run] for run in report["emitted_per_step"]] for key, report in reports.items()}
    names = [name for name in grid.cells if any(cell.name == name for cell in cells)]
    found = {
        name: _cell([cell for cell in cells if cell.name == name], grid, reports, runs, names[0]) for name in names
    }
    return {
        "reference": names[0],
        "cells": found,
        "missing": len(grid.cells) * len(grid.seeds) - len(cells),
        "prompts": first["prompts"],
        "settings": first["settings"] | {"block_sizes": None},
        "versions": first["versions"],
        "greedy_outputs_equal": (
            None
            if first["settings"]["temperature"]
            else all(report["output_ids"] == first["output_ids"] for report in reports.values())
        ),
        "overrides": grid.overrides,
        "run": str(grid.run),
    }


def _check_pairs(cells: list[Cell], reports: dict) -> None:
    """UserError unless all cells were evaluated on the same prompts by the same target, and trained on the same
    data."""
    first = cells[0]
    for cell in cells[1:]:
        one, other = reports[first.name, first.seed], reports[cell.name, cell.seed]
        changed = [name for name in SAME if value(one, name) != value(other, name)]
        changed += [name for name in ("manifest_sha256",) if _training(first)[name] != _training(cell)[name]]
        if changed:
            raise UserError(
                f"{cell.folder} and {first.folder} differ in {', '.join(changed)}; their cells cannot be paired: "
                "run them with the same data, prompts and target"
            )


def _training(cell: Cell) -> dict:
    return json.loads((cell.folder / "drafter/training.json").read_text())


def _cell(cells: list[Cell], grid: Grid, reports: dict, runs: dict, reference: str) -> dict:
    name, seeds = cells[0].name, [cell.seed for cell in cells]
    tau, interval = seeds_interval([runs[name, seed] for seed in seeds])
    shared = [seed for seed in seeds if (reference, seed) in runs] if name != reference else []
    difference = (
        seeds_difference([runs[reference, seed] for seed in shared], [runs[name, seed] for seed in shared])
        if shared
        else (None, None)
    )
    slots = [reports[name, seed]["accepted_per_slot"] for seed in seeds]
    logs = [_lines(cell.folder / "metrics.jsonl") for cell in cells]
    return {
        "changes": grid.cells[name],
        "tau": tau,
        "interval": interval,
        "difference": difference[0],
        "difference_interval": difference[1],
        "difference_seeds": shared,
        "seeds": {
            seed: {
                "tau": reports[name, seed]["tau"],
                "emitted": [sum(run) for run in reports[name, seed]["emitted_per_step"]],
                "steps": [len(run) for run in reports[name, seed]["emitted_per_step"]],
            }
            for seed in seeds
        },
        "accepted_per_slot": [sum(column) / len(column) for column in zip(*slots)],
        "train_steps": cells[0].run.optim.max_steps or logs[0][-1]["step"],
        "curve": _curve([_lines(cell.folder / "heldout.jsonl") for cell in cells]),
        "weight_share": _weight_shares(logs),
    }


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _curve(logs: list[list[dict]]) -> list[tuple[int, float]]:
    """(step, held-out walk tau averaged over the seeds), at the steps that all seeds have."""
    by_step = [{line["step"]: line["heldout/walk_tau"] for line in log} for log in logs]
    return [
        (step, sum(log[step] for log in by_step) / len(by_step))
        for step in by_step[0]
        if all(step in log for log in by_step)
    ]


def _weight_shares(logs: list[list[dict]]) -> dict[str, list[float]]:
    """Stage of the run -> mean share of the weight that slot 1, 2, ... got, over its steps and all seeds."""
    shares = {}
    for stage, (begin, end) in STAGES.items():
        lines = [line for log in logs for line in log[int(begin * len(log)) : max(int(end * len(log)), 1)]]
        slots = [[v for name, v in line.items() if name.startswith("weight_share/")] for line in lines]
        shares[stage] = [sum(column) / len(column) for column in zip(*slots)]
    return shares


def markdown(results: dict) -> str:
    """The table, with what it says about itself."""
    cells, reference = results["cells"], results["reference"]
    lines = [
        f"| cell | tau | 95 % | minus {reference} | 95 % | tau of each seed | accepted per slot |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cell in cells.items():
        change, around = "", ""
        if cell["difference"] is not None:
            low, high = cell["difference_interval"]
            change, around = (
                f"{cell['difference']:+.3f}",
                f"{low:+.3f}..{high:+.3f}{' *' if low > 0 or high < 0 else ''}",
            )
        seeds = ", ".join(f"{seed['tau']:.3f}" for seed in cell["seeds"].values())
        slots = " ".join(f"{share:.2f}" for share in cell["accepted_per_slot"])
        lines.append(
            f"| {name} | {cell['tau']:.3f} | {cell['interval'][0]:.3f}..{cell['interval'][1]:.3f} | {change} | {around}"
            f" | {seeds} | {slots} |"
        )
    equal = {True: "yes", False: "NO", None: "not compared, tokens were sampled"}[results["greedy_outputs_equal"]]
    steps = sorted({cell["train_steps"] for cell in cells.values()})
    lines += [
        "",
        (
            f"{results['prompts']} prompts, {', '.join(map(str, steps))} training steps,"
            f" {results['settings']['max_new_tokens']} new tokens at most, {results['settings']['dtype']}. Intervals:"
            f" bootstrap over prompts, seeds averaged; * : 0 lies outside. All cells emitted the same text: {equal}."
        ),
    ]
    if results["missing"]:
        lines.append(f"{results['missing']} runs of the grid are not finished and not in the table.")
    return "\n".join(lines) + "\n"
