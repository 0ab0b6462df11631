"""Block attention: queries from the block, keys and values from [context ; block].

Two callers, one mathematics. Training hands over N blocks of a row at once; block n sees the context of its document
before its anchor and itself, never another block (spec 2; DFlash, arXiv 2602.06036). Inference hands over one block
behind a cache, where everything is visible.

Training has several interchangeable implementations. Each is a class: an object is made once a pass from
(anchors_BN, starts_BN, block_size, context_length) and called in every layer with

    q [B, H, N*K, D], context_k, context_v [B, G, S, D], block_k, block_v [B, G, N*K, D]  ->  [B, H, N*K, D]

anchors_BN: int64 places of the anchors in the row, ascending, 0 for an unused block. starts_BN: where the block's
document begins in a row that holds several, 0 for an unused block; None: every row is one document. An unused block
sees only itself, so its rows stay finite.

Shapes: B batch, S context tokens, N anchors, K slots of a block, H query heads, G key/value heads, D head dimension.
"""
from importlib.util import find_spec

import torch
from torch import Tensor

from data_prep.errors import UserError
from pipeline.flash4_attention import Flash4Attention
from pipeline.flash_attention import FlashAttention
from pipeline.flex_attention import FlexAttention
from pipeline.grouped_attention import GroupedAttention, shared_head_attention

IMPLEMENTATIONS = {"sdpa": GroupedAttention, "flex": FlexAttention, "flash2": FlashAttention, "flash4": Flash4Attention}

# On a GPU, fastest first (tests/gpu measures them).
_ORDER = ("flash4", "flex", "flash2", "sdpa")


def resolve_attention(wanted: str, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int],
                      say=print) -> str:
    """The implementation to use: `wanted` (sdpa, flex, flash), or with `auto` the fastest that works.

    What works is tried out on a small pass, forward and backward, against `sdpa`. heads: query heads, key/value heads,
    head dimension. UserError where `wanted` does not work here.
    """
    if wanted == "sdpa" or (wanted == "auto" and device.type == "cpu"):
        return "sdpa"
    names = {"auto": _ORDER, "flash": ("flash4", "flash2"), "flex": ("flex",)}[wanted]
    reasons = []
    for name in names:
        reason = None if name == "sdpa" else why_not(name, device, dtype, heads)
        if reason is None:
            return name
        reasons.append(f"{name}: {reason}")
        say(f"attention {name} does not work here: {reason}")
    raise UserError(f"attention = {wanted} does not work on {device} with {dtype} ({'; '.join(reasons)}); set attention to "
                    "auto or sdpa, or install what is missing with `pip install .[gpu]`")


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def why_not(name: str, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> str | None:
    """Why an implementation does not work here; None where a small pass gives what `sdpa` gives."""
    if device.type != "cuda":
        return "its backward pass needs a GPU"
    if name != "flex" and dtype == torch.float32:
        return "its kernels compute in 16 bits"
    if name == "flash4" and not _installed("flash_attn.cute"):
        return "the package flash-attn-4 is not installed"
    try:
        return _difference(name, device, dtype, heads)
    except Exception as error:  # kernels fail in many ways, and any of them means: take another
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


def _difference(name: str, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> str | None:
    """Output and gradients of a small random pass beside those of `sdpa`; None where they agree."""
    H, G, D = heads
    K, N, S = 4, 70, 300
    random = torch.Generator().manual_seed(0)
    draw = lambda count, length: torch.randn(1, count, length, D, generator=random).to(device, dtype)  # noqa: E731
    tensors = [draw(H, N * K), draw(G, S), draw(G, S), draw(G, N * K), draw(G, N * K)]
    anchors = torch.randperm(S, generator=random)[:N].sort().values[None].to(device)
    weight = draw(H, N * K)
    results = []
    for implementation in (GroupedAttention, IMPLEMENTATIONS[name]):
        inputs = [t.clone().requires_grad_() for t in tensors]
        out = implementation(anchors, None, K, S)(*inputs)
        results.append([out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)])
    worst = max(float((a - b).norm() / b.norm()) for b, a in zip(*results))
    allowed = 3e-2 if dtype == torch.bfloat16 else 1e-4
    return None if worst <= allowed else f"differs from sdpa by {worst:.1e} (relative; {allowed:g} allowed)"


def cached_block_attention(q_BHKD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
    """Attention of one block over T = context + K keys that are all visible; returns [B, H, K, D]. On a GPU PyTorch
    computes this mask-free call with its flash kernels."""
    return shared_head_attention(q_BHKD, k_BGTD, v_BGTD)
