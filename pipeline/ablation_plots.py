"""PNG pictures of an ablation: taus with intervals, tau over the steps, and the paper's weight per slot over
training."""

from __future__ import annotations

from pathlib import Path

from pipeline.plots import TRAINED, UNTRAINED, pyplot


def plot_taus(results: dict, path: Path) -> None:
    """tau of every cell with its interval, the seeds as small points."""
    cells = results["cells"]
    figure, axis = pyplot.subplots(figsize=(8, 1.2 + 0.4 * len(cells)), layout="constrained")
    for place, cell in enumerate(cells.values()):
        axis.plot(cell["interval"], [place, place], color=UNTRAINED, linewidth=3)
        axis.plot([seed["tau"] for seed in cell["seeds"].values()], [place] * len(cell["seeds"]), "|", color="black")
        axis.plot(cell["tau"], place, marker="o", color=TRAINED)
    axis.axvline(cells[results["reference"]]["tau"], color=TRAINED, linewidth=0.8, linestyle=":")
    axis.set(
        yticks=range(len(cells)),
        yticklabels=list(cells),
        xlabel="tau; bar: 95 % over prompts, seeds averaged; strokes: each seed",
    )
    axis.invert_yaxis()
    axis.grid(alpha=0.3, axis="x")
    _save(figure, path)


def plot_curves(results: dict, path: Path) -> None:
    """Held-out walk tau over the optimizer steps, one line a cell."""
    figure, axis = pyplot.subplots(figsize=(9, 5), layout="constrained")
    colours = pyplot.get_cmap("tab20").colors
    for number, (name, cell) in enumerate(results["cells"].items()):
        if cell["curve"]:
            axis.plot(*zip(*cell["curve"]), marker="o", markersize=3, color=colours[number % len(colours)], label=name)
    axis.set(xlabel="optimizer step", ylabel="tau on held-out samples (walk), mean of the seeds")
    axis.grid(alpha=0.3)
    if any(cell["curve"] for cell in results["cells"].values()):
        axis.legend(frameon=False, fontsize=8)
    _save(figure, path)


def plot_weights(results: dict, path: Path) -> None:
    """Share of the weight that each slot gets, one panel a cell, one line a stage of the training."""
    cells, columns = results["cells"], min(4, len(results["cells"]))
    rows = -(-len(cells) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.2 * columns, 2.6 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(cells) :]:
        axis.remove()
    for axis, (name, cell) in zip(axes.flat, cells.items()):
        stages = [(stage, shares) for stage, shares in cell["weight_share"].items() if shares]
        for number, (stage, shares) in enumerate(stages):
            axis.plot(
                range(1, len(shares) + 1),
                shares,
                marker="o",
                markersize=3,
                label=stage,
                color=pyplot.get_cmap("viridis")(number / max(1, len(stages) - 1)),
            )
        axis.set(title=name, ylim=(0, None), xlabel="slot")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("share of the weight")
    axes[0, 0].legend(frameon=False, fontsize=7, title="steps", title_fontsize=7)
    _save(figure, path)


def _save(figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
