"""A small dataset with the shards, index and manifest of the real contract, and random states: for tests that train."""
import json
from pathlib import Path

import torch

from data_prep.files import canonical_json, sha256_hex
from data_prep.manifest import INDEX_NAME, Manifest, Plan, Shard, read_index
from data_prep.shards import ShardWriter, shard_name
from data_prep.target import target_facts, tokenizer_sha256
from data_prep.tiny_target import make_tiny_target
from data_prep.tokens import load_tokenizer, template_sha256
from pipeline.batches import StepDataset
from pipeline.order import StepPlan
from pipeline.passes import Passes
from pipeline.reader import SampleReader
from pipeline.sources import LocalFolder

SHARD_SAMPLES = (7, 3, 5, 1, 4, 6)
LAYER_IDS, MASK_ID, HIDDEN = [1, 3], 297, 32


def sample(key: int, vocab: int = 290) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, mask and states of sample `key`, of its own length; about half of it supervised."""
    g = torch.Generator().manual_seed(1000 + key)
    S = int(torch.randint(12, 40, (1,), generator=g))
    mask = torch.zeros(S, dtype=torch.uint8)
    mask[S // 2:] = 1
    ids = torch.randint(3, vocab, (S,), generator=g, dtype=torch.int32)
    return ids, mask, torch.randn(S, len(LAYER_IDS), HIDDEN, generator=g).bfloat16()


def make_dataset(folder: Path, target: Path, shard_samples=SHARD_SAMPLES, not_finite=()) -> Path:
    """not_finite: samples whose states hold a NaN."""
    folder.mkdir(parents=True)
    shards, lines, key = [], [], 0
    for number, count in enumerate(shard_samples):
        writer = ShardWriter(folder, shard_name(number))
        for _ in range(count):
            ids, mask, states = sample(key)
            if key in not_finite:
                states[0, 0, 0] = torch.nan
            writer.add(f"{key:06d}", {"id": f"s{key}"}, ids, mask, {"hidden": states})
            key += 1
        nbytes, digest = writer.finish()
        writer.publish()
        rows = writer.samples
        shards.append(Shard(name=shard_name(number), samples=count, tokens=sum(r.tokens for r in rows),
                            supervised=sum(r.supervised for r in rows), anchors=sum(r.anchors for r in rows),
                            bytes=nbytes, sha256=digest, argmax_matches=0))
        lines.append(canonical_json({"shard": shard_name(number), "samples": [list(r[1:]) for r in rows]}))
    index = b"".join(line + b"\n" for line in lines)
    (folder / INDEX_NAME).write_bytes(index)
    Manifest(
        target=target_facts(target, "float32"), features={"layer_ids": LAYER_IDS}, tokenizer_sha256=tokenizer_sha256(target),
        template_sha256=template_sha256(load_tokenizer(target)), template_args={}, stop_token_ids=[2], mask_token_id=MASK_ID,
        max_length=64, shard_bytes=10**6, batch_tokens=512, source_sha256="0" * 64,
        responses={"generator": "transformers", "sampling": None, "from_text": 0},
        plan=Plan(shards=len(shards), samples=key, tokens=sum(s.tokens for s in shards)), shards=shards, argmax_share=1.0,
        dropped={}, sealed=True, index_sha256=sha256_hex(index)).write(folder)
    return folder


def make_run_folder(out: Path, tied: bool = True, shard_samples=SHARD_SAMPLES, not_finite=()) -> Path:
    """OUT/target and OUT/dataset, as a run file with `out: OUT` expects them."""
    make_tiny_target(out / "target", tied=tied, hidden=HIDDEN)
    make_dataset(out / "dataset", out / "target", shard_samples, not_finite)
    return out


def step_dataset(folder: Path, rank=0, world=1, micro=1, batch=4, epochs=3, seed=5, anchors=6, pack=None,
                 source=None) -> StepDataset:
    """The batches of one rank, blocks of 4; source: where shards are read from, default the folder."""
    manifest = Manifest.read(folder)
    entries = read_index(folder, manifest)
    passes = Passes(StepPlan(entries, seed, epochs, batch), world, micro, pack)
    reader = SampleReader(source or LocalFolder(folder), manifest, entries)
    return StepDataset(reader, passes, rank=rank, max_anchors=anchors, block_size=4, mask_token_id=MASK_ID)


def damage(folder: Path, key: str) -> str:
    """Flips a bit in the states of sample `key`; returns its shard's name."""
    entry = next(e for e in read_index(folder, Manifest.read(folder)) if e.key == key)
    with open(folder / entry.shard, "r+b") as file:
        file.seek(entry.offset + entry.nbytes - 3)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    return entry.shard


def read_metrics(out: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]
