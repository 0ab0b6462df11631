"""The training step as a plain trainer writes it, to measure ours against: a dense mask over all scores, all logits at
once, the spec's formulas one after the other. It takes the weights of our drafter and shares none of its code paths.
Two kinds of attention: the score matrix written out, or handed to PyTorch's fused kernel with the dense mask.

Shapes: B batch, S context tokens, N anchors, K slots of a block, D hidden, V vocabulary, Q = N * K.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.batches import MicroBatch
from pipeline.drafter import DFlashDrafter


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = x.float() if x.dtype == torch.bfloat16 else x
    return weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x_BHTD: Tensor, positions_BT: Tensor, theta: float) -> Tensor:
    half = x_BHTD.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x_BHTD.device, dtype=torch.float32) / half)
    angles = (positions_BT[:, None, :, None] * frequencies).repeat(1, 1, 1, 2)
    turned = torch.cat([-x_BHTD[..., half:], x_BHTD[..., :half]], -1)
    return x_BHTD * angles.cos().to(x_BHTD.dtype) + turned * angles.sin().to(x_BHTD.dtype)


def dense_mask(anchors_BN: Tensor, S: int, K: int) -> Tensor:
    """bool [B, 1, N*K, S + N*K]: context before the anchor, and the own block."""
    B, N = anchors_BN.shape
    block = torch.arange(N, device=anchors_BN.device).repeat_interleave(K)
    context = torch.arange(S, device=anchors_BN.device) < anchors_BN.repeat_interleave(K, 1)[:, :, None]
    own = (block[:, None] == block).expand(B, N * K, N * K)
    return torch.cat([context, own], -1)[:, None]


def written_out(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    return scores.masked_fill(~attn_mask, float("-inf")).softmax(-1) @ v


def plain_hidden(drafter: DFlashDrafter, noise_BQD: Tensor, features_BSE: Tensor, anchors_BN: Tensor,
                 attend=written_out) -> Tensor:
    """[B, N*K, D] after the final norm."""
    config = drafter.config
    K, S, eps, theta = config.block_size, features_BSE.shape[1], config.rms_norm_eps, config.rope["rope_theta"]
    heads = config.num_attention_heads
    slots = (anchors_BN[:, :, None] + torch.arange(K, device=anchors_BN.device)).flatten(1)
    places = torch.arange(S, device=anchors_BN.device).expand(len(anchors_BN), S)
    mask = dense_mask(anchors_BN, S, K)
    context = rms_norm(F.linear(features_BSE, drafter.fc.weight), drafter.hidden_norm.weight, eps)
    x = noise_BQD
    for layer in drafter.layers:
        attn = layer.self_attn
        split = lambda t: t.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)  # noqa: E731
        h = rms_norm(x, layer.input_layernorm.weight, eps)
        q = rotate(rms_norm(split(F.linear(h, attn.q_proj.weight)), attn.q_norm.weight, eps), slots, theta)
        both, positions = torch.cat([context, h], 1), torch.cat([places, slots], 1)
        k = rotate(rms_norm(split(F.linear(both, attn.k_proj.weight)), attn.k_norm.weight, eps), positions, theta)
        v = split(F.linear(both, attn.v_proj.weight))
        k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
        out = attend(q, k, v, attn_mask=mask)
        x = x + F.linear(out.transpose(1, 2).flatten(2), attn.o_proj.weight)
        h, mlp = rms_norm(x, layer.post_attention_layernorm.weight, eps), layer.mlp
        x = x + F.linear(F.silu(F.linear(h, mlp.gate_proj.weight)) * F.linear(h, mlp.up_proj.weight), mlp.down_proj.weight)
    return rms_norm(x, drafter.norm.weight, eps)


def plain_loss(hidden_BQD: Tensor, head_VD: Tensor, mb: MicroBatch, K: int, alpha: float) -> Tensor:
    """D-PACE from the logits of every slot (spec 3), divided by the valid anchors."""
    logits = (hidden_BQD @ head_VD.t()).float().unflatten(1, (-1, K))
    labels = F.pad(mb.labels_BNJ, (1, 0))
    nll = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(labels)[..., 1:]
    mask = mb.mask_BNJ.float()
    with torch.no_grad():
        smooth = ((1 - alpha) * torch.exp(-nll) + alpha) * mask
        weights = smooth.cumprod(-1).flip(-1).cumsum(-1).flip(-1)
    return (weights * nll * mask).sum() / mb.mask_BNJ[..., 0].sum()
