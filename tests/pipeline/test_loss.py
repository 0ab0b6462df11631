"""The one-pass head loss and the credit weights, against plain autograd and by hand."""
import math

import pytest
import torch

from pipeline import loss as loss_module
from pipeline.credit import DECAY_KINDS, KINDS, STATIC_KINDS, credit_weights
from pipeline.loss import block_loss
from pipeline.normalisation import denominator


def plain_loss(hidden, head, labels, mask, kind, **options):
    """Full logits, then the spec's formulas slot by slot."""
    logits = hidden[:, 1:] @ head.t()
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return (credit_weights(kind, nll, mask, correct=logits.argmax(-1) == labels, **options) * nll * mask).sum()


def case(A=7, K=5, D=6, V=11, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(A, K, D, generator=g, dtype=torch.float64, requires_grad=True)
    head = torch.randn(V, D, generator=g, dtype=torch.float64)
    labels = torch.randint(0, V, (A, K - 1), generator=g)
    mask = (torch.rand(A, K - 1, generator=g) < 0.8).long().cumprod(-1).bool()
    return hidden, head, labels.masked_fill(~mask, 0), mask


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_bytes", [1, 4 * 11 * 4 * 3, 1 << 30])
def test_value_and_gradient_equal_plain_autograd_whatever_the_chunk(kind, chunk_bytes):
    hidden, head, labels, mask = case()
    options = {"gamma": 4.0} if kind in DECAY_KINDS else {}
    out = block_loss(hidden, head, labels, mask, kind, chunk_bytes=chunk_bytes, **options)
    expected = plain_loss(hidden, head, labels, mask, kind, **options)
    assert out.numerator.item() == pytest.approx(expected.item(), rel=1e-12)
    (ours,), (theirs,) = torch.autograd.grad(3.0 * out.numerator, hidden), torch.autograd.grad(3.0 * expected, hidden)
    assert (ours - theirs).abs().max() < 1e-12


def test_what_a_gpu_compiles_computes_the_same(monkeypatch):
    hidden, head, labels, mask = case(A=40, V=37)
    with_in_place = block_loss(hidden, head, labels, mask, "dpace", chunk_bytes=4 * 37 * 4 * 7)
    (expected,) = torch.autograd.grad(with_in_place.numerator, hidden)
    monkeypatch.setattr(loss_module, "statistics_in_place", loss_module.statistics)
    monkeypatch.setattr(loss_module, "gradient_in_place", loss_module.gradient)
    out = block_loss(hidden, head, labels, mask, "dpace", chunk_bytes=4 * 37 * 4 * 7)
    assert all((a - b).abs().max() < 1e-13 for a, b in zip(with_in_place[:3], out[:3]))
    assert torch.equal(with_in_place.correct, out.correct)
    assert (torch.autograd.grad(out.numerator, hidden)[0] - expected).abs().max() < 1e-13


@pytest.mark.parametrize("kind", STATIC_KINDS)
def test_gradcheck_in_float64(kind):
    hidden, head, labels, mask = case(A=3, K=4, D=3, V=5)
    assert torch.autograd.gradcheck(
        lambda h: block_loss(h, head, labels, mask, kind, gamma=2.0).numerator, (hidden,), eps=1e-6, atol=1e-8)


def test_an_all_masked_batch_has_loss_zero_and_a_zero_gradient():
    hidden, head, labels, mask = case()
    out = block_loss(hidden, head, labels * 0, mask & False, "dpace")
    (grad,) = torch.autograd.grad(out.numerator, hidden)
    assert out.numerator.item() == 0.0 and grad.abs().max() == 0.0
    assert denominator("global", "dpace", mask & False, sequences=2).item() == 0.0


def test_right_slots_are_those_where_the_argmax_is_the_label():
    hidden, head, labels, mask = case(A=20, V=3)
    out = block_loss(hidden, head, labels, mask, "uniform")
    assert torch.equal(out.correct, ((hidden[:, 1:] @ head.t()).argmax(-1) == labels) & mask)


def test_weights_are_float32_and_detached_under_bfloat16():
    hidden, head, labels, mask = case()
    hidden = hidden.detach().bfloat16().requires_grad_()
    out = block_loss(hidden, head.bfloat16(), labels, mask, "dpace")
    assert out.weights.dtype == out.nll.dtype == torch.float32 and not out.weights.requires_grad
    nll = torch.rand(4, 6, dtype=torch.bfloat16, requires_grad=True)
    weights = credit_weights("dpace", nll, torch.ones(4, 6, dtype=torch.bool))
    assert weights.dtype == torch.float32 and not weights.requires_grad
    exact = plain_loss(hidden.detach().double(), head.bfloat16().double(), labels, mask, "dpace")
    assert out.numerator.item() == pytest.approx(exact.item(), rel=1e-5)


def test_the_gradient_of_the_accepted_length_equals_the_weights_as_alpha_vanishes():
    q = torch.rand(50, 7, dtype=torch.float64) * 0.9 + 0.05
    log_q = q.log().requires_grad_()
    surrogate = log_q.cumsum(-1).exp().sum()
    (gradient,) = torch.autograd.grad(surrogate, log_q)
    weights = credit_weights("dpace", -log_q, torch.ones_like(q, dtype=torch.bool), alpha=1e-12)
    assert (gradient - weights).abs().max() < 1e-10


@pytest.mark.parametrize("q,mask,alpha,expected", [
    ([1, 1, 1], [1, 1, 1], 0.5, [3, 2, 1]),
    ([0, 0, 0], [1, 1, 1], 0.5, [0.875, 0.375, 0.125]),
    ([0.5, 0.5, 0.9], [1, 1, 0], 0.5, [1.3125, 0.5625, 0]),
    ([0.5, 0.9, 0.9], [1, 0, 1], 0.5, [0.75, 0, 0]),
])
def test_weights_by_hand(q, mask, alpha, expected):
    weights = credit_weights("dpace", -torch.tensor(q, dtype=torch.float64).log(), torch.tensor(mask, dtype=torch.bool),
                             alpha=alpha)
    assert weights.tolist() == pytest.approx(expected, abs=1e-15)


def test_the_loss_per_anchor_is_not_divided_by_the_weights():
    """One anchor, two slots at q = 0.5: 1.875 ln 2. Dividing by the weights' sum would give ln 2."""
    head = torch.eye(2, dtype=torch.float64)
    hidden = torch.zeros(1, 3, 2, dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    out = block_loss(hidden, head, torch.zeros(1, 2, dtype=torch.int64), mask, "dpace")
    loss = out.numerator / denominator("global", "dpace", mask, sequences=1)
    assert loss.item() == pytest.approx(1.875 * math.log(2), rel=1e-12)


def test_weights_never_grow_along_a_block():
    nll = torch.rand(200, 15) * 6
    weights = credit_weights("dpace", nll, torch.ones_like(nll, dtype=torch.bool))
    assert (weights.diff(dim=-1) <= 0).all()


def test_continuation_weights_survive_where_products_underflow():
    nll = torch.full((1, 15), 80.0)
    weights = credit_weights("dpace_continuation", nll, torch.ones_like(nll, dtype=torch.bool), alpha=1e-6)
    assert torch.isfinite(weights).all() and weights.min() >= 1.0


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1, float("nan")])
def test_alpha_outside_its_range_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha .* outside"):
        credit_weights("dpace", torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool), alpha=alpha)


@pytest.mark.parametrize("kind,options,message", [
    ("dpase", {}, "unknown"), ("decay", {}, "gamma None for a block of 6"), ("decay", {"gamma": 0.0}, "gamma 0.0")])
def test_a_wrong_kind_or_decay_is_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        credit_weights(kind, torch.ones(1, 5), torch.ones(1, 5, dtype=torch.bool), **options)
