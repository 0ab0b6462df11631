"""Every implementation of block attention against a dense oracle."""
from functools import partial

import pytest
import torch

from pipeline import attention
from pipeline.attention import IMPLEMENTATIONS, resolve_attention
from pipeline.flash_attention import FlashAttention, PackageKernels, staircase_parts
from pipeline.flex_attention import FlexAttention
from pipeline.grouped_attention import GroupedAttention, block_groups
from pipeline.tiles import score_tiles
from data_prep.errors import UserError
from tests.pipeline import plain_flash

# FlashAttention's merging and its backward, over plain kernels behind the package's own interface.
PLAIN_FLASH = partial(FlashAttention, kernels=PackageKernels(plain_flash))
IMPLEMENTED = {"groups of 8 rows": partial(GroupedAttention, group_rows=8), "groups of 128 rows": GroupedAttention,
               "flash parts": PLAIN_FLASH}


def attend(implementation, tensors, anchors, K, starts=None):
    return implementation(anchors, starts, K, tensors[1].shape[2])(*tensors)


def visible_scores(anchors, K, S, starts=None):
    """The spec's mask, bool [B, N*K, S + N*K]; starts: of each block's document in the row."""
    B, N = anchors.shape
    visible = torch.zeros(B, N * K, S + N * K, dtype=torch.bool)
    for b in range(B):
        for n in range(N):
            rows = slice(n * K, (n + 1) * K)
            visible[b, rows, 0 if starts is None else starts[b, n]: anchors[b, n]] = True
            visible[b, rows, S + n * K:S + (n + 1) * K] = True
    return visible


def dense(q, ck, cv, bk, bv, anchors, K, starts=None):
    """Softmax written out over the full score matrix."""
    H, S, D = q.shape[1], ck.shape[2], q.shape[3]
    k = torch.cat([ck, bk], 2).repeat_interleave(H // ck.shape[1], 1)
    v = torch.cat([cv, bv], 2).repeat_interleave(H // cv.shape[1], 1)
    scores = (q @ k.transpose(-1, -2)) / D ** 0.5
    return scores.masked_fill(~visible_scores(anchors, K, S, starts)[:, None], float("-inf")).softmax(-1) @ v


def random_case(B, H, G, S, K, N, D, seed, sort=True):
    g = torch.Generator().manual_seed(seed)
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)  # noqa: E731
    anchors = torch.randint(0, S, (B, N), generator=g)
    anchors = anchors.sort(1).values if sort else anchors
    return (r(B, H, N * K, D), r(B, G, S, D), r(B, G, S, D), r(B, G, N * K, D), r(B, G, N * K, D)), anchors


@pytest.mark.parametrize("name", IMPLEMENTED)
@pytest.mark.parametrize("B,H,G,S,K,N,D,sort", [
    (2, 4, 2, 23, 4, 7, 8, True), (1, 6, 1, 17, 3, 5, 4, False), (3, 2, 2, 9, 8, 1, 16, True), (2, 9, 3, 131, 5, 29, 8, True)])
def test_forward_and_gradients_equal_the_dense_oracle(name, B, H, G, S, K, N, D, sort):
    tensors, anchors = random_case(B, H, G, S, K, N, D, seed=S, sort=sort or name == "flash parts")
    check(attend(IMPLEMENTED[name], tensors, anchors, K), dense(*tensors, anchors, K), tensors)


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


@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize("name", IMPLEMENTED)
def test_packed_documents_equal_the_dense_oracle_that_hides_them_from_each_other(name, case):
    anchors, starts, S = packed_case(*PACKED[case])
    tensors, _ = random_case(2, 4, 2, S, 4, anchors.shape[1], 8, seed=S)
    check(attend(IMPLEMENTED[name], tensors, anchors, 4, starts), dense(*tensors, anchors, 4, starts), tensors)


def test_no_group_of_a_packed_row_scores_more_than_one_document():
    per_document = [list(range(0, 400, 9)), [5], list(range(3, 500, 7))]
    anchors, starts, _ = packed_case([400, 300, 500], per_document, [1200], [[7]])
    (_, _, groups), _ = block_groups(anchors, starts, 16, 128)
    scored = sum(g.blocks * 16 * (g.high - g.low + 16 * g.blocks) for g in groups)
    visible = sum(16 * (a - s + 16) for a, s in zip(anchors[0].tolist(), starts[0].tolist()))
    assert all(g.low in (0, 400, 700) and g.high - g.low <= 500 and g.blocks <= 8 for g in groups)
    assert scored < 1.8 * visible, (scored, visible)


@pytest.mark.parametrize("name", IMPLEMENTED)
def test_a_block_with_an_empty_context_sees_only_itself(name):
    tensors, anchors = random_case(1, 2, 1, 6, 4, 3, 8, seed=0)
    anchors[:] = 0
    out = attend(IMPLEMENTED[name], tensors, anchors, 4)
    assert torch.isfinite(out).all()
    assert all(g.abs().sum() == 0 for g in torch.autograd.grad(out.sum(), tensors[1:3]))


@pytest.mark.parametrize("case", [None, *PACKED])
def test_flex_equals_the_dense_oracle_forwards(case):
    """PyTorch has no backward of it on a CPU; tests/gpu has the gradients."""
    anchors, starts, S = packed_case(*PACKED[case]) if case else (torch.randint(0, 150, (2, 37)), None, 150)
    tensors, _ = random_case(2, 4, 2, S, 4, anchors.shape[1], 8, seed=S)
    with torch.no_grad():
        out = attend(FlexAttention, [t.detach() for t in tensors], anchors, 4, starts)
    assert (out - dense(*tensors, anchors, 4, starts)).abs().max() < 1e-12


@pytest.mark.parametrize("name", IMPLEMENTED)
def test_padding_behind_the_anchors_is_never_read(name):
    (q, ck, cv, bk, bv), anchors = random_case(2, 4, 2, 12, 4, 5, 8, seed=3)
    anchors.clamp_(max=8)
    expected = attend(IMPLEMENTED[name], (q, ck, cv, bk, bv), anchors, 4)
    poisoned_k, poisoned_v = ck.detach().clone(), cv.detach().clone()
    poisoned_k[:, :, 8:], poisoned_v[:, :, 8:] = float("nan"), float("nan")
    assert torch.equal(expected, attend(IMPLEMENTED[name], (q, poisoned_k, poisoned_v, bk, bv), anchors, 4))


def test_gradcheck_of_the_merged_parts():
    tensors, anchors = random_case(1, 2, 1, 5, 2, 3, 2, seed=1)
    assert torch.autograd.gradcheck(lambda *t: attend(PLAIN_FLASH, t, anchors, 2), tensors, eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("N,S", [(1, 10), (7, 40), (64, 300)])
def test_flash_parts_score_what_is_visible_and_nothing_else(N, S):
    anchors = torch.randperm(S, generator=torch.Generator().manual_seed(N))[:N].sort().values[None]
    parts = staircase_parts(anchors.numpy(), torch.zeros_like(anchors).numpy(), 4, S)
    times = torch.zeros(N * 4, S + N * 4, dtype=torch.int64)
    for part in parts:
        row = key = 0
        assert len(set(part.rows)) == len(part.rows) and len(set(part.keys)) == len(part.keys)
        for rows, keys in zip(part.row_lengths, part.key_lengths):
            times[part.rows[row:row + rows, None], part.keys[None, key:key + keys]] += 1
            row, key = row + rows, key + keys
    assert torch.equal(times, visible_scores(anchors, 4, S)[0].long())
    assert len(parts) <= 2 + N.bit_length()


def test_flash_parts_refuse_blocks_out_of_order():
    tensors, _ = random_case(1, 2, 1, 9, 2, 2, 4, seed=1)
    with pytest.raises(ValueError, match="ascend"):
        attend(PLAIN_FLASH, tensors, torch.tensor([[5, 2]]), 2)


@pytest.mark.parametrize("case", [None, *PACKED])
@pytest.mark.parametrize("K,tile", [(4, 8), (4, 4), (3, 8), (5, 16), (16, 8)])
def test_tiles_are_full_partial_or_hidden_as_the_dense_mask_says(case, K, tile):
    if case is None:
        anchors, starts, S = torch.tensor([[0, 3, 7, 20, 33, 34], [1, 2, 9, 9, 30, 36]]), None, 37
    else:
        anchors, starts, S = packed_case(*PACKED[case])
    tiles = score_tiles(anchors, starts, K, S, tile)
    dense_mask = visible_scores(anchors, K, S, starts)
    for b, visible in enumerate(dense_mask):
        for i, rows in enumerate(visible.split(tile)):
            for j, part in enumerate(rows.split(tile, dim=1)):
                whole = part.all() and part.shape[1] == tile
                assert tiles.full_BIJ[b, i, j] == whole, (b, i, j)
                assert tiles.partial_BIJ[b, i, j] == (part.any() and not whole), (b, i, j)
    q, k = torch.meshgrid(torch.arange(dense_mask.shape[1]), torch.arange(dense_mask.shape[2]), indexing="ij")
    for b in range(len(anchors)):
        rule = (k >= tiles.row_starts_BQ[b][q]) & (k < tiles.row_ends_BQ[b][q])
        assert torch.equal(rule | (tiles.key_blocks_T[k] == tiles.row_blocks_Q[q]), dense_mask[b])
    counts, indices = tiles.lists(tiles.partial_BIJ)
    for b, i in ((0, 0), (1, counts.shape[2] - 1)):
        assert indices[b, 0, i, :counts[b, 0, i]].tolist() == tiles.partial_BIJ[b, i].nonzero()[:, 0].tolist()


def test_auto_is_sdpa_on_a_cpu():
    assert resolve_attention("auto", torch.device("cpu"), torch.float32, (4, 2, 16)) == "sdpa"


@pytest.mark.parametrize("wanted,names", [("flex", ["flex"]), ("flash", ["flash4", "flash2"])])
def test_an_implementation_that_does_not_work_here_is_refused_with_the_reasons(wanted, names, capsys):
    with pytest.raises(UserError, match="its backward pass needs a GPU.*set attention to auto or sdpa"):
        resolve_attention(wanted, torch.device("cpu"), torch.float32, (4, 2, 16))
    printed = capsys.readouterr().out
    assert all(f"attention {name} does not work here" in printed for name in names)


def test_the_small_pass_that_tells_what_works_finds_a_wrong_result(monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "flash2", lambda anchors, starts, K, S: PLAIN_FLASH(anchors // 2, starts, K, S))
    assert "differs from sdpa" in attention._difference("flash2", torch.device("cpu"), torch.float32, (4, 2, 16))
    monkeypatch.setitem(IMPLEMENTATIONS, "flash2", PLAIN_FLASH)
    assert attention._difference("flash2", torch.device("cpu"), torch.float32, (4, 2, 16)) is None
