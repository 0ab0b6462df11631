"""The target as a running model: how it is loaded, and where its decoder layers are."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from .errors import UserError


def compute_dtype() -> torch.dtype:
    """bfloat16 on a GPU, float32 on a CPU (where bfloat16 arithmetic is a hundred times slower)."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32: the manifest's spelling."""
    return str(dtype).removeprefix("torch.")


def load_model(
    folder: str | Path, dtype: torch.dtype | None = None, device_map: str | dict[str, Any] | None = None
) -> PreTrainedModel:
    """The frozen causal LM of the local folder `folder`, in `dtype` (default: compute_dtype), on the GPU if there is one;
    `device_map` spreads a model that is larger than one GPU over several (accelerate's "auto", or module names).
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype or compute_dtype(), device_map=device_map, local_files_only=True
    )
    if device_map is None:
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    return model.eval().requires_grad_(False)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of `model`'s text part: its one outermost ModuleList of `num_hidden_layers` modules."""
    count = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder()
    found: dict[str, nn.ModuleList] = {}
    for name, module in decoder.named_modules():  # parents come before their children
        nested = any(name.startswith(outer + ".") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == count and not nested:
            found[name] = module
    if len(found) != 1:
        raise UserError(
            f"{type(decoder).__name__} has {len(found)} lists of {count} modules ({', '.join(found) or 'none'}), "
            "expected exactly one, its decoder layers; this architecture is not supported."
        )
    return next(iter(found.values()))
