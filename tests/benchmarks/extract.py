"""What storing costs: tokens per second of `extract` beside the target's bare forward pass over the same batches.

    python tests/benchmarks/extract.py --target runs/quickstart/target --responses runs/quickstart/responses.jsonl

Every round times, one after the other in the same process and over the same padded batches: the target's own forward
pass (logits of every position, as `model(input_ids)` gives them), its decoder alone (no logits), and everything that
`extract` does once the model is loaded: features, probes, argmax of the supervised positions, encoding, hashing, disk.
Prints the ratios; the best round of each counts.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from data_prep.compute import compute_shards, read_batch
from data_prep.extract import open_dataset, prepare
from data_prep.features import FeatureTaps
from data_prep.merge import merge
from data_prep.model import load_model
from data_prep.recipe import Recipe


def timed(run: Callable[[], None]) -> float:
    """Seconds of one call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, metavar="DIR")
    parser.add_argument("--responses", type=Path, required=True, metavar="F.jsonl", help="what `respond` wrote")
    parser.add_argument("--storage", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--shard-bytes", type=int, default=16_000_000)
    parser.add_argument("--shards", type=int, default=2, help="shards of the plan to measure (default 2)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    recipe = Recipe(batch_tokens=args.batch_tokens, shard_bytes=args.shard_bytes, storage=args.storage)
    manifest, batches = prepare(args.target, args.responses, recipe)
    batches = batches._replace(shards=batches.shards[: args.shards])
    manifest.plan = batches.plan()
    model = load_model(args.target, recipe.torch_dtype())
    padded = []
    for shard in batches.shards:
        for batch in shard:
            ids_BS = torch.zeros(len(batch), batch[0].tokens, dtype=torch.long)
            for row, sample in zip(ids_BS, read_batch(args.responses, batch)):
                row[: len(sample.input_ids)] = sample.input_ids
            padded.append(ids_BS.to(model.device))

    @torch.inference_mode()
    def whole_model() -> None:
        for ids in padded:
            model(input_ids=ids, use_cache=False)

    @torch.inference_mode()
    def decoder() -> None:
        for ids in padded:
            model.get_decoder()(input_ids=ids, use_cache=False)

    def extraction() -> None:
        with tempfile.TemporaryDirectory(dir=args.responses.parent) as name:
            taps = FeatureTaps(model, manifest.features.layer_ids, args.storage)
            numbers = range(manifest.plan.shards)
            compute_shards(taps, args.responses, Path(name), open_dataset(Path(name), manifest, batches, numbers), batches, numbers)
            merge(Path(name))
            taps.close()

    seconds: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name, run in (("forward with logits", whole_model), ("decoder alone", decoder), ("extract", extraction)):
            seconds.setdefault(name, []).append(timed(run))
    supervised = sum(span.end - span.start for shard in batches.shards for b in shard for s in b for span in s.spans)
    print(f"\n{manifest.plan.tokens} tokens, {supervised} of them supervised, {len(padded)} batches, {args.storage}")
    for name, runs in seconds.items():
        rate = manifest.plan.tokens / min(runs)
        print(f"{name:<22}{rate:>9.1f} tokens/s   best {min(runs):.2f} s, median {statistics.median(runs):.2f} s")
    for name in ("forward with logits", "decoder alone"):
        pairs = [own / bare for own, bare in zip(seconds["extract"], seconds[name])]
        print(
            f"extract's throughput is {min(seconds[name]) / min(seconds['extract']):.3f} of {name} "
            f"(round by round: {', '.join(f'{1 / pair:.3f}' for pair in pairs)})"
        )


if __name__ == "__main__":
    main()
