"""Hidden states in half the bytes: e4m3 codes with one float32 scale per token and layer.

A row of D values takes D + 4 bytes instead of 2 D. The scale maps the row's largest value to 448, the largest number of
e4m3 (OCP 8-bit floating point, revision 1.0), so that outliers of one token or layer cost the others nothing.
"""

import torch

LARGEST = 448.0  # of torch.float8_e4m3fn
CODES = torch.float8_e4m3fn


def quantise(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes float8_e4m3fn [..., D] and scales float32 [...] of states [..., D]; a row with NaN or infinity has a scale
    that is not finite.
    """
    states = hidden.float()
    scale = states.abs().amax(-1) / LARGEST
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)  # a row of zeros stays one
    return (states / scale[..., None]).clamp(-LARGEST, LARGEST).to(CODES), scale


def dequantise(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The bfloat16 states [..., D] that codes [..., D] and scales [...] stand for."""
    return (codes.float() * scale[..., None]).bfloat16()


def relative_error(hidden: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """|stored - hidden| / |hidden| of each row of states [..., D], Euclidean norms, float32 [...]."""
    return (stored.float() - hidden.float()).norm(dim=-1) / hidden.float().norm(dim=-1)
