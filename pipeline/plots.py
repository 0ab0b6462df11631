"""PNG pictures of a report: acceptance per slot, and the curves of the training run that made the drafter."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402  (the backend has to be chosen first)

from data_prep.errors import UserError  # noqa: E402

TRAINED, UNTRAINED = "#1f6fb4", "#9a9a9a"
# Key of the training log -> what its curve shows.
CURVES = {
    "loss": "loss",
    "accepted_length": "tau on training blocks\n(teacher-forced)",
    "accuracy": "share of right slots",
    "lr": "learning rate",
}


def plot_acceptance(report: dict, path: Path) -> None:
    """Two panels over the slots of a block: cumulative and conditional acceptance, trained against untrained."""
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    baseline = [("untrained", report["baseline"], UNTRAINED)] if "baseline" in report else []
    for name, block, colour in [("trained", report, TRAINED), *baseline]:
        label = f"{name}, tau = {block['tau']:.2f}" if block["tau"] is not None else f"{name}, no step verified"
        for axis, key in zip(axes, ("accepted_per_slot", "accepted_per_slot_conditional")):
            shares = [float("nan") if share is None else share for share in block[key]]
            axis.plot(range(1, len(shares) + 1), shares, marker="o", markersize=5, color=colour, label=label)
    axes[0].set(title="slot and all before it accepted", ylabel="share of verification steps", ylim=(-0.02, 1.02))
    axes[1].set(title="slot accepted, given the slot before")
    for axis in axes:
        axis.set_xlabel("slot of the block")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_training(history: Path, path: Path) -> None:
    """One panel for each key of CURVES that the training log (a JSON line a step, with `step`) holds."""
    if not history.is_file():
        raise UserError(f"the training log {history} does not exist; pass the run's metrics.jsonl with --history")
    # A line without its end was cut by a killed run.
    rows = [json.loads(line) for line in history.read_text().splitlines() if line.endswith("}")]
    series = {key: [(row["step"], row[key]) for row in rows if key in row] for key in CURVES}
    series = {key: points for key, points in series.items() if points}
    if not series:
        raise UserError(f"{history} holds none of {', '.join(CURVES)}; pass the run's metrics.jsonl with --history")
    rows_of_two = (len(series) + 1) // 2
    figure, axes = pyplot.subplots(rows_of_two, 2, figsize=(10, 3.4 * rows_of_two), squeeze=False, layout="constrained")
    for axis in axes.flat[len(series) :]:
        axis.remove()
    for axis, (key, points) in zip(axes.flat, series.items()):
        steps, values = zip(*points)
        noisy = key != "lr" and len(values) > 20
        axis.plot(steps, values, color=TRAINED, linewidth=1, alpha=0.35 if noisy else 1)
        if noisy:
            axis.plot(steps, _running_mean(values, len(values) // 20), color=TRAINED, linewidth=2)
        axis.set(xlabel="optimizer step", ylabel=CURVES[key])
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _running_mean(values: tuple[float, ...], width: int) -> list[float]:
    """Mean of each value and up to `width` values before it."""
    windows = [values[max(0, i - width) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def plot_comparison(rows: list[dict], path: Path) -> None:
    """tau of every report with its interval."""
    rows = [row for row in rows if row["interval"] is not None]
    figure, axis = pyplot.subplots(figsize=(8, 1 + 0.5 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        axis.plot(row["interval"], [place, place], color=UNTRAINED, linewidth=3)
        axis.plot(row["tau"], place, marker="o", color=TRAINED)
    axis.set(yticks=range(len(rows)), yticklabels=[row["name"] for row in rows], xlabel="tau, 95 % over prompts")
    axis.invert_yaxis()
    axis.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
