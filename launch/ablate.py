"""Trains, exports and evaluates every cell of a grid, and compares the cells prompt by prompt.

    python launch/ablate.py --grid launch/grids/dpace.yaml --out runs/dpace --prompts heldout.jsonl \
        data.path=DATASET target.path=TARGET
    python launch/ablate.py ... --task 3 --num-tasks 8      one of eight tasks of a job array, each cell is one task's
    python launch/ablate.py ... --collect                   the table of what is finished

OUT/CELL/seedN holds a cell's checkpoints, log, drafter and report. Run again, finished cells are skipped and begun ones
carry on from their newest checkpoint. Without --task the missing cells are run and the results of all are collected:
OUT/ablation.json, ablation.md, taus.png, curves.png, weights.png. Every key of the run file can be set for all cells as
section.key=value. SIGTERM or SIGUSR1 lets the running cell save its state.
Exit codes: 0 all done, 2 a user's error or failed cells, 75 stopped on request.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

from data_prep.errors import UserError
from data_prep.files import write_atomic
from data_prep.manifest import flatten
from pipeline import ablation, ablation_plots, runtime
from pipeline.comparison import value
from pipeline.config import FREE_ON_RESUME
from pipeline.evaluation import Evaluation
from pipeline.evaluation_target import EvaluationTarget, Settings
from pipeline.export import export
from pipeline.grid import Cell, Grid, cells_of, read_grid
from pipeline.methods import Loop, Walk
from pipeline.plots import plot_acceptance
from pipeline.prompts import Conversation, read_conversations
from pipeline.results import ResultLog
from pipeline.stop import PREEMPTED, SIGNALS

ROOT = Path(__file__).resolve().parent.parent


class Preempted(Exception):
    """The training of a cell was asked to stop and has saved its state."""


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, required=True, help="grid file; the ready ones are in launch/grids/")
    parser.add_argument("--out", type=Path, required=True, help="folder of all cells and of the collected results")
    parser.add_argument(
        "--prompts",
        type=Path,
        action="append",
        metavar="F.jsonl",
        help="test prompts, instead of the grid's; may be repeated",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="the first N conversations of every file, instead of the grid's"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="length limit of a response, instead of the grid's"
    )
    parser.add_argument("--seeds", type=_numbers, metavar="N,N", help="instead of the grid's")
    parser.add_argument(
        "--cells", type=_names, metavar="NAME,NAME", help="these cells only; the first is the reference"
    )
    parser.add_argument(
        "--ds_config", default=str(ROOT / "ds_configs/zero3.json"), help="DeepSpeed JSON (default ZeRO-3)"
    )
    parser.add_argument("--num-tasks", type=int, default=1, metavar="N", help="tasks that share the cells (default 1)")
    parser.add_argument("--task", type=int, metavar="I", help="which of them this one is, from 0; it collects nothing")
    parser.add_argument("--collect", action="store_true", help="run nothing: the table of the cells that are finished")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for example optim.max_steps=500")
    args = parser.parse_intermixed_args(argv)
    if not 0 <= (args.task or 0) < args.num_tasks:
        raise UserError(f"--task {args.task} of --num-tasks {args.num_tasks}: tasks are numbered from 0")
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit is {args.limit}; it must be at least 1")
    if args.collect and args.task is not None:
        raise UserError("--collect runs nothing and --task runs its cells; pass one of them")
    return args


def chosen_grid(args: argparse.Namespace) -> Grid:
    """The grid of the file with what the command line puts in its place."""
    grid = read_grid(args.grid)
    given = {
        name: getattr(args, name) for name in ("prompts", "limit", "max_new_tokens") if getattr(args, name) is not None
    }
    grid = grid.model_copy(update={"evaluate": grid.evaluate.model_copy(update=given)})
    if args.seeds:
        grid = grid.model_copy(update={"seeds": args.seeds})
    if args.cells:
        if unknown := [name for name in args.cells if name not in grid.cells]:
            raise UserError(f"--cells {','.join(unknown)}: {args.grid} has {', '.join(grid.cells)}")
        grid = grid.model_copy(update={"cells": {name: grid.cells[name] for name in args.cells}})
    if not grid.evaluate.prompts:
        raise UserError(f"{args.grid} names no test prompts; pass --prompts F.jsonl")
    return grid


class Runner:
    """Runs cells one after another in this process; the target is loaded once, when the first cell needs it."""

    def __init__(self, grid: Grid, ds_config: str):
        self.grid, self.ds_config = grid, ds_config
        section = grid.evaluate
        self.settings = Settings(
            section.max_new_tokens,
            dtype=section.dtype,
            template_args=section.template_args,
            ignore_eos=section.ignore_eos,
            method="walk" if section.walk else "loop",
        )
        self.conversations: list[Conversation] = read_conversations(section.prompts, section.limit)
        self.target: EvaluationTarget | None = None

    def finished(self, cell: Cell) -> bool:
        """Whether the cell's report is there and answers what the grid asks. UserError where its drafter was trained
        otherwise."""
        check_training(cell)
        path = cell.folder / "report/report.json"
        if not path.is_file():
            return False
        report = json.loads(path.read_text())
        wanted = {
            "prompts_sha256": Evaluation.prompts_sha256(self.conversations),
            "template.args": self.settings.template_args,
            "settings.max_new_tokens": self.settings.max_new_tokens,
            "settings.ignore_eos": self.settings.ignore_eos,
            "settings.method": self.settings.method,
        }
        wanted |= {"settings.dtype": self.settings.dtype} if self.settings.dtype else {}
        return all(value(report, name) == want for name, want in wanted.items())

    def run(self, cell: Cell) -> None:
        drafter = cell.folder / "drafter"
        if not drafter.is_dir():
            self._train(cell)
            export(cell.folder / "checkpoints", drafter)
        if self.target is None:
            self.target = EvaluationTarget(cell.run.target_path, self.settings)
        folders = {"drafter": drafter}
        method = (Walk if self.grid.evaluate.walk else Loop)(self.target, self.settings, folders)
        evaluation = Evaluation(self.target, self.settings, folders, method, self.conversations)
        out = cell.folder / "report"
        out.mkdir(exist_ok=True)
        log = ResultLog(out, evaluation.configuration)
        evaluation.run(log)
        report = evaluation.report(log)
        plot_acceptance(report, out / "acceptance.png")
        write_atomic(out / "report.json", (json.dumps(report) + "\n").encode())
        print(f"{cell}: tau {report['tau']:.4f}" if report["tau"] else f"{cell}: nothing was drafted", flush=True)

    def _train(self, cell: Cell) -> None:
        """The training command as a user would start it; what it prints goes to OUT/CELL/seedN/train.log."""
        cell.folder.mkdir(parents=True, exist_ok=True)
        start = [sys.executable]
        if self.grid.ranks > 1:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            start = [
                str(Path(sys.executable).with_name("deepspeed")),
                "--num_accelerators",
                str(self.grid.ranks),
                "--master_port",
                port,
            ]
        command = [
            *start,
            str(ROOT / "launch/train.py"),
            "--ds_config",
            self.ds_config,
            "--run",
            str(self.grid.run),
            "--resume",
            "auto",
            *cell.overrides,
        ]
        log = cell.folder / "train.log"
        print(f"{cell}: training, see {log}", flush=True)
        with log.open("a") as output:
            print("+", *command, file=output, flush=True)
            child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            stop = cell.folder / "stop"
            before = {number: signal.signal(number, lambda *_: stop.touch()) for number in SIGNALS}
            try:
                code = child.wait()
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
        if code == PREEMPTED:
            raise Preempted(f"{cell}: stopped on request, its state is saved; run the same command again")
        if code:
            last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1]
            raise UserError(f"{cell}: training ended with code {code}: {last} (all of it in {log})")


def check_training(cell: Cell) -> None:
    """UserError where the cell's drafter was trained with another configuration than the grid asks for now."""
    path = cell.folder / "drafter/training.json"
    if not path.is_file():
        return
    trained, wanted = flatten(json.loads(path.read_text())["run"]), flatten(cell.run.model_dump(mode="json"))
    changed = [
        f"{key} was {trained.get(key)}, is {new}"
        for key, new in wanted.items()
        if (key not in FREE_ON_RESUME or key.startswith("drafter.init")) and trained.get(key) != new
    ]
    if changed:
        raise UserError(
            f"{cell}: {cell.folder} was trained with another configuration ({'; '.join(changed)}); move it away, or "
            "choose another --out"
        )


def collect(grid: Grid, cells: list[Cell], out: Path) -> None:
    """The results of all finished cells, beside one another."""
    results = ablation.collect(grid, cells)
    write_atomic(out / "ablation.json", (json.dumps(results, indent=1) + "\n").encode())
    table = ablation.markdown(results)
    write_atomic(out / "ablation.md", table.encode())
    ablation_plots.plot_taus(results, out / "taus.png")
    ablation_plots.plot_curves(results, out / "curves.png")
    ablation_plots.plot_weights(results, out / "weights.png")
    print(table)
    for name in ("ablation.json", "ablation.md", "taus.png", "curves.png", "weights.png"):
        print(out / name)


def ablate(args: argparse.Namespace) -> int:
    grid = chosen_grid(args)
    cells = cells_of(grid, args.out, args.overrides)
    runner = Runner(grid, args.ds_config)
    done = [cell for cell in cells if runner.finished(cell)]
    mine = [] if args.collect else cells if args.task is None else cells[args.task :: args.num_tasks]
    missing = [cell for cell in mine if cell not in done]
    print(f"{len(cells)} cells, {len(done)} finished; {len(missing)} to run here", flush=True)
    failures = []
    for cell in missing:
        try:
            runner.run(cell)
            done.append(cell)
        except UserError as error:
            failures.append(str(error))
            print(f"error: {error}", file=sys.stderr, flush=True)
    if args.task is None:
        args.out.mkdir(parents=True, exist_ok=True)
        collect(grid, [cell for cell in cells if cell in done], args.out)
    if failures:
        raise UserError(
            f"{len(failures)} of {len(missing)} cells failed; run the same command again when the cause is gone"
        )
    return 0


def main(argv: list[str] | None = None) -> int:
    try:
        return ablate(parse_arguments(argv))
    except Preempted as stopped:
        print(stopped, flush=True)
        return PREEMPTED
    except UserError as error:
        return runtime.fail(error)


if __name__ == "__main__":
    sys.exit(main())
