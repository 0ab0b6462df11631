"""The manifest of a dataset folder: what was made, from what, and the hash of every finished shard.

It is written before the first shard and sealed, with all shards listed, after the last; whoever reads the shards
compares it first.
"""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import UserError
from .files import canonical_json, sha256_hex, write_atomic

MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.jsonl"
REMEDY = "`python -m data_prep extract --target TARGET --responses RESPONSES.jsonl --out {folder}`"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Target(_Strict):
    """The model whose states are stored; `dtype` is the one it ran in, `vocab_size` its embedding rows."""

    name: str
    revision: str | None
    config_sha256: str
    dtype: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    tied: bool
    embedding_sha256: str
    head_sha256: str


class Features(_Strict):
    """Which states: raw outputs of the decoder layers `layer_ids` (Hugging Face `hidden_states[id + 1]`).

    `last_state` says what `last_hidden` of a sample is, if it is stored: what the LM head sees. `prefill`: every sample
    went through the target in one pass, not in chunks with a cache.
    """

    layer_ids: list[int]
    norm: Literal["pre_norm"] = "pre_norm"
    last_state: Literal["post_norm"] | None = None
    prefill: Literal["whole"] = "whole"


class Responses(_Strict):
    """Where the supervised tokens come from: who wrote them, the sampling settings (None: greedy), and how many of the
    responses are tokenised text instead of ids that the target emitted.
    """

    generator: Literal["transformers", "server", "data"]
    sampling: dict[str, Any] | None
    from_text: int


class Plan(_Strict):
    """What the finished dataset will hold; known before the first shard, because all lengths are.

    `samples` may be fewer than the responses: turns of a conversation share one where serving would have extended it.
    """

    shards: int
    samples: int
    tokens: int


class Shard(_Strict):
    """A finished shard. `anchors` counts valid anchors, `argmax_matches` supervised tokens the target would emit;
    `fp8_error` is the relative error per layer of fp8 storage, averaged over tokens.
    """

    name: str
    samples: int
    tokens: int
    supervised: int
    anchors: int
    bytes: int
    sha256: str
    argmax_matches: int
    fp8_error: list[float] | None = None


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; template arguments and sampling settings stay one value each."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and name not in ("template_args", "sampling"):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def differences(have: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """One "field: have X, expected Y" per field of `expected` that differs in `have`; the target's path is no field."""
    mine = flatten(have)
    return [
        f"{name}: have {mine.get(name)}, expected {value}"
        for name, value in flatten(expected).items()
        if name != "target.name" and (name not in mine or mine[name] != value)
    ]


class Manifest(_Strict):
    """Contents of manifest.json; data_prep/README.md explains every field. `shards` and what follows from them are
    filled in when the dataset is sealed.
    """

    format_version: Literal[2] = 2
    target: Target
    features: Features
    tokenizer_sha256: str
    template_sha256: str
    template_args: dict[str, Any]
    stop_token_ids: list[int]
    mask_token_id: int
    max_length: int
    storage: Literal["bf16", "fp8"] = "bf16"
    shard_bytes: int
    batch_tokens: int
    source_sha256: str
    responses: Responses
    drop: list[str] = []
    plan: Plan
    shards: list[Shard] = []
    argmax_share: float | None = None
    dropped: dict[str, int]
    sealed: bool = False
    index_sha256: str | None = None

    @classmethod
    def read(cls, folder: str | Path) -> "Manifest":
        """The manifest of `folder`. UserError names the command that makes one, or what is wrong with it."""
        path = Path(folder) / MANIFEST_NAME
        if not path.is_file():
            raise UserError(
                f"{folder} is not a dataset (no {MANIFEST_NAME}); make one with {REMEDY.format(folder=folder)}."
            )
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise UserError(
                f"{path} is not a manifest of format 2: {error}; make it anew with {REMEDY.format(folder=folder)}."
            )

    def write(self, folder: str | Path) -> None:
        """Replace `folder`'s manifest atomically and durably."""
        write_atomic(Path(folder) / MANIFEST_NAME, self.encode())

    def encode(self) -> bytes:
        """The contents of manifest.json."""
        return (self.model_dump_json(indent=2) + "\n").encode()

    def identity(self) -> dict[str, Any]:
        """Everything that decides the dataset's content and must not change on resume: neither progress nor paths."""
        fields = self.model_dump(exclude={"shards", "argmax_share", "dropped", "sealed", "index_sha256"})
        del fields["target"]["name"]
        return fields

    def differences(self, other: dict[str, Any]) -> list[str]:
        """One "field: have X, expected Y" for each field of `other` (a whole identity or part of one) that differs."""
        return differences(self.identity(), other)

    def sha256(self) -> str:
        """SHA-256 of the content: all fields except where the target lay on disk."""
        fields = self.model_dump()
        del fields["target"]["name"]
        return sha256_hex(canonical_json(fields))

    def require_sealed(self) -> None:
        """UserError unless every planned shard is finished."""
        if not self.sealed:
            raise UserError(
                "the dataset is unfinished; run the same `python -m data_prep extract` command again, it carries on (with "
                "--num-tasks: all tasks, then `python -m data_prep merge`)."
            )


class SampleEntry(NamedTuple):
    """Where a sample's tensors lie: `nbytes` bytes at `offset` of `shard`, and its counts."""

    shard: str
    key: str
    offset: int
    nbytes: int
    tokens: int
    supervised: int
    anchors: int


def read_index(folder: str | Path, manifest: Manifest) -> list[SampleEntry]:
    """All samples of a sealed dataset, in shard order. UserError when index.jsonl disagrees with `manifest`."""
    path = Path(folder) / INDEX_NAME
    if not path.is_file():
        raise UserError(f"{path} is missing; make the dataset anew with {REMEDY.format(folder=folder)}.")
    content = path.read_bytes()
    if sha256_hex(content) != manifest.index_sha256:
        raise UserError(
            f"{path} does not have the sha256 that the manifest records; restore it or make the dataset anew."
        )
    lines = {line["shard"]: line["samples"] for line in map(json.loads, content.splitlines())}
    entries: list[SampleEntry] = []
    for shard in manifest.shards:
        rows = [SampleEntry(shard.name, *row) for row in lines.get(shard.name, [])]
        counts = (len(rows), *(sum(getattr(row, name) for row in rows) for name in ("tokens", "supervised", "anchors")))
        if counts != (shard.samples, shard.tokens, shard.supervised, shard.anchors):
            raise UserError(
                f"{path} lists (samples, tokens, supervised, anchors) = {counts} for shard {shard.name}, the manifest "
                f"{(shard.samples, shard.tokens, shard.supervised, shard.anchors)}; make the dataset anew."
            )
        entries += rows
    return entries
