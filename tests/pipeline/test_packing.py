"""Several documents in a row: the same loss and gradient as one a row, less padding."""
import json

import numpy as np
import pytest
import torch

from data_prep.errors import UserError
from data_prep.manifest import SampleEntry
from pipeline.drafter import DFlashDrafter
from pipeline.drafter_config import DrafterConfig
from pipeline.loss import block_loss
from pipeline.order import StepPlan
from pipeline.passes import Passes
from tests.datasets import HIDDEN, LAYER_IDS, make_run_folder, step_dataset

K, VOCAB = 4, 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run_folder(tmp_path_factory.mktemp("packing") / "run") / "dataset"


@pytest.fixture(scope="module")
def model():
    config = DrafterConfig(
        hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, rms_norm_eps=1e-6, vocab_size=VOCAB, max_position_embeddings=128, initializer_range=0.2,
        rope_parameters=json.dumps({"rope_theta": 10000.0, "rope_type": "default"}), block_size=K, mask_token_id=297,
        target_layer_ids=tuple(LAYER_IDS), num_target_layers=6)
    embedding, head = torch.randn(2, VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
    return DFlashDrafter(config).initialise(0), embedding, head


def block_losses(model, mb):
    drafter, embedding, head = model
    hidden = drafter(embedding[mb.block_ids_BT], mb.features_BSE.float(), mb.anchors_BN, mb.starts_BN)
    labels, mask = mb.labels_BNJ.flatten(0, 1), mb.mask_BNJ.flatten(0, 1)
    return block_loss(hidden.unflatten(1, (-1, K)).flatten(0, 1), head, labels, mask, "dpace")


def loss_and_gradient(model, ranks, step):
    """Of one optimizer step over all ranks and micro-batches: what ZeRO sums up, in one process."""
    batches = [mb for rank in ranks for mb in rank[step]]
    loss = sum(block_losses(model, mb).numerator for mb in batches) / sum(mb.mask_BNJ[..., 0].sum() for mb in batches)
    return loss.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model[0].parameters()))])


@pytest.mark.parametrize("world,micro,pack", [
    (1, 1, 400), (1, 2, 64), (2, 1, 64), (3, 2, 64), (9, 1, 64), (2, 1, None), (4, 2, None)])
def test_loss_and_gradient_are_those_of_every_document_alone_on_any_ranks_and_rows(folder, model, world, micro, pack):
    alone = step_dataset(folder, batch=8, anchors=9)
    ranks = [step_dataset(folder, rank=r, world=world, micro=micro, pack=pack, batch=8, anchors=9) for r in range(world)]
    for step in (0, 5):
        loss, gradient = loss_and_gradient(model, [alone], step)
        packed_loss, packed_gradient = loss_and_gradient(model, ranks, step)
        assert packed_loss.item() == pytest.approx(loss.item(), rel=1e-6)
        assert (packed_gradient - gradient).abs().max() < 1e-6 * gradient.abs().max()


def test_a_pass_without_documents_has_loss_zero_and_a_zero_gradient_for_every_parameter(folder, model):
    ranks = [step_dataset(folder, rank=r, world=9, pack=64, batch=8) for r in range(9)]
    (mb,) = [mb for rank in ranks for mb in rank[0] if not mb.keys]
    loss = block_losses(model, mb).numerator
    assert loss == 0 and all((g == 0).all() for g in torch.autograd.grad(loss, list(model[0].parameters())))


def test_another_document_in_the_row_changes_no_bit_of_the_first_ones_loss(folder, model):
    (mb,) = step_dataset(folder, batch=6, pack=400)[0]
    assert mb.features_BSE.shape[0] == 1 and len(mb.keys) == 6
    starts = mb.starts_BN[0].unique().tolist()
    before = block_losses(model, mb)
    mb.features_BSE[0, starts[2]:starts[3]] += 1
    after = block_losses(model, mb)
    other = mb.starts_BN[0] == starts[2]
    assert torch.equal(before.nll[~other], after.nll[~other]) and not torch.equal(before.nll[other], after.nll[other])


def test_every_document_of_a_row_keeps_its_own_positions_and_anchor_budget(folder):
    alone = {mb.keys[0]: mb for mb in step_dataset(folder, batch=8, anchors=7)[1]}
    (mb,) = step_dataset(folder, batch=8, anchors=7, pack=400)[1]
    (unused,) = (mb.mask_BNJ[0, :, 0] == 0).nonzero().T
    assert len(unused) == 0 and (alone.keys() == set(mb.keys))
    for key, start in zip(mb.keys, mb.starts_BN[0].unique().tolist()):
        mine = mb.starts_BN[0] == start
        assert torch.equal(mb.positions_BN[0, mine], alone[key].anchors_BN[0])
        assert torch.equal(mb.labels_BNJ[0, mine], alone[key].labels_BNJ[0])
        assert torch.equal(mb.mask_BNJ[0, mine], alone[key].mask_BNJ[0])


@pytest.mark.parametrize("world,micro,pack", [(1, 1, 64), (2, 1, 64), (3, 1, 64), (2, 2, 100), (5, 2, 40)])
def test_a_packed_step_has_exactly_its_sequences_in_rows_within_the_budget(folder, world, micro, pack):
    ranks = [step_dataset(folder, rank=r, world=world, micro=micro, pack=pack, batch=8) for r in range(world)]
    assert len({rank.passes.per_step for rank in ranks}) == 1
    for step in range(ranks[0].plan.steps):
        passes = ranks[0].passes
        rows = [row for index in range(passes.per_step) for r in range(world) for row in passes.rows(step, index, r)]
        assert sorted(i for row in rows for i in row) == sorted(ranks[0].plan.items(step))
        assert max(sum(i.entry.tokens for i in row) for row in rows) <= pack
    assert sum(len(mb.keys) for rank in ranks for mb in rank[0]) == 8


def test_a_document_longer_than_the_budget_is_refused_and_named(folder):
    with pytest.raises(UserError, match=r"data.pack_tokens 30 is less than the 39 tokens of sample 0000\d\d in 00000"):
        step_dataset(folder, pack=30)


def test_a_global_batch_that_ranks_cannot_share_is_refused_unless_packed(folder):
    with pytest.raises(UserError, match="global_batch 4 is no multiple of 3 ranks x optim.micro_batch 2 = 6"):
        step_dataset(folder, world=3, micro=2)
    assert step_dataset(folder, world=3, micro=2, pack=64).passes.per_step == 1


def realistic_plan(samples=4000):
    """Lengths of conversations: log-normal, a median of 800 tokens, cut at 3072."""
    lengths = np.random.default_rng(0).lognormal(np.log(800), 0.7, samples).clip(60, 3072).astype(int)
    return StepPlan([SampleEntry("000000.tar", f"{i:06d}", 0, 0, int(n), 0, 0) for i, n in enumerate(lengths)], 0, 2, 64)


@pytest.mark.parametrize("world,micro,pack", [
    (1, 1, 8192), (1, 2, 4096), (2, 2, 4096), (2, 1, 8192), (8, 1, 8192), (8, 1, 16384)])
def test_padding_is_below_five_percent_with_packing_even_if_waiting_ranks_count(world, micro, pack):
    packed = Passes(realistic_plan(), world, micro, pack).padding
    assert packed.share <= packed.waiting_share < 0.05
    assert packed.largest <= micro * pack
    if micro == 2:
        assert packed.share < Passes(realistic_plan(), world, micro).padding.share
