"""Measure a drafter on prompts: accepted length, acceptance per slot, speed-up, and whether output is the target's own.

    python launch/evaluate.py --target TARGET --drafter DRAFTER --prompts PROMPTS.jsonl --out REPORT
    python launch/evaluate.py ... --benchmark gsm8k mt-bench --benchmarks FOLDER --limit 80 --temperature 0 1
    python launch/evaluate.py ... --task 0 --num-tasks 2      one of two processes; without --task the report of both

A line of PROMPTS holds a conversation as `python -m data_prep prompts` writes or reads it (`messages`, `turns`,
`conversations`, `prompt`; `tools`), or `prompt_token_ids`. As in training data the target answers every turn in its own
words, whatever answers the line has. Every prompt is run plainly (block size 1) and drafted, one sequence at a time;
with --walk the same greedy steps come from batches, many times faster and without times; with --engine and --url a
running vLLM or SGLang server drafts and counts, and launch/compare.py sets its report beside the loop's.
REPORT/results*.jsonl keep finished prompts: run again, it carries on. Several temperatures get a folder each. Cost: two
generations a prompt, three with --baseline. Exits 2 on a user's error.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from data_prep.errors import UserError
from data_prep.files import write_atomic
from pipeline import runtime
from pipeline.evaluation import Evaluation
from pipeline.evaluation_target import DTYPES, EvaluationTarget, Settings
from pipeline.methods import Loop, Method, Served, Walk
from pipeline.plots import plot_acceptance, plot_training
from pipeline.prompts import BENCHMARKS, Conversation, benchmark_files, read_conversations
from pipeline.report_text import format_table, markdown
from pipeline.results import ResultLog

OUTPUTS = ("report.json", "report.md", "prompts.jsonl", "acceptance.png", "training.png")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face folder of the target")
    parser.add_argument("--drafter", type=Path, required=True, help="folder of the drafter in the public format")
    parser.add_argument("--baseline", type=Path, help="a second drafter for the same prompts, e.g. the untrained one")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], metavar="F.jsonl", help="files of prompts")
    parser.add_argument(
        "--benchmark",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"NAME.jsonl of the folder --benchmarks, for example {', '.join(BENCHMARKS)}",
    )
    parser.add_argument("--benchmarks", type=Path, metavar="DIR", help="folder of the benchmarks' prompts")
    parser.add_argument("--limit", type=int, metavar="N", help="take the first N conversations of every file")
    parser.add_argument("--out", type=Path, required=True, help="folder of the report; results in it are reused")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="length limit of a response (default 48)")
    parser.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=[0.0],
        metavar="T",
        help="0 is greedy (default); above 0 samples; several give a report each",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument(
        "--template-args",
        type=json.loads,
        default={},
        metavar="JSON",
        help="arguments of the chat template, e.g. '{\"enable_thinking\": false}'",
    )
    parser.add_argument(
        "--dataset",
        type=Path,
        metavar="DIR",
        help=(
            "the dataset the drafter was trained on, to compare the "
            "chat template with (default: what the export wrote beside the weights)"
        ),
    )
    parser.add_argument("--ignore-eos", action="store_true", help="generate past the target's stop tokens")
    parser.add_argument("--walk", action="store_true", help="greedy steps from batches: the same counts, no times")
    parser.add_argument(
        "--engine", choices=("vllm", "sglang"), help="count in the server at --url, which drafts with --drafter"
    )
    parser.add_argument("--url", help="the server's API, for example http://node1:8000/v1")
    parser.add_argument(
        "--num-tasks", type=int, default=1, metavar="N", help="processes that share the prompts (default 1)"
    )
    parser.add_argument("--task", type=int, metavar="I", help="which of them this one is, from 0; it writes no report")
    parser.add_argument("--history", type=Path, help="the training run's metrics.jsonl, to draw its curves")
    parser.add_argument("--show", type=Path, action=Show, metavar="OUT", help="print a finished report again and end")
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit is {args.limit}; it must be at least 1")
    if not 0 <= (args.task or 0) < args.num_tasks:
        raise UserError(f"--task {args.task} of --num-tasks {args.num_tasks}: tasks are numbered from 0")
    if bool(args.engine) != bool(args.url):
        raise UserError("--engine and --url belong together: pass both or neither")
    if args.engine and (args.walk or args.baseline or args.num_tasks > 1):
        raise UserError(
            "--engine asks one server for one answer at a time: leave out --walk, --baseline and --num-tasks"
        )
    if bool(args.benchmark) != bool(args.benchmarks):
        raise UserError("--benchmark NAME ... and --benchmarks DIR belong together: pass both or neither")
    if not args.prompts and not args.benchmark:
        raise UserError("there are no prompts: pass --prompts F.jsonl, or --benchmark NAME with --benchmarks DIR")
    if args.history and not args.history.is_file():
        raise UserError(f"--history {args.history} does not exist; pass the run's metrics.jsonl or leave it out")
    return args


def method_of(
    args: argparse.Namespace, target: EvaluationTarget, settings: Settings, folders: dict[str, Path]
) -> Method:
    if not args.engine:
        return (Walk if args.walk else Loop)(target, settings, folders)
    return Served(settings, args.drafter, args.target, target.stop_token_ids, args.url)


def evaluate(
    args: argparse.Namespace, target: EvaluationTarget, settings: Settings, conversations: list[Conversation], out: Path
) -> None:
    """One temperature: the missing records, and the report unless this is one task of several."""
    folders = {"drafter": args.drafter} | ({"baseline": args.baseline} if args.baseline else {})
    evaluation = Evaluation(
        target, settings, folders, method_of(args, target, settings, folders), conversations, args.dataset
    )
    out.mkdir(parents=True, exist_ok=True)
    log = ResultLog(out, evaluation.configuration, args.task)
    facts = evaluation.facts["settings"]
    print("settings:", ", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    if warning := evaluation.template_warning():
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    if log.changes:
        print(f"{log.path} holds results of another configuration, which are not used: {'; '.join(log.changes)}")
    if log.records:
        print(f"resuming: {len(log.records)} of {len(evaluation.turns())} prompts are done in {out}", flush=True)
    evaluation.run(log, args.task or 0, 1 if args.task is None else args.num_tasks)
    if args.task is not None:
        print(f"task {args.task} of {args.num_tasks} is done; without --task the same command writes the report")
        return
    report = evaluation.report(log)
    lines = "".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in report["prompt_token_ids"])
    write_atomic(out / "prompts.jsonl", lines.encode())
    plot_acceptance(report, out / "acceptance.png")
    if args.history:
        plot_training(args.history, out / "training.png")
    write_atomic(out / "report.md", markdown(report).encode())
    write_atomic(out / "report.json", (json.dumps(report) + "\n").encode())
    show(out)


def show(folder: Path) -> None:
    """Print the table of a finished report and where its files are."""
    path = folder / "report.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no report.json; run launch/evaluate.py with --out {folder} to its end")
    print(format_table(json.loads(path.read_text())))
    for name in OUTPUTS:
        if (folder / name).is_file():
            print(folder / name)


class Show(argparse.Action):
    """`--show FOLDER` prints a finished report and ends, as --help does; no other argument is needed."""

    def __call__(self, parser, namespace, values, option_string=None):
        show(values)
        parser.exit()


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse_arguments(argv)
        settings = [
            Settings(
                args.max_new_tokens,
                temperature,
                args.seed,
                args.dtype,
                args.template_args,
                args.ignore_eos,
                args.engine or ("walk" if args.walk else "loop"),
            )
            for temperature in args.temperature
        ]
        files = [*args.prompts, *(benchmark_files(args.benchmark, args.benchmarks) if args.benchmark else [])]
        conversations = read_conversations(files, args.limit)
        target = EvaluationTarget(args.target, settings[0])
        for one in settings:
            out = args.out if len(settings) == 1 else args.out / f"temperature-{one.temperature:g}"
            evaluate(args, target, one, conversations, out)
    except UserError as error:
        return runtime.fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
