"""How many bytes a dataset will take, before anything is computed.

    python -m data_prep estimate --target TARGET --tokens 100000000

It reads the config.json and nothing else.
"""

import json
import shutil
import sys
from pathlib import Path

from .errors import UserError
from .samples import Storage, token_bytes
from .shards import sample_bytes
from .target import feature_layer_ids, read_config, text_config


def estimate(
    target: Path,
    tokens: int,
    *,
    features: int = 5,
    max_length: int = 3072,
    shard_bytes: int = 2_000_000_000,
    storage: Storage = "bf16",
    last_hidden: bool = False,
) -> str:
    """A table for `tokens` tokens of a target given as a model folder or as a config.json alone."""
    config = text_config(json.loads(target.read_text()) if target.is_file() else read_config(target))
    if not {"num_hidden_layers", "hidden_size"} <= set(config):
        raise UserError(
            f"{target} does not give num_hidden_layers and hidden_size: it is no language model's configuration."
        )
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    ids = feature_layer_ids(layers, features)
    per_token = token_bytes(features, hidden, storage, last_hidden)
    total = per_token * tokens
    largest = sample_bytes(max_length, features, hidden, storage, last_hidden)
    states = f"{features} x {hidden} x 2" if storage == "bf16" else f"{features} x ({hidden} + 4)"
    rows = {
        "target": f"{layers} layers, hidden size {hidden}",
        "feature layers": f"{','.join(map(str, ids))}",
        "bytes per token": f"{per_token} ({states}{f' + {hidden} x 2' if last_hidden else ''} + 5; "
        f"{per_token / 1024:.1f} KiB)",
        f"sample of {max_length}": f"{largest / 1e6:.1f} MB",
        f"{tokens} tokens": f"{total / 1e9:.2f} GB, {max(1, -(-total // shard_bytes))} shards of "
        f"{shard_bytes / 1e9:g} GB",
    }
    return "\n".join(f"{name:<20} {value}" for name, value in rows.items())


def check_room(folder: Path, needed: int, force: bool) -> None:
    """UserError unless the disk of `folder` has `needed` bytes left; with `force` only a warning on stderr."""
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return
    message = f"the shards still to be made take {needed / 1e9:.2f} GB, the disk of {folder} has {free / 1e9:.2f} GB left"
    if not force:
        raise UserError(
            f"{message}; choose a larger disk, halve the bytes with --storage fp8, or pass --force if room will be made."
        )
    print(f"warning: {message}", file=sys.stderr)
