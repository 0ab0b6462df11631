"""Facts about a target model, read from its Hugging Face folder without building the model.

Cost: the config, and the two tensors that training needs (embedding table and LM head; 1.2 GB each at Qwen3-8B).
"""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .errors import UserError
from .files import canonical_json, sha256_hex

# Where Hugging Face models keep the two tensors: plain causal LMs, and text models nested in multimodal ones.
EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.language_model.lm_head.weight")


def read_config(folder: str | Path) -> dict[str, Any]:
    """The parsed `config.json` of `folder`. UserError when `folder` holds none."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no config.json: a target is a local Hugging Face model folder; pass its path.")
    return json.loads(path.read_text())


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of `config` that describes the language model: `text_config` of a multimodal model, else all of it."""
    return config.get("text_config", config)


def config_sha256(folder: str | Path) -> str:
    """SHA-256 of the config's meaning: key order, library version and where it was loaded from do not count."""
    config = read_config(folder)
    return sha256_hex(
        canonical_json({k: v for k, v in config.items() if k not in ("transformers_version", "_name_or_path")})
    )


def feature_layer_ids(num_layers: int, n: int = 5) -> list[int]:
    """Layer ids of the `n` features of a `num_layers`-layer target, uniform from the 2nd to the 3rd-to-last layer.

    Id k is the output of 0-based decoder layer k, Hugging Face's `hidden_states[k + 1]` (DFlash, arXiv 2602.06036, and
    z-lab's code: Python's round). UserError when fewer than n distinct layers exist.
    """
    if n == 1:
        return check_layer_ids([num_layers // 2], num_layers)
    ids = [round(1 + i * (num_layers - 4) / (n - 1)) for i in range(n)]
    if len(set(ids)) < n or num_layers < 4:
        raise UserError(
            f"a target of {num_layers} layers has no {n} distinct feature layers between its 2nd and 3rd-to-last "
            f"(at most {max(num_layers - 3, 0)}); pass --layer-ids."
        )
    return check_layer_ids(ids, num_layers)


def check_layer_ids(ids: Iterable[int], num_layers: int) -> list[int]:
    """`ids` as a list if every one can be a feature: distinct and in [0, num_layers - 2]. UserError otherwise."""
    ids = list(ids)
    if not ids:
        raise UserError("no layer ids given: name at least one decoder layer, for example --layer-ids 1,8,15.")
    for i in ids:
        if not 0 <= i < num_layers:
            raise UserError(
                f"layer id {i} does not exist: the target has decoder layers 0..{num_layers - 1}; fix --layer-ids."
            )
        if i == num_layers - 1:
            raise UserError(
                f"layer id {i} is the last layer, which Hugging Face returns after the final norm and serving engines "
                f"before it; use ids up to {num_layers - 2} in --layer-ids."
            )
    if len(set(ids)) < len(ids):
        raise UserError(f"layer ids {ids} name a layer twice; every feature needs its own layer, fix --layer-ids.")
    return ids


def stop_token_ids(folder: str | Path, tokenizer: Any) -> list[int]:
    """Ids that end a response: eos of generation_config.json, of config.json and of the tokenizer, sorted."""
    path = Path(folder) / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    config = read_config(folder)
    stops: set[int] = set()
    for value in (generation.get("eos_token_id"), text_config(config).get("eos_token_id"), tokenizer.eos_token_id):
        stops.update(value if isinstance(value, list) else [] if value is None else [value])
    if not stops:
        raise UserError(f"{folder} names no end-of-turn token: set eos_token_id in its generation_config.json.")
    return sorted(stops)


def mask_token_id(
    tokenizer: Any,
    vocab_rows: int,
    explicit: int | None = None,
    *,
    stop_ids: Iterable[int] = (),
    template: str | None = None,
) -> int:
    """The row of the target's embedding table that fills a block's open slots: one that text never uses.

    Order: `explicit`, the tokenizer's mask token, the first row past the tokenizer (Qwen3: 151669), a special token
    that neither the tokenizer's roles nor the chat template use, names with "reserved" or "unused" first (Llama 3.1:
    128002). `vocab_rows` is the number of embedding rows; `template` defaults to the tokenizer's chat template. Never
    pad, eos, bos or one of `stop_ids`, never past the table; UserError names the id, the rule and the remedy.
    """
    roles = {"pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id, "bos": tokenizer.bos_token_id}
    taken = {i: f"the tokenizer's {role} token" for role, i in roles.items() if i is not None}
    taken |= {i: "a stop token of the target" for i in stop_ids if i not in taken}
    template = template if template is not None else tokenizer.chat_template or ""
    if explicit is not None:
        if not 0 <= explicit < vocab_rows:
            raise UserError(
                f"mask token id {explicit} is not a row of the target's embedding table (rows 0..{vocab_rows - 1}); "
                "the table is never resized, choose an existing row with --mask-token-id."
            )
        if explicit in taken:
            raise UserError(
                f"mask token id {explicit} is {taken[explicit]}: its embedding means something in text; choose a row "
                "that text never uses with --mask-token-id."
            )
        return explicit
    if (
        tokenizer.mask_token_id is not None
        and tokenizer.mask_token_id < vocab_rows
        and tokenizer.mask_token_id not in taken
    ):
        return tokenizer.mask_token_id
    first_free = max(tokenizer.get_vocab().values()) + 1
    if first_free < vocab_rows:
        return first_free
    specials = [
        (re.search("reserved|unused", token.content, re.IGNORECASE) is None, i)
        for i, token in tokenizer.added_tokens_decoder.items()
        if token.special
        and i < vocab_rows
        and i not in taken
        and i != tokenizer.unk_token_id
        and token.content not in template
    ]
    if not specials:
        raise UserError(
            f"the tokenizer has no mask token, fills all {vocab_rows} embedding rows and has no unused special token: "
            "name a row that text never uses with --mask-token-id."
        )
    return min(specials)[1]


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Name -> safetensors file, for a single-file or an indexed checkpoint."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise UserError(f"{folder} holds no model.safetensors and no index of one; save the target with safetensors.")
    with safe_open(single, "pt") as file:
        return {name: single for name in file.keys()}


def _read_one(files: dict[str, Path], names: tuple[str, ...]) -> torch.Tensor | None:
    """The tensor stored under one of `names`; None when none is. UserError when several are."""
    found = [name for name in names if name in files]
    if len(found) > 1:
        raise UserError(f"the target stores {' and '.join(found)}: which one is the language model's is ambiguous.")
    if not found:
        return None
    with safe_open(files[found[0]], "pt") as file:
        return file.get_tensor(found[0])


def read_embedding_and_head(folder: str | Path) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Embedding table [V, D], LM head [V, D] (stored dtype) and whether they are one tensor.

    Tied means the config says `tie_word_embeddings` (top level or text_config). A missing head of an untied target, and
    a stored head that differs from the embedding of a tied one, are UserErrors: nothing is ever initialised here.
    """
    folder = Path(folder)
    config = read_config(folder)
    files = _tensor_files(folder)
    embedding = _read_one(files, EMBEDDING_NAMES)
    if embedding is None:
        raise UserError(f"{folder} stores no embedding table (looked for {', '.join(EMBEDDING_NAMES)}).")
    flags = [c["tie_word_embeddings"] for c in (config, text_config(config)) if "tie_word_embeddings" in c]
    head = _read_one(files, HEAD_NAMES)
    if not flags and head is None:
        raise UserError(
            f"{folder} stores no LM head and its config.json does not say tie_word_embeddings; set it to true if the "
            "head is the embedding table, else save the target with its head."
        )
    if any(flags):
        if head is not None and not torch.equal(head, embedding):
            raise UserError(
                f"{folder}: config.json says tie_word_embeddings, but the stored LM head differs from the embedding; "
                "correct the flag or remove the head tensor."
            )
        return embedding, embedding, True
    if head is None:
        raise UserError(
            f"{folder} is untied (tie_word_embeddings is false) and stores no LM head (looked for "
            f"{', '.join(HEAD_NAMES)}); save the target with its head."
        )
    return embedding, head, False


def read_layers(folder: str | Path, ids: Iterable[int]) -> dict[int, dict[str, torch.Tensor]]:
    """Layer id -> its tensors (stored dtype) by their name inside the layer, e.g. "self_attn.q_proj.weight".

    UserError where the target does not store a layer under one of the usual names.
    """
    files = _tensor_files(Path(folder))
    prefixes = [name.removesuffix("embed_tokens.weight") for name in EMBEDDING_NAMES if name in files]
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for i in ids:
        start = f"{prefixes[0]}layers.{i}." if prefixes else ""
        names = [name for name in files if start and name.startswith(start)]
        if not names:
            raise UserError(f"{folder} stores no tensors of decoder layer {i} beside its embedding table; its layers cannot be read.")
        layers[i] = {name.removeprefix(start): _read_one(files, (name,)) for name in names}
    return layers


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 over dtype, shape and bytes of `tensor` (moved to the CPU, made contiguous)."""
    tensor = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".encode())
    digest.update(memoryview(tensor.view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def tokenizer_sha256(folder: str | Path) -> str:
    """SHA-256 of the files that turn text into ids: tokenizer.json, else the slow tokenizer's files."""
    folder = Path(folder)
    names = (
        ["tokenizer.json"] if (folder / "tokenizer.json").is_file() else ["tokenizer.model", "vocab.json", "merges.txt"]
    )
    present = [name for name in names if (folder / name).is_file()]
    if not present:
        raise UserError(
            f"{folder} holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json); add the target's own."
        )
    digest = hashlib.sha256()
    for name in present:
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    return digest.hexdigest()


def target_facts(folder: str | Path, dtype: str) -> dict[str, Any]:
    """The manifest's `target` block for `folder` run in `dtype` ("float32", "bfloat16"); reads embedding and head."""
    config = text_config(read_config(folder))
    embedding, head, tied = read_embedding_and_head(folder)
    snapshot = re.search(r"snapshots/([0-9a-f]{40})", str(Path(folder).resolve()))  # a Hugging Face hub cache folder
    embedding_hash = tensor_sha256(embedding)
    return {
        "name": str(folder),
        "revision": snapshot[1] if snapshot else None,
        "config_sha256": config_sha256(folder),
        "dtype": dtype,
        "num_hidden_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "vocab_size": embedding.shape[0],
        "tied": tied,
        "embedding_sha256": embedding_hash,
        "head_sha256": embedding_hash if tied else tensor_sha256(head),
    }
