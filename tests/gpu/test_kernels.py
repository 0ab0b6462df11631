"""On a GPU: every attention implementation, the fused loss and the drafter's kernels in bf16 against float64.

    bash tests/gpu/run.sh                   all of it, and the measurements
    python -m pytest tests/gpu              the tests alone; without a GPU they skip
    GPU_TESTS_DEVICE=cpu python -m pytest tests/gpu/test_kernels.py      rehearsal: what has a CPU form runs there
"""
import os

import pytest
import torch

from pipeline import fused
from pipeline.attention import IMPLEMENTATIONS, resolve_attention, why_not
from pipeline.credit import DECAY_KINDS, KINDS
from pipeline.loss import block_loss
from tests.pipeline.test_attention import PACKED, dense, packed_case
from tests.pipeline.test_loss import plain_loss

DEVICE = torch.device(os.environ.get("GPU_TESTS_DEVICE", "cuda"))
pytestmark = pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")
# A 16-bit result is off by 2^-9 of itself, and a product of such values by little more.
BF16 = 1e-2


def off(ours, exact):
    """Relative difference in the 2-norm."""
    assert ours.shape == exact.shape and torch.isfinite(ours).all()
    return float((ours.cpu().double() - exact).norm() / exact.norm())


def random_anchors(B, S, N, generator):
    return torch.stack([torch.randperm(S, generator=generator)[:N].sort().values for _ in range(B)])


def cases():
    generator = torch.Generator().manual_seed(0)
    yield "one document a row", (2, 8, 2, 64), 16, random_anchors(2, 517, 60, generator), None, 517
    yield "head dimension 128, block 10", (1, 8, 2, 128), 10, random_anchors(1, 700, 77, generator), None, 700
    first = torch.cat([random_anchors(1, 300, 20, generator), 300 + random_anchors(1, 211, 30, generator)], 1)
    starts = torch.tensor([[0] * 20 + [300] * 30])
    yield "two documents a row", (1, 4, 4, 64), 8, first, starts, 511
    yield "no context at all", (1, 4, 2, 64), 16, torch.zeros(1, 3, dtype=torch.int64), None, 40
    for name, case in PACKED.items():
        anchors, starts, S = packed_case(*case)
        yield name, (2, 4, 2, 64), 4, anchors, starts, S


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case[0])
def test_attention_and_its_gradients_equal_the_dense_oracle_in_float64(name, case):
    _, (B, H, G, D), K, anchors, starts, S = case
    if name != "sdpa" and (reason := why_not(name, DEVICE, torch.bfloat16, (4, 2, 64))):
        assert "not installed" in reason or DEVICE.type == "cpu", reason
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(1)
    lengths = ((H, anchors.shape[1] * K), (G, S), (G, S), (G, anchors.shape[1] * K), (G, anchors.shape[1] * K))
    stored = [torch.randn(B, heads, length, D, generator=generator).bfloat16() for heads, length in lengths]
    weight = torch.randn(B, *lengths[0], D, generator=generator).bfloat16()
    exact_inputs = [t.double().requires_grad_() for t in stored]
    exact = dense(*exact_inputs, anchors, K, starts)
    exact_grads = torch.autograd.grad((exact * weight.double()).sum(), exact_inputs)
    inputs = [t.to(DEVICE).requires_grad_() for t in stored]
    attend = IMPLEMENTATIONS[name](anchors.to(DEVICE), None if starts is None else starts.to(DEVICE), K, S)
    out = attend(*inputs)
    grads = torch.autograd.grad((out * weight.to(DEVICE)).sum(), inputs)
    assert off(out.detach(), exact.detach()) < BF16
    for ours, theirs in zip(grads, exact_grads):
        assert off(ours, theirs) < BF16 if theirs.norm() else ours.abs().max() == 0


@pytest.mark.parametrize("wanted", ["auto", "flex", "flash"])
@pytest.mark.skipif(DEVICE.type == "cpu", reason="on a CPU there is sdpa only")
def test_what_is_asked_for_works_here(wanted):
    chosen = resolve_attention(wanted, DEVICE, torch.bfloat16, (32, 8, 128))
    assert chosen.startswith(wanted) if wanted != "auto" else chosen in IMPLEMENTATIONS
    print(wanted, "->", chosen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_bytes", [4 * 1000 * 7 * 11, None])
def test_the_fused_loss_equals_plain_autograd_in_float64(kind, chunk_bytes):
    generator = torch.Generator().manual_seed(2)
    A, K, D, V = 100, 8, 256, 1000
    hidden = torch.randn(A, K, D, generator=generator).bfloat16()
    head = (torch.randn(V, D, generator=generator) / D ** 0.5).bfloat16()
    labels = torch.randint(0, V, (A, K - 1), generator=generator)
    mask = (torch.rand(A, K - 1, generator=generator) < 0.9).long().cumprod(-1).bool()
    exact_hidden = hidden.double().requires_grad_()
    options = {"gamma": 4.0} if kind in DECAY_KINDS else {}
    exact = plain_loss(exact_hidden, head.double(), labels, mask, kind, **options)
    (exact_grad,) = torch.autograd.grad(exact, exact_hidden)
    ours_hidden = hidden.to(DEVICE).requires_grad_()
    out = block_loss(ours_hidden, head.to(DEVICE), labels.to(DEVICE), mask.to(DEVICE), kind, chunk_bytes=chunk_bytes, **options)
    (grad,) = torch.autograd.grad(out.numerator, ours_hidden)
    assert abs(out.numerator.item() - exact.item()) < 1e-4 * abs(exact.item())
    assert off(grad, exact_grad) < BF16
    exact_correct = ((hidden.double()[:, 1:] @ head.double().t()).argmax(-1) == labels) & mask
    assert (out.correct.cpu() != exact_correct).float().mean() < 0.01


@pytest.mark.parametrize("name,shapes", [
    ("rms_norm", [(3, 70, 256), (256,)]), ("rms_norm", [(2, 5, 33, 128), (128,)]), ("swiglu", [(3, 70, 256)] * 2),
    ("rotate", [(2, 4, 70, 64), (2, 70, 64), (2, 70, 64)])])
def test_fused_kernels_equal_the_plain_formula_in_float64(name, shapes):
    generator = torch.Generator().manual_seed(3)
    stored = [torch.randn(*shape, generator=generator).bfloat16() for shape in shapes]
    exact_inputs = [t.double().requires_grad_() for t in stored]
    inputs = [t.to(DEVICE).requires_grad_() for t in stored]
    if name == "rms_norm":
        exact = fused.plain_rms_norm(*exact_inputs, 1e-6)
        norm = fused.RMSNorm(shapes[1][0], eps=1e-6)
        norm.weight = torch.nn.Parameter(inputs[1].detach())
        out, inputs = norm(inputs[0]), [inputs[0], norm.weight]
    elif name == "swiglu":
        exact, out = fused.plain_swiglu(*exact_inputs), fused.swiglu(*inputs)
    else:
        exact, out = fused.plain_rotate(*exact_inputs), fused.rotate(*inputs)
        exact_inputs, inputs = exact_inputs[:1], inputs[:1]
    weight = torch.randn(exact.shape, generator=generator).bfloat16()
    grads = torch.autograd.grad((out * weight.to(DEVICE)).sum(), inputs)
    exact_grads = torch.autograd.grad((exact * weight.double()).sum(), exact_inputs)
    assert off(out.detach(), exact.detach()) < BF16
    assert all(off(ours, theirs) < BF16 for ours, theirs in zip(grads, exact_grads))
