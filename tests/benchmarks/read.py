"""How fast shards become batch tensors: GB/s of the path that training takes, beside other ways to read the same bytes.

    python tests/benchmarks/read.py                                 # writes 3 x 1 GB into a temporary folder
    python tests/benchmarks/read.py --bytes 300000000 --json read.json

Samples are those of an 8B target: 5 features of width 4096 in bf16, lengths log-normal around 800 tokens, cut at 3072.
Every round reads all of them once in each way, one way after the other in one process and from warm pages; a ratio is
the median of the rounds' own. Fresh memory is new for every sample, reused memory one buffer as long as the longest.
After that, what 1, 2 and 4 reading processes deliver, without the first epochs, in which their buffers are new.
"""
import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import webdataset

import pipeline.checksum
from data_prep.manifest import Features, Manifest, SampleEntry, Target
from data_prep.shards import ShardWriter, shard_name
from pipeline.batches import StepDataset
from pipeline.loader import StepLoader
from pipeline.order import StepPlan
from pipeline.passes import Passes
from pipeline.reader import SampleReader
from pipeline.sources import FileRange, LocalFolder

FEATURES, HIDDEN, LONGEST = 5, 4096, 3072
STEP = 4  # sequences of a step
SHARD_BYTES = 400_000_000
WARM_UP = 4  # epochs
OURS, PACKED = "shards to batches, checked", "the same, rows of 8192 tokens"
ONE_THREAD = "the same, one thread"  # else long samples are read and summed by two
REUSED, FRESH = "readinto, reused memory", "readinto, fresh memory"
WEBDATASET = "webdataset, default decoding"
TORCH, SAFETENSORS = "torch.save, a file a sample", "safetensors, a file a sample"


def write_samples(folder: Path, nbytes: int) -> list[SampleEntry]:
    """Shards, and every sample once more as a file of torch.save and one of safetensors; about `nbytes` bytes each."""
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.integers(0, 2**14, LONGEST * FEATURES * HIDDEN, dtype=np.int16)).view(torch.bfloat16)
    entries, writer, written, number = [], None, 0, 0
    while written < nbytes or number % STEP:
        tokens = int(np.clip(rng.lognormal(np.log(800), 0.7), 60, LONGEST))
        hidden = values[:tokens * FEATURES * HIDDEN].view(tokens, FEATURES, HIDDEN).roll(number, -1)
        mask = (torch.arange(tokens) > tokens // 4).to(torch.uint8)
        sample = {"input_ids": torch.arange(tokens, dtype=torch.int32), "loss_mask": mask, "hidden": hidden}
        torch.save(sample, folder / f"{number:06d}.pt")
        safetensors.torch.save_file(sample, folder / f"{number:06d}.safetensors")
        writer = writer or ShardWriter(folder, shard_name(number))
        writer.add(f"{number:06d}", {"id": str(number)}, sample["input_ids"], mask, {"hidden": hidden})
        number, written = number + 1, written + hidden.nbytes
        if sum(entry.nbytes for entry in writer.samples) > SHARD_BYTES or (written >= nbytes and number % STEP == 0):
            writer.finish()
            writer.publish()
            entries += writer.samples
            writer = None
    return entries


def step_dataset(folder: Path, entries: list[SampleEntry], epochs: int, pack_tokens: int | None = None) -> StepDataset:
    manifest = Manifest.model_construct(target=Target.model_construct(hidden_size=HIDDEN),
                                        features=Features(layer_ids=list(range(FEATURES))))
    passes = Passes(StepPlan(entries, 0, epochs, STEP), world=1, micro_batch=1, pack_tokens=pack_tokens)
    reader = SampleReader(LocalFolder(folder), manifest, entries)
    return StepDataset(reader, passes, rank=0, max_anchors=512, block_size=16, mask_token_id=0)


def read_steps(loader: StepLoader, steps: int) -> None:
    for _ in range(steps):
        batch = next(loader)
        assert not batch.problem and not batch.damaged, batch.problem or batch.damaged
        del batch


def seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def payloads(folder: Path, entries: list[SampleEntry]) -> Iterator[tuple[FileRange, int]]:
    for entry in entries:
        with FileRange(folder / entry.shard, entry.offset, entry.nbytes) as source:
            yield source, entry.nbytes


def ways(folder: Path, entries: list[SampleEntry], loaders: dict[str, StepLoader]) -> dict[str, Callable[[], None]]:
    """What is timed, by name: each reads all samples once."""
    reused = memoryview(bytearray(max(entry.nbytes for entry in entries)))
    steps = len(entries) // STEP

    def one_thread() -> None:
        halved, pipeline.checksum.HALVED = pipeline.checksum.HALVED, sys.maxsize
        read_steps(loaders[ONE_THREAD], steps)
        pipeline.checksum.HALVED = halved

    def into_reused() -> None:
        for source, nbytes in payloads(folder, entries):
            source.read_into(0, reused[:nbytes])

    def into_fresh() -> None:
        for source, nbytes in payloads(folder, entries):
            source.read_into(0, memoryview(bytearray(nbytes)))

    def plain_webdataset() -> None:
        shards = sorted(str(path) for path in folder.glob("*.tar"))
        assert sum(1 for _ in webdataset.WebDataset(shards, shardshuffle=False).decode()) == len(entries)

    def torch_files() -> None:
        for path in sorted(folder.glob("*.pt")):
            torch.load(path, weights_only=True)

    def safetensors_files() -> None:
        """It maps the file; the values are read when they are copied."""
        for path in sorted(folder.glob("*.safetensors")):
            for tensor in safetensors.torch.load_file(path).values():
                tensor.clone()

    others = {REUSED: into_reused, FRESH: into_fresh, WEBDATASET: plain_webdataset, TORCH: torch_files,
              SAFETENSORS: safetensors_files}
    ours = {name: lambda loader=loader: read_steps(loader, steps) for name, loader in loaders.items()}
    return ours | {ONE_THREAD: one_thread} | others


def check(folder: Path, data: StepDataset) -> None:
    """The batches hold what the other ways read."""
    for mb in data[0]:
        (expected,) = (safetensors.torch.load_file(folder / f"{key}.safetensors")["hidden"] for key in mb.keys)
        assert torch.equal(mb.features_BSE[0].view(torch.int16), expected.flatten(1).view(torch.int16))


def delivered(folder: Path, entries: list[SampleEntry], workers: int) -> list[float]:
    """Seconds that `workers` processes take for all samples, three times, once their buffers have held long ones."""
    data, steps = step_dataset(folder, entries, epochs=WARM_UP + 4), len(entries) // STEP
    with StepLoader(data, 0, len(data), workers=workers, budget=8 * data.largest_bytes) as loader:
        read_steps(loader, WARM_UP * steps)
        return [seconds(lambda: read_steps(loader, steps)) for _ in range(3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=10**9, help="of states, written three times (default 1 GB)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the numbers go as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        entries = write_samples(folder, args.bytes)
        data = {name: step_dataset(folder, entries, args.rounds + 1, pack_tokens)
                for name, pack_tokens in ((OURS, None), (ONE_THREAD, None), (PACKED, 8192))}
        check(folder, data[OURS])
        loaders = {name: StepLoader(steps, 0, len(steps), workers=0, budget=0) for name, steps in data.items()}
        runs = ways(folder, entries, loaders)
        for run in runs.values():
            run()  # pages become warm, buffers are made
        taken = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, run in runs.items():
                taken[name].append(seconds(run))
        for workers in (1, 2, 4):
            taken[f"{workers} reading processes"] = delivered(folder, entries, workers)
    report(sum(entry.nbytes for entry in entries), len(entries), taken, args.json)


def report(nbytes: int, samples: int, taken: dict[str, list[float]], file: Path | None) -> None:
    def ratio(name: str, to: str) -> float:
        """How many times as fast `name` is as `to`: round by round where both have the same rounds."""
        if len(taken[name]) == len(taken[to]):
            return statistics.median(other / own for own, other in zip(taken[name], taken[to]))
        return statistics.median(taken[to]) / statistics.median(taken[name])

    crc32 = pipeline.checksum.crc32.__module__
    print(f"{samples} samples, {nbytes / 1e9:.2f} GB, CRC-32 of {crc32}; {len(taken[OURS])} rounds, medians")
    print(f"{'':<32}{'GB/s':>7}{'slowest':>9}{'fastest':>9}{'x reused':>10}{'x webdataset':>14}")
    numbers = {}
    for name, runs in taken.items():
        rates = [nbytes / run / 1e9 for run in (statistics.median(runs), max(runs), min(runs))]
        ratios = [ratio(name, REUSED), ratio(name, WEBDATASET)]
        print(f"{name:<32}{rates[0]:>7.2f}{rates[1]:>9.2f}{rates[2]:>9.2f}{ratios[0]:>10.2f}{ratios[1]:>14.2f}")
        numbers[name] = dict(zip(("gb_per_s", "slowest", "fastest", "of_reused", "of_webdataset"), rates + ratios))
    if file:
        found = {"bytes": nbytes, "samples": samples, "crc32": crc32, "ways": numbers}
        file.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
