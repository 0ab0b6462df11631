"""Command line of data preparation: `python -m data_prep {prompts,respond,extract,merge,verify,estimate,inspect}`.

Exit status: 0 done, 1 `verify` found a bad dataset, 2 a usage or input error, 130 interrupted.
"""

import argparse
import os
import sys
from collections import Counter

from .arguments import build_parser
from .errors import UserError


def _print_counts(counts: Counter) -> None:
    print("; ".join(f"{name} {count}" for name, count in counts.items()))


def _prompts(args: argparse.Namespace) -> int:
    from .prompts import prepare_benchmarks, prepare_prompts

    if args.benchmark:
        counts = prepare_benchmarks(args.inputs, args.out)
    else:
        counts = prepare_prompts(
            args.inputs,
            args.out,
            args.heldout,
            similarity=args.similarity,
            target=args.target,
            template_args=args.template_args,
        )
    _print_counts(counts)
    return 0


def _respond(args: argparse.Namespace) -> int:
    from .responses import respond

    counts = respond(
        args.target,
        args.prompts,
        args.out,
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        template_args=args.template_args,
        sample=args.sample,
        seed=args.seed,
        servers=args.server,
        concurrency=args.concurrency,
        timeout=args.timeout,
        keep_answers=args.keep_answers,
        num_tasks=args.num_tasks,
        task_id=args.task_id,
    )
    _print_counts(counts)
    return 0


def _extract(args: argparse.Namespace) -> int:
    from .extract import extract

    options = {
        name: getattr(args, name)
        for name in (
            "layer_ids",
            "mask_token_id",
            "max_length",
            "shard_bytes",
            "batch_tokens",
            "storage",
            "last_hidden",
            "drop",
            "dtype",
            "device_map",
            "force",
            "num_tasks",
            "task_id",
        )
    }
    extract(args.target, args.responses, args.out, **options)
    return 0


def _merge(args: argparse.Namespace) -> int:
    if not args.made.is_dir():
        from .merge_responses import merge_responses

        print(f"{args.made}: {merge_responses(args.made)} lines of all tasks")
        return 0
    from .merge import merge

    plan = merge(args.made).plan
    print(f"{args.made} is sealed: {plan.shards} shards, {plan.samples} samples, {plan.tokens} tokens")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from .verify import format_report, verify

    if args.recompute and args.target is None:
        raise UserError(f"--recompute {args.recompute} needs the model: pass --target TARGET.")
    try:
        report = verify(args.dataset, target=args.target, recompute=args.recompute)
    except UserError as error:  # a dataset that cannot even be read is a bad one
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(format_report(args.dataset, report))
    return 1 if report.findings else 0


def _estimate(args: argparse.Namespace) -> int:
    from .estimate import estimate

    storage = {"storage": args.storage, "last_hidden": args.last_hidden}
    print(estimate(args.target, args.tokens, features=args.layers, max_length=args.max_length, **storage))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from .show import show_dataset, show_sample

    print(show_dataset(args.dataset) if args.key is None else show_sample(args.dataset, args.key, args.target))
    return 0


STAGES = {
    "prompts": _prompts,
    "respond": _respond,
    "extract": _extract,
    "merge": _merge,
    "verify": _verify,
    "estimate": _estimate,
    "inspect": _inspect,
}


def main(argv: list[str] | None = None) -> int:
    """Run one stage; returns the exit status."""
    args = build_parser().parse_args(argv)
    if args.quiet:
        os.environ["TQDM_DISABLE"] = "1"  # tqdm reads it when it is imported, which the stages do
    try:
        return STAGES[args.stage](args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command carries on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
