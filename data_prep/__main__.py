"""Command line of data preparation: `python -m data_prep {prompts,respond,extract,verify,estimate,inspect}`.

Exit status: 0 done, 1 `verify` found a bad dataset, 2 a usage or input error, 130 interrupted.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from .errors import UserError

FLOW = """\
The stages in order, for a target in the folder TARGET:
  python -m data_prep prompts   my.jsonl --out prompts --heldout 24
  python -m data_prep respond   --target TARGET --prompts prompts/train.jsonl --out responses.jsonl
  python -m data_prep estimate  --target TARGET --tokens 1000000
  python -m data_prep extract   --target TARGET --responses responses.jsonl --out dataset
  python -m data_prep verify    dataset --target TARGET --recompute 8
  python -m data_prep inspect   dataset 000000
Every stage that takes long can be interrupted; the same command carries on."""


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _layer_ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _bytes(text: str) -> int:
    return int(float(text))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


# argparse names the type in its message: "argument --layer-ids: invalid list like 1,8,15 value: 'x'"
_json_object.__name__ = 'JSON object like {"enable_thinking": false}'
_layer_ids.__name__ = "list like 1,8,15"
_bytes.__name__ = "number of bytes like 2e9"
_positive.__name__ = "positive number"


def _print_counts(counts: Counter) -> None:
    print("; ".join(f"{name} {count}" for name, count in counts.items()))


def _prompts(args: argparse.Namespace) -> int:
    from .prompts import prepare_prompts

    _print_counts(prepare_prompts(args.inputs, args.out, args.heldout))
    return 0


def _respond(args: argparse.Namespace) -> int:
    from .responses import respond

    settings = {
        "max_new_tokens": args.max_new_tokens,
        "batch_size": args.batch_size,
        "template_args": args.template_args,
    }
    _print_counts(respond(args.target, args.prompts, args.out, **settings))
    return 0


def _extract(args: argparse.Namespace) -> int:
    from .extract import extract

    extract(
        args.target,
        args.responses,
        args.out,
        layer_ids=args.layer_ids,
        mask_token_id=args.mask_token_id,
        max_length=args.max_length,
        shard_bytes=args.shard_bytes,
        batch_tokens=args.batch_tokens,
    )
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

    print(estimate(args.target, args.tokens, features=args.layers, max_length=args.max_length))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from .show import show_dataset, show_sample

    print(show_dataset(args.dataset) if args.key is None else show_sample(args.dataset, args.key, args.target))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of all stages."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m data_prep", description=FLOW, formatter_class=raw)
    stages = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")

    def stage(name: str, run: Any, summary: str, example: str) -> argparse.ArgumentParser:
        sub = stages.add_parser(
            name, help=summary, description=summary, epilog=f"example:\n  {example}", formatter_class=raw
        )
        sub.set_defaults(run=run)
        return sub

    sub = stage(
        "prompts",
        _prompts,
        "Bring prompts of any common spelling into one JSONL schema, drop exact duplicates, split off held-out ones.",
        "python -m data_prep prompts a.jsonl b.jsonl --out prompts --heldout 24",
    )
    sub.add_argument(
        "inputs", nargs="+", type=Path, metavar="IN.jsonl", help="lines with messages, conversations, turns or prompt"
    )
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for train.jsonl and heldout.jsonl")
    sub.add_argument(
        "--heldout", type=int, required=True, metavar="N", help="prompts to hold out, chosen by a hash of their text"
    )

    sub = stage(
        "respond",
        _respond,
        "Let the target answer the prompts, greedily; an interrupted run carries on.",
        "python -m data_prep respond --target TARGET --prompts prompts/train.jsonl --out responses.jsonl \\\n"
        "      --max-new-tokens 512 --template-args '{\"enable_thinking\": false}'",
    )
    sub.add_argument(
        "--target", type=Path, required=True, metavar="DIR", help="local Hugging Face folder of the target"
    )
    sub.add_argument("--prompts", type=Path, required=True, metavar="F.jsonl", help="what `prompts` wrote")
    sub.add_argument(
        "--out", type=Path, required=True, metavar="F2.jsonl", help="a line per assistant turn; settings go beside it"
    )
    sub.add_argument(
        "--max-new-tokens", type=_positive, default=128, metavar="N", help="longest response (default 128)"
    )
    sub.add_argument(
        "--batch-size", type=_positive, default=64, metavar="N", help="prompts generated together (default 64)"
    )
    sub.add_argument(
        "--template-args", type=_json_object, default={}, metavar="JSON", help="chat template arguments of serving"
    )

    sub = stage(
        "extract",
        _extract,
        "Store the target's hidden states over prompt + response as webdataset shards; killed anywhere, it carries on.",
        "python -m data_prep extract --target TARGET --responses responses.jsonl --out dataset",
    )
    sub.add_argument("--target", type=Path, required=True, metavar="DIR", help="the target that wrote the responses")
    sub.add_argument("--responses", type=Path, required=True, metavar="F.jsonl", help="what `respond` wrote")
    sub.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="dataset folder: manifest.json, index.jsonl, shards"
    )
    sub.add_argument(
        "--layer-ids", type=_layer_ids, metavar="1,8,..", help="decoder layers to store (default: 5, evenly spread)"
    )
    sub.add_argument(
        "--mask-token-id", type=int, metavar="N", help="embedding row that text never uses (default: see the README)"
    )
    sub.add_argument(
        "--max-length", type=_positive, default=3072, metavar="N", help="tokens kept of a sample (default 3072)"
    )
    sub.add_argument(
        "--shard-bytes", type=_bytes, default=2_000_000_000, metavar="N", help="size of a shard (default 2e9)"
    )
    sub.add_argument(
        "--batch-tokens", type=_positive, default=8192, metavar="N", help="positions of a batch (default 8192)"
    )

    sub = stage(
        "verify",
        _verify,
        "Check manifest, hashes, keys and every sample; exit status 1 and the names of what is bad.",
        "python -m data_prep verify dataset --target TARGET --recompute 8",
    )
    sub.add_argument("dataset", type=Path, metavar="DIR", help="dataset folder")
    sub.add_argument("--target", type=Path, metavar="T", help="compare with this target too")
    sub.add_argument(
        "--recompute", type=int, default=0, metavar="N", help="samples to run through the target again (default 0)"
    )

    sub = stage(
        "estimate",
        _estimate,
        "Bytes per token, per sample and in all, from the target's config.json alone.",
        "python -m data_prep estimate --target TARGET --tokens 100000000",
    )
    sub.add_argument("--target", type=Path, required=True, metavar="DIR", help="target's folder, or a config.json")
    sub.add_argument(
        "--tokens", type=_positive, required=True, metavar="N", help="tokens of prompts and responses together"
    )
    sub.add_argument("--layers", type=_positive, default=5, metavar="N", help="number of feature layers (default 5)")
    sub.add_argument(
        "--max-length", type=_positive, default=3072, metavar="N", help="tokens of the longest sample (default 3072)"
    )

    sub = stage(
        "inspect",
        _inspect,
        "Show a dataset, or one sample: its text with supervised spans marked, state norms, probes.",
        "python -m data_prep inspect dataset 000003",
    )
    sub.add_argument("dataset", type=Path, metavar="DIR", help="dataset folder")
    sub.add_argument(
        "key", nargs="?", metavar="KEY", help="key (000003) or source id of a sample; all shards without it"
    )
    sub.add_argument("--target", type=Path, metavar="T", help="where the tokenizer is (default: the manifest's target)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one stage; returns the exit status."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command carries on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
