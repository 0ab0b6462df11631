"""How many bytes a dataset will take, before anything is computed.

    python -m data_prep estimate --target TARGET --tokens 100000000

It reads the config.json and nothing else.
"""

import json
from pathlib import Path

from .errors import UserError
from .shards import sample_bytes
from .target import feature_layer_ids, read_config, text_config


def estimate(
    target: Path, tokens: int, *, features: int = 5, max_length: int = 3072, shard_bytes: int = 2_000_000_000
) -> str:
    """A table for `tokens` tokens of a target given as a model folder or as a config.json alone."""
    config = text_config(json.loads(target.read_text()) if target.is_file() else read_config(target))
    if not {"num_hidden_layers", "hidden_size"} <= set(config):
        raise UserError(
            f"{target} does not give num_hidden_layers and hidden_size: it is no language model's configuration."
        )
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    ids = feature_layer_ids(layers, features)
    per_token = features * hidden * 2 + 5  # bf16 states, int32 id, uint8 mask
    total = per_token * tokens
    largest = sample_bytes(max_length, features, hidden)
    rows = {
        "target": f"{layers} layers, hidden size {hidden}",
        "feature layers": f"{','.join(map(str, ids))}",
        "bytes per token": f"{per_token} ({features} x {hidden} x 2 + 5; {per_token / 1024:.1f} KiB)",
        f"sample of {max_length}": f"{largest / 1e6:.1f} MB",
        f"{tokens} tokens": f"{total / 1e9:.2f} GB, {max(1, -(-total // shard_bytes))} shards of "
        f"{shard_bytes / 1e9:g} GB",
    }
    return "\n".join(f"{name:<20} {value}" for name, value in rows.items())
