"""How many tokens a batch may hold, and how running out of memory shows."""

import gc

import psutil
import torch
from transformers import PreTrainedModel

SHARE = 0.5  # of the free memory, for keys and values; the rest is for the prompt's activations, logits and buffers
ROWS = 256  # more rows in a batch bring no more tokens per second
# What allocators write that raise no OutOfMemoryError of their own: torch on a CPU, the standard library, cuBLAS.
SIGNS = ("can't allocate memory", "not enough memory", "bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED")


def cache_bytes(model: PreTrainedModel) -> int:
    """Bytes of keys and values that a token takes in all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize


def batch_tokens(model: PreTrainedModel) -> int:
    """The tokens, padding included, whose keys and values SHARE of the memory holds that is free beside the model."""
    if model.device.type == "cuda":
        unused = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
        free = torch.cuda.mem_get_info(model.device)[0] + unused
    else:
        free = psutil.virtual_memory().available
    return int(free * SHARE) // cache_bytes(model)


def is_out_of_memory(error: Exception) -> bool:
    """Whether `error` says that memory did not suffice."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def release_memory() -> None:
    """Give back what is not in use any more."""
    gc.collect()
    torch.cuda.empty_cache()
