"""Parity with the public drafters, training wrapper and weights (tests/data/golden)."""
import json

import pytest
import torch
from safetensors.torch import load_file

from data_prep.target import read_embedding_and_head
from pipeline.anchors import block_input_ids, block_labels
from pipeline.credit import credit_weights
from pipeline.drafter import DFlashDrafter
from pipeline.loss import block_loss
from pipeline.normalisation import denominator
from tests.paths import GOLDEN

FAMILIES = ("qwen3", "llama")
NAMES = {"dflash {'loss_decay_gamma': 4.0}": ("decay", {"gamma": 4.0}), "dflash {'loss_decay_gamma': None}": ("uniform", {}),
         "dpace {'dpace_alpha': 0.5}": ("dpace", {"alpha": 0.5}), "dpace {'dpace_alpha': 0.3}": ("dpace", {"alpha": 0.3}),
         "dpace {'dpace_alpha': 0.7}": ("dpace", {"alpha": 0.7}),
         "dpace-cumulative-confidence-only {'dpace_alpha': 0.5}": ("dpace_cumulative", {"alpha": 0.5}),
         "dpace-continuation-value-only {'dpace_alpha': 0.5}": ("dpace_continuation", {"alpha": 0.5})}


def load(family: str, dtype: torch.dtype):
    drafter = DFlashDrafter.from_pretrained(GOLDEN / family / "drafter", dtype=dtype)
    batch = load_file(GOLDEN / family / "train_forward.safetensors")
    embedding, head, _ = read_embedding_and_head(GOLDEN / family / "target")
    return drafter, batch, embedding.to(dtype), head.to(dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_masked_forward_equals_the_public_one(family):
    drafter, batch, embedding, _ = load(family, torch.float32)
    K = drafter.config.block_size
    ids = block_input_ids(batch["input_ids"], batch["anchors"], K, drafter.config.mask_token_id)
    assert torch.equal(ids, batch["noise_ids"])
    with torch.no_grad():
        hidden = drafter(embedding[ids], batch["target_hidden"], batch["anchors"])
    assert (hidden - batch["draft_hidden"]).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NAMES)
def test_losses_accuracies_and_gradient_norms_equal_the_published_wrapper(family, name):
    reference = json.loads((GOLDEN / family / "reference_losses.json").read_text())[name]
    kind, options = NAMES[name]
    drafter, batch, embedding, head = load(family, torch.float64)
    K = drafter.config.block_size
    ids, anchors = batch["input_ids"], batch["anchors"]
    labels, mask = block_labels(ids, batch["loss_mask"], anchors, torch.ones_like(anchors, dtype=torch.bool), K)
    noise = embedding[block_input_ids(ids, anchors, K, drafter.config.mask_token_id)]
    hidden = drafter(noise, batch["target_hidden"].double(), anchors)
    out = block_loss(hidden.view(-1, K, hidden.shape[-1]), head, labels.flatten(0, 1), mask.flatten(0, 1), kind, **options)
    loss = out.numerator / denominator("reference", kind, mask, sequences=len(ids), gamma=options.get("gamma"))
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in drafter.parameters()]).norm().item()
    accuracy = (out.correct.sum() / mask.sum()).item()
    assert loss.item() == pytest.approx(reference["loss"], rel=1e-5)
    assert accuracy == pytest.approx(reference["accuracy"], rel=1e-5)
    assert norm == pytest.approx(reference["grad_norm"], rel=1e-5)
    assert drafter.fc.weight.grad.norm().item() == pytest.approx(reference["grad_fc_norm"], rel=1e-5)


CREDIT = json.loads((GOLDEN / "credit.json").read_text())


def test_there_are_63_credit_cases():
    assert len(CREDIT) == 63


@pytest.mark.parametrize("case", CREDIT, ids=lambda c: f"{c['kind']}-{len(c['q'])}-{c['alpha']}")
def test_credit_weights_equal_the_golden_ones(case):
    q = torch.tensor(case["q"], dtype=torch.float64)
    mask = torch.tensor(case["mask"], dtype=torch.bool)
    weights = credit_weights(case["kind"], -q.log(), mask, alpha=case["alpha"], gamma=case.get("gamma"))
    assert (weights - torch.tensor(case["weights"], dtype=torch.float64)).abs().max() < 1e-12
    if case["loss_per_anchor"] is not None:
        loss = (weights * -q.log()).nan_to_num(0.0).sum().item()
        assert loss == pytest.approx(case["loss_per_anchor"], abs=1e-12)
