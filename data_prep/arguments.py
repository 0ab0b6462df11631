"""The command line of data preparation: every stage, its options and its examples."""

import argparse
import json
from pathlib import Path
from typing import Any

FLOW = """\
The stages in order, for a target in the folder TARGET:
  python -m data_prep prompts   my.jsonl --out prompts --heldout 0.02
  python -m data_prep respond   --target TARGET --prompts prompts/train.jsonl --out responses.jsonl
  python -m data_prep estimate  --target TARGET --tokens 1000000
  python -m data_prep extract   --target TARGET --responses responses.jsonl --out dataset
  python -m data_prep verify    dataset --target TARGET --recompute 8
  python -m data_prep inspect   dataset 000000
Every stage that takes long can be interrupted; the same command carries on. data_prep/README.md explains each of them."""


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _layer_ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _flaws(text: str) -> list[str]:
    flaws = text.split(",")
    if not set(flaws) <= {"empty", "cut", "looping"}:
        raise ValueError
    return sorted(set(flaws))


def _device_map(text: str) -> str | dict[str, Any]:
    return text if text in ("auto", "balanced", "sequential") else _json_object(text)


def _bytes(text: str) -> int:
    return int(float(text))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


# argparse names the type in its message: "argument --layer-ids: invalid list like 1,8,15 value: 'x'"
_json_object.__name__ = 'JSON object like {"enable_thinking": false}'
_layer_ids.__name__ = "list like 1,8,15"
_flaws.__name__ = "list of empty, cut, looping"
_device_map.__name__ = 'auto, balanced, sequential or JSON object like {"model": 0}'
_bytes.__name__ = "number of bytes like 2e9"
_positive.__name__ = "positive number"
_share.__name__ = "share between 0 and 1"


class _Stages:
    """Adds one sub-command after another; each ends its help with an example."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.stages = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")

    def add(self, name: str, summary: str, example: str) -> argparse.ArgumentParser:
        raw = argparse.RawDescriptionHelpFormatter
        sub = self.stages.add_parser(
            name, help=summary, description=summary, epilog=f"example:\n  {example}", formatter_class=raw
        )
        sub.add_argument("--quiet", action="store_true", help="no progress bars, for logs")
        return sub


def _template_args(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--template-args", type=_json_object, default={}, metavar="JSON", help="chat template arguments of serving"
    )


def _tasks(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--num-tasks", type=_positive, default=1, metavar="N", help="tasks of a job array that share the work (default 1)"
    )
    sub.add_argument("--task-id", type=int, default=0, metavar="I", help="which of them this one is, from 0")


def _prompts(stages: _Stages) -> None:
    sub = stages.add(
        "prompts",
        "Bring prompts of any common spelling into one schema, drop duplicates, split off held-out ones.",
        "python -m data_prep prompts a.jsonl b.parquet saved_dataset/ --out prompts --heldout 0.02 --target TARGET",
    )
    sub.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="IN",
        help="JSONL, JSON, Parquet or a saved Hugging Face dataset; rows with messages, conversations, turns or prompt",
    )
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    sub.add_argument(
        "--heldout",
        type=_share,
        default=0.02,
        metavar="SHARE",
        help="share of prompts to hold out; whether one is depends on its text alone (default 0.02)",
    )
    sub.add_argument(
        "--similarity",
        type=_share,
        default=0.8,
        metavar="SHARE",
        help="prompts sharing this much of their word 3-grams are near-duplicates (default 0.8; 1: only equal ones)",
    )
    sub.add_argument("--target", type=Path, metavar="DIR", help="count tokens as this target is served")
    _template_args(sub)
    sub.add_argument(
        "--benchmark",
        action="store_true",
        help="the inputs are benchmarks: keep all rows, in order, a file for each",
    )


def _respond(stages: _Stages) -> None:
    sub = stages.add(
        "respond",
        "Let the target answer the prompts, here or through servers; an interrupted run carries on.",
        "python -m data_prep respond --target TARGET --prompts prompts/train.jsonl --out responses.jsonl \\\n"
        "      --server http://node1:8000/v1 --server http://node2:8000/v1 --template-args '{\"enable_thinking\": false}'",
    )
    sub.add_argument(
        "--target", type=Path, required=True, metavar="DIR", help="local Hugging Face folder of the target"
    )
    sub.add_argument("--prompts", type=Path, required=True, metavar="F.jsonl", help="what `prompts` wrote")
    sub.add_argument(
        "--out", type=Path, required=True, metavar="F2.jsonl", help="a line per assistant turn; settings go beside it"
    )
    sub.add_argument(
        "--max-new-tokens", type=_positive, default=2048, metavar="N", help="longest response (default 2048)"
    )
    _template_args(sub)
    sub.add_argument(
        "--sample", action="store_true", help="sample with the model's recommended settings instead of greedy"
    )
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="of --sample (default 0)")
    sub.add_argument(
        "--batch-size", type=_positive, metavar="N", help="prompts generated together (default: what memory allows)"
    )
    sub.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="URL",
        help="OpenAI-compatible server of the target, e.g. http://node1:8000/v1; repeat for several",
    )
    sub.add_argument(
        "--concurrency", type=_positive, default=64, metavar="N", help="open requests per server (default 64)"
    )
    sub.add_argument(
        "--timeout", type=_positive, default=600, metavar="S", help="seconds a request may take (default 600)"
    )
    sub.add_argument(
        "--keep-answers",
        action="store_true",
        help="no generation: the data's own answers, as text (drafters trained on them accept less)",
    )
    _tasks(sub)


def _storage(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--storage", choices=("bf16", "fp8"), default="bf16", help="of the states: exact, or half the bytes (bf16)"
    )
    sub.add_argument("--last-hidden", action="store_true", help="store the state after the final norm too")


def _extract(stages: _Stages) -> None:
    sub = stages.add(
        "extract",
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
    _storage(sub)
    sub.add_argument(
        "--drop",
        type=_flaws,
        default=[],
        metavar="FLAWS",
        help="leave out responses that are empty, cut (at the length limit) or looping: a list such as cut,looping",
    )
    sub.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="the target runs in it (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    sub.add_argument(
        "--device-map", type=_device_map, metavar="MAP", help="spread a large target over GPUs: auto (accelerate's maps)"
    )
    sub.add_argument("--force", action="store_true", help="start even where the disk looks too small")
    _tasks(sub)

    sub = stages.add(
        "merge",
        "Make one of what several tasks made: seal the dataset of an extraction, or join the files of responses, after "
        "checking that nothing is missing or double.",
        "python -m data_prep merge dataset",
    )
    sub.add_argument(
        "made", type=Path, metavar="DIR|F.jsonl", help="--out of `extract --num-tasks`, or of `respond --num-tasks`"
    )


def _checks(stages: _Stages) -> None:
    sub = stages.add(
        "verify",
        "Check manifest, hashes, keys and every sample; exit status 1 and the names of what is bad.",
        "python -m data_prep verify dataset --target TARGET --recompute 8",
    )
    sub.add_argument("dataset", type=Path, metavar="DIR", help="dataset folder")
    sub.add_argument("--target", type=Path, metavar="T", help="compare with this target too")
    sub.add_argument(
        "--recompute", type=int, default=0, metavar="N", help="samples to run through the target again (default 0)"
    )

    sub = stages.add(
        "estimate",
        "Bytes per token, per sample and in all, from the target's config.json alone.",
        "python -m data_prep estimate --target TARGET --tokens 100000000 --storage fp8",
    )
    sub.add_argument("--target", type=Path, required=True, metavar="DIR", help="target's folder, or a config.json")
    sub.add_argument(
        "--tokens", type=_positive, required=True, metavar="N", help="tokens of prompts and responses together"
    )
    sub.add_argument("--layers", type=_positive, default=5, metavar="N", help="number of feature layers (default 5)")
    sub.add_argument(
        "--max-length", type=_positive, default=3072, metavar="N", help="tokens of the longest sample (default 3072)"
    )
    _storage(sub)

    sub = stages.add(
        "inspect",
        "Show a dataset, or one sample: its text with supervised spans marked, state norms, probes.",
        "python -m data_prep inspect dataset 000003",
    )
    sub.add_argument("dataset", type=Path, metavar="DIR", help="dataset folder")
    sub.add_argument(
        "key", nargs="?", metavar="KEY", help="key (000003) or source id of a sample; all shards without it"
    )
    sub.add_argument("--target", type=Path, metavar="T", help="where the tokenizer is (default: the manifest's target)")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all stages."""
    parser = argparse.ArgumentParser(
        "python -m data_prep", description=FLOW, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = _Stages(parser)
    for add in (_prompts, _respond, _extract, _checks):
        add(stages)
    return parser
