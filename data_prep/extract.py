"""Hidden states of the frozen target over prompt + response, written as shards: resumable at any point.

    python -m data_prep extract --target TARGET --responses responses.jsonl --out dataset/

Cost: one forward pass of the target, its head only at supervised positions, and 2 * F * D + 5 bytes a token on the
disk. The manifest is written before the first shard. A shard is computed into `NNNNNN.tar.tmp`, fsynced, entered into
index.jsonl, renamed, entered into the manifest: killed anywhere, the next run keeps finished shards and redoes the
rest.
"""

import fcntl
import json
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .errors import UserError
from .features import FeatureTaps, Sample
from .files import sha256_hex, sync_folder, write_atomic
from .manifest import INDEX_NAME, MANIFEST_NAME, Features, Manifest, Shard, differences
from .model import compute_dtype, dtype_name, load_model
from .plan import Batches, Planned, make_plan
from .responses import read_meta
from .shards import UNFINISHED, ShardWriter, shard_name
from .target import check_layer_ids, feature_layer_ids, mask_token_id, stop_token_ids, target_facts, tokenizer_sha256
from .tokens import check_template_args, load_tokenizer, sample_tokens, template_sha256

LOW_AGREEMENT = 0.9  # greedy responses of this very target agree with its argmax almost everywhere
IN_FLIGHT = 2  # batches of states that may wait for the writer


def prepare(
    target: Path,
    responses: Path,
    *,
    layer_ids: list[int] | None,
    explicit_mask: int | None,
    max_length: int,
    shard_bytes: int,
    batch_tokens: int,
) -> tuple[Manifest, Batches]:
    """The manifest before its first shard, and the plan. UserError where the responses do not belong to the target."""
    if not responses.is_file():
        raise UserError(f"there is no responses file {responses}; make it with `python -m data_prep respond`.")
    tokenizer = load_tokenizer(target)
    facts = target_facts(target, dtype_name(compute_dtype()))
    layers, rows = facts["num_hidden_layers"], facts["vocab_size"]
    ids = check_layer_ids(layer_ids, layers) if layer_ids else feature_layer_ids(layers, min(5, max(layers - 3, 1)))
    meta = read_meta(responses)
    made_with = {
        "target": {name: value for name, value in facts.items() if name != "dtype"},  # the serving dtype is free
        "tokenizer_sha256": tokenizer_sha256(target),
        "template_sha256": template_sha256(tokenizer),
    }
    changed = differences(meta, made_with)
    if changed:
        raise UserError(
            f"{responses} was not written by the target {target} ({'; '.join(changed)}); pass the target that wrote "
            "it, or regenerate the responses."
        )
    check_template_args(tokenizer, meta["template_args"])
    stops = stop_token_ids(target, tokenizer)
    mask = mask_token_id(tokenizer, rows, explicit_mask, stop_ids=stops)
    settings = {
        "mask_token_id": mask,
        "max_length": max_length,
        "shard_bytes": shard_bytes,
        "batch_tokens": batch_tokens,
    }
    sizes = {"vocab_rows": rows, "hidden_size": facts["hidden_size"], "features": len(ids)}
    batches = make_plan(responses, tokenizer, meta["template_args"], **sizes, **settings)
    manifest = Manifest(
        target=facts,
        features=Features(layer_ids=ids),
        tokenizer_sha256=made_with["tokenizer_sha256"],
        template_sha256=made_with["template_sha256"],
        template_args=meta["template_args"],
        stop_token_ids=stops,
        source_sha256=batches.source_sha256,
        plan=batches.plan(),
        dropped=dict(batches.dropped),
        **settings,
    )
    mask_text = tokenizer.convert_ids_to_tokens(mask) or "a row past the tokenizer"
    print(
        f"layers {','.join(map(str, ids))} of {layers}; mask token {mask} ({mask_text}); "
        f"{manifest.plan.samples} samples, {manifest.plan.tokens} tokens, {manifest.plan.shards} shards; "
        f"{batches.cut} cut to {max_length} tokens; padding {batches.padding():.1%}"
    )
    for reason, count in batches.dropped.items():
        print(f"dropped {count}: {reason}")
    return manifest, batches


def open_dataset(out: Path, fresh: Manifest) -> Manifest:
    """The manifest to carry on from: `fresh`, written, for a new folder, else the folder's own if it is the same
    dataset.

    Unfinished files are removed. UserError for other settings and for shards that this dataset did not make.
    """
    shards = sorted(path.name for path in out.glob("*.tar"))
    if not (out / MANIFEST_NAME).is_file():
        if shards:
            raise UserError(
                f"{out} holds {shards[0]} but no {MANIFEST_NAME}: foreign shards would mix; choose an empty --out."
            )
        fresh.write(out)
        return fresh
    manifest = Manifest.read(out)
    changed = manifest.differences(fresh.identity())
    if changed:
        raise UserError(
            f"{out} was made with other settings ({'; '.join(changed)}); repeat those settings to carry on, or choose "
            "another --out."
        )
    lines = _index_lines(out)
    finished = {shard.name: shard.bytes for shard in manifest.shards}
    redone = shard_name(len(finished))  # a run that died between renaming a shard and entering it left this one
    for name in shards:
        if name not in finished and not (name == redone and redone in lines):
            raise UserError(
                f"{out} holds {name}, which is not in its manifest: a foreign shard; remove it or choose another --out."
            )
    for name, size in finished.items():
        if name not in shards or (out / name).stat().st_size != size or name not in lines:
            raise UserError(
                f"{out / name} is missing, cut short or not in {INDEX_NAME}; restore it or start in an empty folder."
            )
    for path in [
        *out.glob(f"*.tar{UNFINISHED}"),
        *out.glob(f"{MANIFEST_NAME}{UNFINISHED}"),
        *out.glob(f"{INDEX_NAME}{UNFINISHED}"),
    ]:
        path.unlink()
    if list(lines) != list(finished):
        write_atomic(out / INDEX_NAME, b"".join(lines[name] for name in finished))
    return manifest


def _index_lines(out: Path) -> dict[str, bytes]:
    """Shard name -> its whole line of index.jsonl; a line cut short by a crash does not count."""
    path = out / INDEX_NAME
    content = path.read_bytes() if path.is_file() else b""
    return {json.loads(line)["shard"]: line for line in content.splitlines(keepends=True) if line.endswith(b"\n")}


def _read_batch(
    responses: Path, batch: list[Planned], max_length: int
) -> list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
    """(line, input_ids, loss_mask) of every sample of `batch`."""
    rows = []
    with open(responses, "rb") as file:
        for sample in batch:
            file.seek(sample.line)
            line = json.loads(file.readline())
            rows.append((line, *sample_tokens(line["prompt_token_ids"], line["response_token_ids"], max_length)))
    return rows


class _DatasetWriter:
    """The disk side, run on one background thread in the order of submission."""

    def __init__(self, out: Path, manifest: Manifest):
        self.out, self.manifest = out, manifest
        self.shard: ShardWriter | None = None
        self.matches = 0
        self.broken = False  # a batch failed: what is queued behind it must not finish a shard that lacks it

    def add(
        self, batch: list[Planned], rows: list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]], results: list[Sample]
    ) -> None:
        """Append a computed batch to the open shard (opening the next one if there is none)."""
        if self.broken:
            return
        self.broken = True
        if self.shard is None:
            self.shard, self.matches = ShardWriter(self.out, shard_name(len(self.manifest.shards))), 0
        for planned, (line, ids, mask), result in zip(batch, rows, results):
            if not result.hidden.isfinite().all():
                raise UserError(
                    f"sample {line['id']}: the target's states hold NaN or infinity; check the target's weights and "
                    f"that {self.manifest.target.dtype} is a dtype it can run in."
                )
            turns = [{"start": planned.prompt, "end": planned.tokens, "finish_reason": line["finish_reason"]}]
            meta = {"id": line["id"], "source": line["source"], "turns": turns, "probes": result.probes}
            self.shard.add(planned.key, meta, ids, mask, result.hidden)
            self.matches += result.argmax_matches
        self.broken = False

    def close_shard(self) -> None:
        """Make the open shard durable, enter it into the index, rename it, enter it into the manifest."""
        if self.broken:
            return
        size, sha256 = self.shard.finish()
        name, samples = self.shard.path.name, self.shard.samples
        line = json.dumps({"shard": name, "samples": samples}) + "\n"
        with open(self.out / INDEX_NAME, "ab") as index:
            index.write(line.encode())
            index.flush()
            os.fsync(index.fileno())
        self.shard.publish()
        sync_folder(self.out)
        totals = {
            field: sum(getattr(sample, field) for sample in samples) for field in ("tokens", "supervised", "anchors")
        }
        shard = Shard(name=name, samples=len(samples), **totals, bytes=size, sha256=sha256, argmax_matches=self.matches)
        self.manifest.shards.append(shard)
        matches = sum(s.argmax_matches for s in self.manifest.shards)
        self.manifest.argmax_share = matches / sum(s.supervised for s in self.manifest.shards)
        if len(self.manifest.shards) == self.manifest.plan.shards:
            self.manifest.sealed = True
            self.manifest.index_sha256 = sha256_hex((self.out / INDEX_NAME).read_bytes())
        self.manifest.write(self.out)
        self.shard = None
        share = shard.argmax_matches / shard.supervised
        tqdm.write(
            f"{name}: {shard.samples} samples, {shard.tokens} tokens, {size / 1e6:.1f} MB, equal to the argmax "
            f"{share:.2%}"
        )


def extract(
    target: Path,
    responses: Path,
    out: Path,
    *,
    layer_ids: list[int] | None = None,
    mask_token_id: int | None = None,
    max_length: int = 3072,
    shard_bytes: int = 2_000_000_000,
    batch_tokens: int = 8192,
) -> Manifest:
    """Make the dataset `out`, or carry on with it, and return its sealed manifest. A finished one is left untouched.

    `layer_ids` default to the 5 of the public recipe (fewer for targets of less than 8 layers). UserError as the parts
    say; a share of supervised tokens equal to the target's argmax below 0.9 is warned about on stderr.
    """
    fresh, batches = prepare(
        target,
        responses,
        layer_ids=layer_ids,
        explicit_mask=mask_token_id,
        max_length=max_length,
        shard_bytes=shard_bytes,
        batch_tokens=batch_tokens,
    )
    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another extract is writing {out}; wait for it or stop it.") from error
        manifest = open_dataset(out, fresh)
        if manifest.sealed:
            print(f"{out} is finished: {manifest.plan.shards} shards, 0 samples computed")
        else:
            _compute(target, responses, out, manifest, batches)
    finally:
        os.close(folder)
    print(f"supervised tokens equal to the target's argmax: {manifest.argmax_share:.2%}")
    if manifest.argmax_share < LOW_AGREEMENT:
        print(
            f"warning: only {manifest.argmax_share:.1%} of the supervised tokens are what the target itself would emit "
            f"(greedy responses of this target: above {LOW_AGREEMENT:.0%}); regenerate them with `python -m data_prep "
            "respond`.",
            file=sys.stderr,
        )
    return manifest


def _compute(target: Path, responses: Path, out: Path, manifest: Manifest, batches: Batches) -> None:
    """Compute and write the shards that are not finished."""
    taps = FeatureTaps(load_model(target), manifest.features.layer_ids)
    writer = _DatasetWriter(out, manifest)
    kept = len(manifest.shards)
    waiting: list[Future] = []
    tokens = sum(shard.tokens for shard in manifest.shards)
    bar = tqdm(total=manifest.plan.tokens, initial=tokens, desc="extracting", unit="tok", unit_scale=True)
    with ThreadPoolExecutor(max_workers=1) as disk, bar:
        for shard in batches.shards[kept:]:
            for batch in shard:
                rows = _read_batch(responses, batch, manifest.max_length)
                results = taps.run([ids for _, ids, _ in rows], [sample.prompt for sample in batch])
                waiting.append(disk.submit(writer.add, batch, rows, results))
                while len(waiting) > IN_FLIGHT:
                    waiting.pop(0).result()
                bar.update(sum(sample.tokens for sample in batch))
            waiting.append(disk.submit(writer.close_shard))
        for future in waiting:
            future.result()
