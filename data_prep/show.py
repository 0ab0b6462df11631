"""A dataset or one of its samples in words: the `inspect` stage.

    python -m data_prep inspect dataset/ 000003

Without a key it shows the manifest and a row per shard.
"""

import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from .errors import UserError
from .manifest import Manifest, SampleEntry
from .records import finished
from .samples import read_sample
from .shards import read_meta, read_metas
from .tokens import load_tokenizer

COLOUR = ("\033[32m", "\033[0m")  # green for supervised text on a terminal
PLAIN = ("[[", "]]")


def show_dataset(folder: Path) -> str:
    """The manifest in a few lines and a row per finished shard."""
    manifest = Manifest.read(folder)
    shards = [record.shard for record in finished(folder, manifest)]
    target = manifest.target
    lines = [
        f"{folder}: {'sealed' if manifest.sealed else 'unfinished'}, {len(shards)} of {manifest.plan.shards} "
        f"shards, {manifest.plan.samples} samples, {manifest.plan.tokens} tokens planned; dropped "
        f"{manifest.dropped or 'nothing'}",
        f"target {target.name} ({target.num_hidden_layers} layers, hidden size {target.hidden_size}, {target.dtype}, "
        f"{'tied' if target.tied else 'untied'}), layers {manifest.features.layer_ids}, mask token "
        f"{manifest.mask_token_id}",
        f"template arguments {manifest.template_args}, max length {manifest.max_length}, storage {manifest.storage}"
        f"{' with last_hidden' if manifest.features.last_state else ''}, content {manifest.sha256()[:16]}",
        f"responses from {manifest.responses.generator}, "
        f"{'greedy' if manifest.responses.sampling is None else f'sampled {manifest.responses.sampling}'}, "
        f"{manifest.responses.from_text} of them tokenised text",
        f"{'shard':<12}{'samples':>9}{'tokens':>10}{'supervised':>12}{'anchors':>9}{'MB':>9}{'= argmax':>10}",
    ]
    for s in shards:
        share = s.argmax_matches / s.supervised
        lines.append(
            f"{s.name:<12}{s.samples:>9}{s.tokens:>10}{s.supervised:>12}{s.anchors:>9}"
            f"{s.bytes / 1e6:>9.1f}{share:>10.2%}"
        )
    return "\n".join(lines)


def find_entry(folder: Path, manifest: Manifest, key: str) -> SampleEntry:
    """The sample with the key, or with the source id, `key`. UserError when there is none."""
    records = finished(folder, manifest)
    entries = [row for record in records for row in record.samples]
    by_key = {entry.key: entry for entry in entries}
    if key in by_key:
        return by_key[key]
    for record in records:
        for name, meta in read_metas(folder / record.shard.name):
            if meta["id"] == key:
                return by_key[name]
    known = f"keys run from {entries[0].key} to {entries[-1].key}" if entries else "no shard is finished"
    raise UserError(f"{folder} has no sample {key!r}: {known}; give one of them or a source id.")


def show_sample(folder: Path, key: str, target: Path | None = None) -> str:
    """Text with supervised spans marked, lengths, norms per layer and probes of one sample.

    The tokenizer is that of `target`, else of the manifest's target if that folder is still there, else ids are shown.
    """
    manifest = Manifest.read(folder)
    entry = find_entry(folder, manifest, key)
    sample = read_sample(folder / entry.shard, entry.offset, entry.nbytes)
    meta = read_meta(folder / entry.shard, entry.key)
    place = target or Path(manifest.target.name)
    tokenizer = load_tokenizer(place) if place.is_dir() else None
    norms_SF = sample["hidden"].float().norm(dim=-1)
    lines = [
        f"{entry.shard} {entry.key}: id {meta['id']}, source {meta['source']}, {entry.tokens} tokens, "
        f"{entry.supervised} supervised, {entry.anchors} anchors",
        *(
            f"  turn {turn['turn'] + 1}: positions {turn['start']} to {turn['end'] - 1}, ended by {turn['finish_reason']}"
            f"{'' if turn['supervised'] else ', not supervised'}"
            for turn in meta["turns"]
        ),
        _marked(sample["input_ids"], sample["loss_mask"], tokenizer),
        "state norms     " + "  ".join(f"{name:>9}" for name in ("mean", "min", "max")),
    ]
    for feature, layer in enumerate(manifest.features.layer_ids):
        row = norms_SF[:, feature]
        lines.append(
            f"  layer {layer:<8}" + "  ".join(f"{float(value):>9.2f}" for value in (row.mean(), row.min(), row.max()))
        )
    lines.append("probes (the target's argmax after a position, and what the text has there)")
    for probe in meta["probes"]:
        actual = int(sample["input_ids"][probe["position"] + 1])
        equal = "=" if actual == probe["argmax"] else "!"
        lines.append(
            f"  {probe['position']:>6}  {_token(tokenizer, probe['argmax'])} {equal} {_token(tokenizer, actual)}  "
            f"logprob {probe['logprob']}"
        )
    return "\n".join(lines)


def _token(tokenizer: PreTrainedTokenizerBase | None, token: int) -> str:
    return str(token) if tokenizer is None else f"{token} {tokenizer.decode([token])!r}"


def _marked(ids_S: torch.Tensor, mask_S: torch.Tensor, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The text (ids without a tokenizer), supervised spans green on a terminal, in [[ ]] elsewhere."""
    left, right = COLOUR if sys.stdout.isatty() else PLAIN
    ends = [0, *(mask_S.diff().nonzero().flatten() + 1).tolist(), len(ids_S)]
    spans = []
    for start, end in zip(ends, ends[1:]):
        ids = ids_S[start:end].tolist()
        text = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)
        spans.append(f"{left}{text}{right}" if mask_S[start] else text)
    return "".join(spans)
