"""Grouped block attention against a dense oracle."""
import pytest
import torch

from pipeline.attention import grouped_block_attention


def dense(q, ck, cv, bk, bv, anchors, K):
    """The spec's mask over the full score matrix, softmax written out."""
    B, H, Q, D = q.shape
    S, N = ck.shape[2], anchors.shape[1]
    k = torch.cat([ck, bk], 2).repeat_interleave(H // ck.shape[1], 1)
    v = torch.cat([cv, bv], 2).repeat_interleave(H // cv.shape[1], 1)
    visible = torch.zeros(B, 1, Q, S + Q, dtype=torch.bool)
    for b in range(B):
        for n in range(N):
            rows = slice(n * K, (n + 1) * K)
            visible[b, 0, rows, : anchors[b, n]] = True
            visible[b, 0, rows, S + n * K:S + (n + 1) * K] = True
    scores = (q @ k.transpose(-1, -2)) / D ** 0.5
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v


def random_case(B, H, G, S, K, N, D, seed, sort=True):
    g = torch.Generator().manual_seed(seed)
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)  # noqa: E731
    anchors = torch.randint(0, S, (B, N), generator=g)
    anchors = anchors.sort(1).values if sort else anchors
    return (r(B, H, N * K, D), r(B, G, S, D), r(B, G, S, D), r(B, G, N * K, D), r(B, G, N * K, D)), anchors


@pytest.mark.parametrize("B,H,G,S,K,N,D,rows,sort", [
    (2, 4, 2, 23, 4, 7, 8, 8, True), (1, 6, 1, 17, 3, 5, 4, 3, False), (3, 2, 2, 9, 8, 1, 16, 128, True),
    (2, 9, 3, 31, 5, 11, 8, 20, False)])
def test_forward_and_gradients_equal_the_dense_oracle(B, H, G, S, K, N, D, rows, sort):
    tensors, anchors = random_case(B, H, G, S, K, N, D, seed=S, sort=sort)
    ours = grouped_block_attention(*tensors, anchors, K, group_rows=rows)
    oracle = dense(*tensors, anchors, K)
    assert (ours - oracle).abs().max() < 1e-12
    weight = torch.randn_like(oracle)
    for a, b in zip(torch.autograd.grad((ours * weight).sum(), tensors), torch.autograd.grad((oracle * weight).sum(), tensors)):
        assert (a - b).abs().max() < 1e-11


def test_a_block_with_an_empty_context_sees_only_itself():
    tensors, anchors = random_case(1, 2, 1, 6, 4, 3, 8, seed=0)
    anchors[:] = 0
    out = grouped_block_attention(*tensors, anchors, 4)
    assert torch.isfinite(out).all()
    assert all(g.abs().sum() == 0 for g in torch.autograd.grad(out.sum(), tensors[1:3]))


def test_padding_behind_the_anchors_is_never_read():
    (q, ck, cv, bk, bv), anchors = random_case(2, 4, 2, 12, 4, 5, 8, seed=3)
    anchors.clamp_(max=8)
    expected = grouped_block_attention(q, ck, cv, bk, bv, anchors, 4)
    poisoned_k, poisoned_v = ck.detach().clone(), cv.detach().clone()
    poisoned_k[:, :, 8:], poisoned_v[:, :, 8:] = float("nan"), float("nan")
    assert torch.equal(expected, grouped_block_attention(q, poisoned_k, poisoned_v, bk, bv, anchors, 4))
