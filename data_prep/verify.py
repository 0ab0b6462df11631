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
from .fp8 import relative_error
from .files import UNFINISHED
from .manifest import Manifest, SampleEntry, Shard
from .model import load_model
from .records import Record, finished
from .samples import anchor_positions, decode_sample, read_sample
from .shards import read_meta, shard_name
from .target import target_facts, tokenizer_sha256

# Largest relative error of a state row, and of a probe's log-probability where its argmax differs (a tie), that
# batching and bfloat16 storage explain; another sample's states are off by about 1.4.
FP8_TOLERANCE = 0.08  # e4m3 rounds a value by up to 1/16
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
        records = finished(folder, manifest)
    except UserError as error:
        findings.append(str(error))
        records = [Record(shard, []) for shard in manifest.shards]
    keys: dict[str, str] = {}
    present = [record for record in records if (folder / record.shard.name).is_file()]
    total = 2 * sum(record.shard.bytes for record in present)
    with tqdm(total=total, desc="verifying", unit="B", unit_scale=True) as bar:
        for shard, rows in present:
            findings += _check_hash(folder / shard.name, shard, bar)
            for finding in _check_members(folder / shard.name, shard, rows, manifest, keys):
                findings.append(f"{shard.name} {finding}")
            bar.update(shard.bytes)
    entries = [row for record in present for row in record.samples]
    samples, tokens = (sum(getattr(record.shard, name) for record in present) for name in ("samples", "tokens"))
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
    planned = [shard_name(number) for number in range(manifest.plan.shards)]
    files = {path.name for path in folder.glob("*.tar")}
    for name in sorted(files - set(planned)):
        yield f"{name}: foreign shard, not in the manifest"
    if not manifest.sealed:
        yield (
            f"unfinished: {len(files & set(planned))} of {manifest.plan.shards} shards; run the same extract command again "
            "(with --num-tasks: all tasks, then merge)"
        )
        return
    listed = [shard.name for shard in manifest.shards]
    if listed != planned:
        yield f"manifest.json: it lists the shards {listed}, planned {planned}"
    sums = tuple(sum(getattr(shard, name) for shard in manifest.shards) for name in ("samples", "tokens"))
    if sums != (manifest.plan.samples, manifest.plan.tokens):
        yield f"manifest.json: samples and tokens add up to {sums}, planned {tuple(manifest.plan.model_dump().values())[1:]}"
    for name in planned:
        if name not in files:
            yield f"{name}: missing"
    for path in sorted(folder.glob(f"*{UNFINISHED}*")):
        yield f"{path.name}: unfinished file beside a finished dataset; remove it"


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
    if not {"id", "source", "turns", "probes", "argmax_matches", "crc32"} <= set(meta):
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
    if ("last_hidden" in tensors) != (manifest.features.last_state is not None):
        yield f"last_hidden is {'there' if 'last_hidden' in tensors else 'missing'}, last_state is {manifest.features.last_state}"
    elif "last_hidden" in tensors and not tensors["last_hidden"].isfinite().all():
        yield "last_hidden holds NaN or infinity"
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
    if manifest.storage == "fp8":
        state_limit += FP8_TOLERANCE
    last = manifest.features.last_state is not None
    taps = FeatureTaps(load_model(target), manifest.features.layer_ids, last_hidden=last)
    for entry in tqdm(chosen, desc="recomputing", unit=" samples"):
        stored = read_sample(folder / entry.shard, entry.offset, entry.nbytes)
        probes = read_meta(folder / entry.shard, entry.key)["probes"]
        (again,) = taps.run([stored["input_ids"]], [stored["loss_mask"]])
        error_SF = relative_error(again.states["hidden"], stored["hidden"])
        if not float(error_SF.max()) <= state_limit:
            position, feature = divmod(int(error_SF.argmax()), error_SF.shape[1])
            yield (
                f"{entry.shard} {entry.key}: states differ from the target's by up to {float(error_SF.max()):.3f} "
                f"(position {position}, layer {manifest.features.layer_ids[feature]}; allowed {state_limit}): not this "
                "sample's states"
            )
        for old, new in zip(probes, again.probes):
            if old["argmax"] != new["argmax"] and abs(old["logprob"] - new["logprob"]) > logprob_limit:
                yield (
                    f"{entry.shard} {entry.key}: probe at position {old['position']} is {old['argmax']}, the target "
                    f"says {new['argmax']}"
                )
        if last:
            error_S = relative_error(again.states["last_hidden"], stored["last_hidden"])
            if not float(error_S.max()) <= state_limit:
                yield (
                    f"{entry.shard} {entry.key}: last_hidden differs from the target's by up to {float(error_S.max()):.3f} "
                    f"(position {int(error_S.argmax())}; allowed {state_limit}): it is not this sample's "
                    f"{manifest.features.last_state} state"
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
