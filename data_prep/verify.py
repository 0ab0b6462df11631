"""Is the dataset what its manifest says? Every finding names the shard and, where there is one, the sample's key.

    python -m data_prep verify dataset/ [--target TARGET --recompute 8]

Cost: every byte is read twice (hash, contents); `--recompute N` runs N samples through the target and compares the
states.
"""

import hashlib
import json
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tqdm import tqdm

from .errors import UserError
from .features import FeatureTaps
from .manifest import Manifest, SampleEntry, Shard, read_index
from .model import load_model
from .shards import UNFINISHED, anchor_positions, decode_sample, read_meta, read_sample, shard_name
from .target import target_facts, tokenizer_sha256

# Largest relative error of a state row, and of a probe's log-probability where its argmax differs (a tie), that
# batching and bfloat16 storage explain; another sample's states are off by about 1.4.
TOLERANCE = {"float32": (0.02, 1e-3), "bfloat16": (0.25, 0.1), "float16": (0.05, 0.02)}


class Report(NamedTuple):
    """The result: `findings` is empty for a good dataset; the rest counts what was read and recomputed."""

    findings: list[str]
    shards: int
    samples: int
    tokens: int
    recomputed: int


def verify(folder: Path, *, target: Path | None = None, recompute: int = 0) -> Report:
    """Check all of `folder`; with `target` its facts too, and the states of `recompute` samples, evenly spread."""
    manifest = Manifest.read(folder)
    findings = list(_check_folder(folder, manifest))
    try:
        entries = read_index(folder, manifest)
    except UserError as error:
        findings.append(str(error))
        entries = []
    keys: dict[str, str] = {}
    samples = tokens = 0
    present = [shard for shard in manifest.shards if (folder / shard.name).is_file()]
    with tqdm(total=2 * sum(shard.bytes for shard in present), desc="verifying", unit="B", unit_scale=True) as bar:
        for shard in present:
            rows = [entry for entry in entries if entry.shard == shard.name]
            findings += _check_hash(folder / shard.name, shard, bar)
            for finding in _check_members(folder / shard.name, shard, rows, manifest, keys):
                findings.append(f"{shard.name} {finding}")
            bar.update(shard.bytes)
            samples, tokens = samples + shard.samples, tokens + shard.tokens
    recomputed = 0
    if target is not None:
        findings += _check_target(manifest, target)
        if recompute and not findings:  # states of a damaged dataset say nothing new
            chosen = [
                entries[i * len(entries) // min(recompute, len(entries))] for i in range(min(recompute, len(entries)))
            ]
            findings += _recompute(folder, manifest, target, chosen)
            recomputed = len(chosen)
    return Report(findings, len(present), samples, tokens, recomputed)


def _check_folder(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Missing, foreign and unfinished files; a manifest that is not sealed or does not add up to its plan."""
    listed = [shard.name for shard in manifest.shards]
    files = {path.name for path in folder.glob("*.tar")}
    if not manifest.sealed:
        yield f"unfinished: {len(listed)} of {manifest.plan.shards} shards; run the same extract command again"
        files.discard(shard_name(len(listed)))  # complete but not entered yet: extract makes it anew
    else:
        sums = (len(listed), sum(s.samples for s in manifest.shards), sum(s.tokens for s in manifest.shards))
        if sums != (manifest.plan.shards, manifest.plan.samples, manifest.plan.tokens):
            yield (
                f"manifest.json: shards, samples, tokens add up to {sums}, planned "
                f"{tuple(manifest.plan.model_dump().values())}"
            )
        for path in sorted(folder.glob(f"*{UNFINISHED}")):
            yield f"{path.name}: unfinished file beside a finished dataset; remove it"
    for name in listed:
        if name not in files:
            yield f"{name}: missing"
    for name in sorted(files - set(listed)):
        yield f"{name}: foreign shard, not in the manifest"


def _check_hash(path: Path, shard: Shard, bar: tqdm) -> Iterator[str]:
    """Size and SHA-256 against the manifest."""
    size = path.stat().st_size
    if size != shard.bytes:
        yield f"{shard.name}: {size} bytes, the manifest says {shard.bytes}"
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
            bar.update(len(block))
    if digest.hexdigest() != shard.sha256:
        yield f"{shard.name}: sha256 {digest.hexdigest()}, the manifest says {shard.sha256}"


def _members(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, offset, bytes) of the tar's members; tarfile.ReadError where it breaks off."""
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            yield member.name, member.offset_data, member.size


def _check_members(
    path: Path, shard: Shard, rows: list[SampleEntry], manifest: Manifest, keys: dict[str, str]
) -> Iterator[str]:
    """Walk the tar beside its index: order, keys, and every sample's contents. Yields "KEY: what is wrong"."""
    expected = iter(rows)
    read = 0
    meta: tuple[str, dict[str, Any]] = ("", {})
    try:
        with open(path, "rb") as file:
            for name, offset, size in _members(path):
                key, _, kind = name.partition(".")
                file.seek(offset)
                if kind == "json":
                    if key in keys:
                        yield f"{key}: key already used in {keys[key]}"
                    keys[key] = shard.name
                    meta = (key, _json(file.read(size)))
                    continue
                if kind != "safetensors" or meta[0] != key:
                    yield f"{key}: member {name} out of order; each sample is KEY.json, then KEY.safetensors"
                    continue
                entry = next(expected, None)
                if rows and (entry is None or (entry.key, entry.offset, entry.nbytes) != (key, offset, size)):
                    yield f"{key}: at byte {offset}, {size} bytes, the index has {entry}"
                read += 1
                for problem in _check_sample(_payload(file, size), meta[1], entry, manifest):
                    yield f"{key}: {problem}"
    except tarfile.ReadError as error:
        yield f"after {read} samples: broken tar ({error})"
    if read != shard.samples:
        yield f"read {read} samples, expected {shard.samples}" + (
            f", first missing {rows[read].key}" if read < len(rows) else ""
        )


def _payload(file: BinaryIO, size: int) -> bytearray:
    buffer = bytearray(size)
    del buffer[file.readinto(buffer) :]
    return buffer


def _json(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _check_sample(
    payload: bytearray, meta: dict[str, Any], entry: SampleEntry | None, manifest: Manifest
) -> Iterator[str]:
    """What is wrong with one sample's tensors, in words."""
    if not {"id", "source", "turns", "probes", "crc32"} <= set(meta):
        yield "its JSON member is damaged"
    elif zlib.crc32(payload) != meta["crc32"]:
        yield "its tensors do not have the CRC-32 that its JSON member records"
    try:
        tensors = decode_sample(payload)
    except UserError as error:
        yield str(error)
        return
    ids_S, mask_S, hidden_SFD = tensors["input_ids"], tensors["loss_mask"], tensors["hidden"]
    shape = (len(manifest.features.layer_ids), manifest.target.hidden_size)
    if hidden_SFD.shape[1:] != shape:
        yield f"hidden is {list(hidden_SFD.shape)}, the manifest's layers and size give [S, {shape[0]}, {shape[1]}]"
    outside = (ids_S < 0) | (ids_S >= manifest.target.vocab_size)
    if outside.any():
        yield f"token id {int(ids_S[outside][0])} is outside 0..{manifest.target.vocab_size - 1}"
    if (ids_S == manifest.mask_token_id).any():
        yield f"contains the mask token {manifest.mask_token_id}"
    if (mask_S > 1).any():
        yield f"loss mask holds {int(mask_S.max())}, it has to be 0 or 1"
    anchors = len(anchor_positions(mask_S))
    if not anchors or bool(mask_S.all()):
        yield (
            f"loss mask has {int(mask_S.sum())} ones in {len(mask_S)} and {anchors} anchors: two in a row, but not "
            "all, are needed"
        )
    counts = (len(ids_S), int(mask_S.sum()), anchors)
    if entry is not None and counts != (entry.tokens, entry.supervised, entry.anchors):
        yield (
            f"tokens, supervised, anchors are {counts}, the index says "
            f"{(entry.tokens, entry.supervised, entry.anchors)}"
        )
    if not hidden_SFD.isfinite().all():
        position, feature = (~hidden_SFD.isfinite()).any(-1).nonzero()[0].tolist()
        yield f"state at position {position}, feature {feature} is NaN or infinite"
    empty_SF = (hidden_SFD == 0).all(-1)
    if empty_SF.any():
        position, feature = empty_SF.nonzero()[0].tolist()
        yield f"{int(empty_SF.sum())} rows are all zero, the first at position {position}, feature {feature}"


def _check_target(manifest: Manifest, target: Path) -> Iterator[str]:
    """The manifest against the facts of `target`: config, embedding, head, tokenizer."""
    facts = target_facts(target, manifest.target.dtype)
    for difference in manifest.differences({"target": facts, "tokenizer_sha256": tokenizer_sha256(target)}):
        yield f"manifest.json against {target}: {difference}"


def _recompute(folder: Path, manifest: Manifest, target: Path, chosen: list[SampleEntry]) -> Iterator[str]:
    """Run the samples `chosen` through the target, one by one, and compare states and probes with the stored ones."""
    state_limit, logprob_limit = TOLERANCE[manifest.target.dtype]
    taps = FeatureTaps(load_model(target), manifest.features.layer_ids)
    for entry in tqdm(chosen, desc="recomputing", unit=" samples"):
        stored = read_sample(folder / entry.shard, entry.offset, entry.nbytes)
        prompt = int(stored["loss_mask"].argmax())
        (again,) = taps.run([stored["input_ids"]], [prompt])
        old_SFD, new_SFD = stored["hidden"].float(), again.hidden.float()
        error_SF = (old_SFD - new_SFD).norm(dim=-1) / new_SFD.norm(dim=-1)
        if not float(error_SF.max()) <= state_limit:
            position, feature = divmod(int(error_SF.argmax()), error_SF.shape[1])
            yield (
                f"{entry.shard} {entry.key}: states differ from the target's by up to {float(error_SF.max()):.3f} "
                f"(position {position}, layer {manifest.features.layer_ids[feature]}; allowed {state_limit}): not this "
                "sample's states"
            )
        for old, new in zip(read_meta(folder / entry.shard, entry.key)["probes"], again.probes):
            if old["argmax"] != new["argmax"] and abs(old["logprob"] - new["logprob"]) > logprob_limit:
                yield (
                    f"{entry.shard} {entry.key}: probe at position {old['position']} is {old['argmax']}, the target "
                    f"says {new['argmax']}"
                )


def format_report(folder: Path, report: Report) -> str:
    """The findings, or the table of a good dataset."""
    if report.findings:
        return "\n".join([*report.findings, f"{folder}: {len(report.findings)} findings"])
    manifest = Manifest.read(folder)
    supervised = sum(shard.supervised for shard in manifest.shards)
    rows = {
        "shards": f"{report.shards}",
        "samples": f"{report.samples}",
        "tokens": f"{report.tokens} ({supervised} supervised)",
        "bytes": f"{sum(shard.bytes for shard in manifest.shards)}",
        "layers": f"{manifest.features.layer_ids} of {manifest.target.num_hidden_layers}",
        "equal to argmax": f"{manifest.argmax_share:.2%} of the supervised tokens",
        "recomputed": f"{report.recomputed} samples",
    }
    return "\n".join([f"{folder}: good", *(f"  {name:<16} {value}" for name, value in rows.items())])
