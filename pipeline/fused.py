"""The drafter's elementwise pieces in one kernel each where a GPU has Triton: RMSNorm, SwiGLU, rotary embedding.

RMSNorm and SwiGLU are liger-kernel's where it is installed, the rest is compiled by PyTorch. On a CPU everything is the
plain formula, which tests compare with Qwen3's own modules.
"""
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from pipeline.compiled import compiled


@cache
def _liger():
    """liger-kernel's (RMSNorm, SiLU times) functions, or None."""
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return None
    return LigerRMSNormFunction, LigerSiLUMulFunction


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def plain_rotate(x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    half = x_BHTD.shape[-1] // 2
    turned = torch.cat([-x_BHTD[..., half:], x_BHTD[..., :half]], -1)
    return x_BHTD * cos_BTD[:, None] + turned * sin_BTD[:, None]


_compiled_rms_norm, _compiled_swiglu, _compiled_rotate = (
    compiled(function, dynamic=True) for function in (plain_rms_norm, plain_swiglu, plain_rotate))


def rotate(x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """Rotary embedding of every head, the two halves of a head paired (Qwen3's and Llama's layout)."""
    return (_compiled_rotate if x_BHTD.is_cuda else plain_rotate)(x_BHTD, cos_BTD, sin_BTD)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if not gate.is_cuda:
        return plain_swiglu(gate, up)
    return liger[1].apply(gate, up) if (liger := _liger()) else _compiled_swiglu(gate, up)


class RMSNorm(Qwen3RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return super().forward(x)
        if liger := _liger():
            return liger[0].apply(x, self.weight, self.variance_epsilon, 0.0, "llama", False)
        return _compiled_rms_norm(x, self.weight, self.variance_epsilon)


class MLP(Qwen3MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
