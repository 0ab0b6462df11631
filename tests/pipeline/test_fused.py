"""The plain formulas that a GPU compiles, against Qwen3's own modules."""
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, apply_rotary_pos_emb

from pipeline.fused import MLP, RMSNorm, plain_rms_norm, plain_rotate, plain_swiglu, rotate


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_norm_is_qwen3s():
    weight, x = random(24), random(3, 5, 24, seed=1)
    theirs, ours = Qwen3RMSNorm(24, eps=1e-6), RMSNorm(24, eps=1e-6)
    theirs.weight.data, ours.weight.data = weight, weight
    for dtype in (torch.float32, torch.bfloat16):
        expected = theirs.to(dtype)(x.to(dtype))
        assert torch.equal(ours.to(dtype)(x.to(dtype)), expected)
        assert torch.equal(plain_rms_norm(x.to(dtype), weight.to(dtype), 1e-6), expected)


def test_the_mlp_is_qwen3s():
    config = Qwen3Config(hidden_size=24, intermediate_size=40)
    theirs, ours, x = Qwen3MLP(config), MLP(config), random(3, 5, 24)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(x), theirs(x))
    gate, up = theirs.gate_proj(x), theirs.up_proj(x)
    assert torch.equal(theirs.down_proj(plain_swiglu(gate, up)), theirs(x))


def test_the_rotation_is_qwen3s():
    q, k, cos, sin = random(2, 4, 5, 8), random(2, 2, 5, 8, seed=1), random(2, 5, 8, seed=2), random(2, 5, 8, seed=3)
    for ours, theirs in zip((q, k), apply_rotary_pos_emb(q, k, cos, sin)):
        assert torch.equal(plain_rotate(ours, cos, sin), theirs) and torch.equal(rotate(ours, cos, sin), theirs)
