"""Grouped block attention against a dense oracle."""
import pytest
import torch

from pipeline.attention import block_groups, grouped_block_attention


def grouped(tensors, anchors, K, starts=None, group_rows=128):
    return grouped_block_attention(*tensors, block_groups(anchors, starts, K, group_rows), K)


def dense(q, ck, cv, bk, bv, anchors, K, starts=None):
    """The spec's mask over the full score matrix, softmax written out; starts: of each block's document in the row."""
    B, H, Q, D = q.shape
    S, N = ck.shape[2], anchors.shape[1]
    k = torch.cat([ck, bk], 2).repeat_interleave(H // ck.shape[1], 1)
    v = torch.cat([cv, bv], 2).repeat_interleave(H // cv.shape[1], 1)
    visible = torch.zeros(B, 1, Q, S + Q, dtype=torch.bool)
    for b in range(B):
        for n in range(N):
            rows = slice(n * K, (n + 1) * K)
            visible[b, 0, rows, 0 if starts is None else starts[b, n]: anchors[b, n]] = True
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
    check(grouped(tensors, anchors, K, group_rows=rows), dense(*tensors, anchors, K), tensors)


def check(ours, oracle, tensors):
    assert (ours - oracle).abs().max() < 1e-12
    weight = torch.randn_like(oracle)
    for a, b in zip(torch.autograd.grad((ours * weight).sum(), tensors), torch.autograd.grad((oracle * weight).sum(), tensors)):
        assert (a - b).abs().max() < 1e-11


# rows of (documents' lengths, anchors per document, places counted in the document); -1: unused blocks come first
PACKED = {
    "two rows, unused blocks": ([7, 9, 4], [[0, 0, -1, -1], [3, 6, 8], [1, 2, 2]], [11, 9], [[-1, 5, 10], [2, 3, 8]]),
    "a document without anchors": ([6, 5, 6], [[2, 5], [], [0, 1, 5]], [17], [[-1, -1, 4, 4, 16]]),
    "documents of one token": ([1, 1, 1, 18], [[0], [0], [0], [17]], [1, 20], [[], [-1, 3, 9, 19]])}


def packed_case(first, first_anchors, second, second_anchors):
    rows = []
    for lengths, per_document in ((first, first_anchors), (second, second_anchors)):
        unused = sum(a < 0 for document in per_document for a in document)
        blocks, start = [(0, 0)] * unused, 0
        for length, document in zip(lengths, per_document):
            blocks += [(start + a, start) for a in document if a >= 0]
            start += length
        rows.append(blocks)
    N = max(map(len, rows))
    table = torch.tensor([[(0, 0)] * (N - len(row)) + row for row in rows])
    return table[..., 0], table[..., 1], max(sum(first), sum(second))


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("rows", [4, 128])
def test_packed_documents_equal_the_dense_oracle_that_hides_them_from_each_other(name, rows):
    anchors, starts, S = packed_case(*PACKED[name])
    tensors, _ = random_case(2, 4, 2, S, 4, anchors.shape[1], 8, seed=S)
    check(grouped(tensors, anchors, 4, starts, rows), dense(*tensors, anchors, 4, starts), tensors)


def test_no_group_of_a_packed_row_scores_more_than_one_document():
    per_document = [list(range(0, 400, 9)), [5], list(range(3, 500, 7))]
    anchors, starts, _ = packed_case([400, 300, 500], per_document, [1200], [[7]])
    (_, _, groups), _ = block_groups(anchors, starts, 16)
    scored = sum(g.blocks * 16 * (g.high - g.low + 16 * g.blocks) for g in groups)
    visible = sum(16 * (a - s + 16) for a, s in zip(anchors[0].tolist(), starts[0].tolist()))
    assert all(g.low in (0, 400, 700) and g.high - g.low <= 500 and g.blocks <= 8 for g in groups)
    assert scored < 1.8 * visible, (scored, visible)


def test_a_block_with_an_empty_context_sees_only_itself():
    tensors, anchors = random_case(1, 2, 1, 6, 4, 3, 8, seed=0)
    anchors[:] = 0
    out = grouped(tensors, anchors, 4)
    assert torch.isfinite(out).all()
    assert all(g.abs().sum() == 0 for g in torch.autograd.grad(out.sum(), tensors[1:3]))


def test_padding_behind_the_anchors_is_never_read():
    (q, ck, cv, bk, bv), anchors = random_case(2, 4, 2, 12, 4, 5, 8, seed=3)
    anchors.clamp_(max=8)
    expected = grouped((q, ck, cv, bk, bv), anchors, 4)
    poisoned_k, poisoned_v = ck.detach().clone(), cv.detach().clone()
    poisoned_k[:, :, 8:], poisoned_v[:, :, 8:] = float("nan"), float("nan")
    assert torch.equal(expected, grouped((q, poisoned_k, poisoned_v, bk, bv), anchors, 4))
