"""A grid of tiny runs: every cell is trained, exported and evaluated once, paired cells differ in their own keys
only."""

import json
import os
import shutil
import signal
import threading
import time

import pytest
import yaml

from data_prep.errors import UserError
from pipeline.drafter import DFlashDrafter
from tests.datasets import make_run_folder, read_metrics
from tests.evaluations import ROOT, script

OVERRIDES = {
    "drafter.block_size": 8,
    "drafter.num_layers": 1,
    "optim.max_steps": 6,
    "checkpoint.every": 3,
    "log.every": 3,
    "evaluation.every": 3,
    "evaluation.share": 0.2,
}
CELLS = {"decay": {"loss.credit": "decay"}, "prefix": {"loss.credit": "accepted_prefix"}}


@pytest.fixture(scope="module")
def ablate():
    return script("ablate")


def write_grid(path, **changes):
    grid = {
        "run": str(ROOT / "launch/runs/smoke.yaml"),
        "overrides": OVERRIDES,
        "cells": CELLS,
        "seeds": [0],
        "evaluate": {"prompts": [str(path.parent / "prompts.jsonl")], "max_new_tokens": 12},
    }
    path.write_text(yaml.safe_dump(grid | changes))
    return path


@pytest.fixture(scope="module")
def made(ablate, tmp_path_factory):
    """Data, and a grid of two cells that two tasks ran: the folder, and the command's arguments."""
    folder = tmp_path_factory.mktemp("ablation")
    data = make_run_folder(folder / "data")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt_token_ids": [5 + i, 9, 40 + i], "source": "ab"[i % 2]}) + "\n" for i in range(4))
    )
    argv = [
        "--grid",
        str(write_grid(folder / "grid.yaml")),
        "--out",
        str(folder / "out"),
        f"data.path={data / 'dataset'}",
        f"target.path={data / 'target'}",
    ]
    log = folder / "out/decay/seed0/train.log"
    threading.Thread(target=terminate_when_training, args=(log,), daemon=True).start()
    for task, code in (("0", 75), ("0", 0), ("1", 0)):
        assert ablate.main([*argv, "--task", task, "--num-tasks", "2"]) == code
    return folder, argv


def terminate_when_training(log):
    """SIGTERM to this process, as a cluster sends it, once the training command has printed something."""
    while not (log.is_file() and log.read_text().count("\n") > 1):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)


def stamps(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_tasks_share_the_cells_and_the_collecting_call_runs_none_again(ablate, made, capsys):
    folder, argv = made
    before = stamps(folder)
    assert ablate.main(argv) == 0
    printed = capsys.readouterr().out
    assert "2 cells, 2 finished; 0 to run here" in printed and "| prefix |" in printed
    assert before.items() <= stamps(folder).items()
    for name in ("taus.png", "curves.png", "weights.png"):
        assert (folder / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_paired_cells_start_from_the_same_weights_and_see_the_same_anchors(made):
    folders = [made[0] / "out" / name / "seed0" for name in CELLS]
    one, other = (DFlashDrafter.from_pretrained(folder / "checkpoints/untrained") for folder in folders)
    assert all(a.equal(b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    first, second = (read_metrics(folder)[0] for folder in folders)
    same = [name for name in first if name.startswith(("q/", "accuracy/")) or name in ("anchors", "tokens", "lr")]
    assert len(same) == 17 and [first[name] for name in same] == [second[name] for name in same]
    assert first["loss"] != second["loss"]


def test_the_results_are_those_of_the_reports_and_logs(ablate, made):
    folder, argv = made
    assert ablate.main([*argv, "--collect"]) == 0
    results = json.loads((folder / "out/ablation.json").read_text())
    assert results["reference"] == "decay" and results["greedy_outputs_equal"] is True and results["missing"] == 0
    for name, cell in results["cells"].items():
        run = folder / "out" / name / "seed0"
        report = json.loads((run / "report/report.json").read_text())
        assert cell["tau"] == pytest.approx(report["tau"]) and cell["seeds"]["0"]["steps"] == [
            len(steps) for steps in report["emitted_per_step"]
        ]
        assert set(report["by_source"]) == {"a", "b"}
        assert cell["curve"] == [
            [line["step"], line["heldout/walk_tau"]] for line in read_metrics(run, "heldout.jsonl")
        ]
        assert cell["train_steps"] == 6 and sum(cell["weight_share"]["to the end"]) == pytest.approx(1)
    taus = [results["cells"][name]["tau"] for name in CELLS]
    assert results["cells"]["prefix"]["difference"] == pytest.approx(taus[1] - taus[0])
    assert results["cells"]["decay"]["difference"] is None


def test_a_cell_that_was_told_to_stop_carries_on_from_its_checkpoint(made):
    """Task 0 got SIGTERM while its cell was being trained (the fixture)."""
    cell, other = (made[0] / "out" / name / "seed0" for name in CELLS)
    log = (cell / "train.log").read_text()
    assert "stopped on request after step 1;" in log and "resuming from" in log and "step 1 of 6" in log
    assert "stopped" not in (other / "train.log").read_text()
    assert (
        [line["step"] for line in read_metrics(cell)]
        == [line["step"] for line in read_metrics(other)]
        == list(range(1, 7))
    )


def test_a_cell_that_was_trained_otherwise_is_refused_by_key(ablate, made, capsys):
    assert ablate.main([*made[1], "optim.lr=1e-2"]) == 2
    assert "optim.lr was 0.003, is 0.01); move it away" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, more, message",
    [
        ({"cells": {"x": {"loss.credit": "dpase"}}}, [], "cell x: "),
        ({"cells": {"a/b": {}}}, [], "a name becomes a folder"),
        ({"sedes": [1]}, [], "sedes: Extra inputs"),
        ({}, ["loss.credit=uniform"], "loss.credit is what cell decay differs in"),
        ({}, ["seed=3"], "seed cannot be set for a cell"),
        ({}, ["--cells", "none"], "--cells none: "),
        ({"evaluate": {}}, [], "names no test prompts"),
        ({}, ["--task", "2", "--num-tasks", "2"], "--task 2 of --num-tasks 2"),
        ({}, ["--task", "0", "--collect"], "--collect runs nothing"),
        ({}, ["--collect"], "no cell is finished yet"),
    ],
)
def test_a_wrong_grid_is_refused_before_anything_runs(ablate, tmp_path, capsys, changes, more, message):
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [5]}\n')
    assert (
        ablate.main(
            ["--grid", str(write_grid(tmp_path / "grid.yaml", **changes)), "--out", str(tmp_path / "out"), *more]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_a_cell_whose_training_fails_is_named_with_its_reason_and_the_others_run(ablate, made, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [5]}\n')
    cells = {"bad": {"data.path": str(tmp_path / "nowhere")}, "decay": CELLS["decay"]}
    grid = write_grid(tmp_path / "grid.yaml", cells=cells)
    data = made[0] / "data"
    argv = ["--grid", str(grid), "--out", str(tmp_path / "out"), f"target.path={data / 'target'}"]
    shutil.copytree(made[0] / "out/decay", tmp_path / "out/decay")
    assert ablate.main([*argv, "--cells", "bad,decay"]) == 2
    seen = capsys.readouterr()
    assert (
        "bad, seed 0: training ended with code 2: error: no dataset in" in seen.err
        and "1 of 2 cells failed" in seen.err
    )
    assert "| decay |" in seen.out and "1 runs of the grid are not finished" in seen.out


@pytest.mark.parametrize("name", ["dpace", "smollm2"])
def test_the_ready_grids_are_valid(ablate, name, tmp_path):
    grid = ablate.read_grid(ROOT / f"launch/grids/{name}.yaml")
    cells = ablate.cells_of(grid, tmp_path, [])
    assert len(cells) == len(grid.cells) * len(grid.seeds) and len({cell.folder for cell in cells}) == len(cells)
    with pytest.raises(UserError, match="is what cell decay differs in"):
        ablate.cells_of(grid, tmp_path, ["loss.credit=decay"])
