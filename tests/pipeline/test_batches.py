"""Which samples and anchors a step has: a function of seed and manifest alone."""
import resource
import shutil
from collections import Counter

import pytest
import torch

from data_prep.errors import UserError
from data_prep.manifest import Features, Manifest, Target, read_index
from data_prep.shards import ShardWriter, shard_name
from pipeline.anchors import draw_anchors
from pipeline.batches import StepDataset
from pipeline.loader import StepLoader
from pipeline.order import StepPlan
from pipeline.passes import Passes
from pipeline.reader import SampleReader
from pipeline.sources import LocalFolder
from tests.datasets import damage, make_run_folder, sample, step_dataset

N = 26  # samples in the six shards of 7/3/5/1/4/6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run_folder(tmp_path_factory.mktemp("batches") / "run") / "dataset"


def content(micro_batches):
    """key -> (anchors, labels) of one step, whoever read it."""
    return {key: (mb.anchors_BN[b][mb.mask_BNJ[b, :, 0]].tolist(), mb.labels_BNJ[b][mb.mask_BNJ[b, :, 0]].tolist())
            for mb in micro_batches for b, key in enumerate(mb.keys)}


def test_every_sample_comes_once_an_epoch_and_the_tail_is_carried_over(folder):
    plan = step_dataset(folder).plan
    assert plan.steps == N * 3 // 4 and plan.unused == N * 3 % 4
    seen = Counter((item.entry.key, item.epoch) for t in range(plan.steps) for item in plan.items(t))
    assert set(seen.values()) == {1} and len(seen) == plan.steps * 4
    assert all(len({k for k, e in seen if e == epoch}) == N for epoch in (0, 1))


def test_epochs_and_seeds_give_other_orders(folder):
    def order(seed, first):
        plan = StepPlan(read_index(folder, Manifest.read(folder)), seed, 2, N)
        return [i.entry.key for i in plan.items(first)]

    plan = step_dataset(folder, batch=N, epochs=2).plan
    assert sorted(order(5, 0)) == sorted(order(5, 1))
    assert plan._order(0).tolist() != plan._order(1).tolist()
    assert StepPlan(plan.entries, 6, 2, N)._order(0).tolist() != plan._order(0).tolist()


@pytest.mark.parametrize("world,micro", [(2, 1), (2, 2), (4, 1), (1, 4)])
def test_a_step_has_the_same_samples_and_anchors_on_any_number_of_ranks(folder, world, micro):
    alone = step_dataset(folder)
    ranks = [step_dataset(folder, rank=r, world=world, micro=micro) for r in range(world)]
    for step in (0, 6, 18):
        parts = [content(rank[step]) for rank in ranks]
        assert sum(map(len, parts)) == 4, "a sample is on two ranks"
        assert {k: v for part in parts for k, v in part.items()} == content(alone[step])
        assert len({len(rank[step]) for rank in ranks}) == 1, "ranks take different numbers of micro-batches"


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_a_late_start_change_nothing(folder, workers):
    steps = step_dataset(folder)
    with StepLoader(steps, 7, len(steps), workers=workers, budget=2**20) as loader:
        assert [content(batch.micro_batches) for batch in loader] == [content(steps[t]) for t in range(7, len(steps))]


def test_anchors_are_drawn_anew_each_epoch_and_only_where_two_tokens_are_supervised():
    mask = torch.zeros(40, dtype=torch.uint8)
    mask[10:30] = 1
    mask[20] = 0
    draws = [draw_anchors(mask, 5, seed=0, epoch=e, key="000001").tolist() for e in range(40)]
    assert len({tuple(d) for d in draws}) > 30 and all(d == sorted(set(d)) and len(d) == 5 for d in draws)
    assert set(sum(draws, [])) == set(range(10, 19)) | set(range(21, 29))
    assert draw_anchors(mask, 500, seed=0, epoch=0, key="x").tolist() == [*range(10, 19), *range(21, 29)]


@pytest.mark.parametrize("supervised,anchors", [([7], []), ([4], []), ([6, 7], [6]), ([4, 5], [4]), ([0, 1], [0])])
def test_one_valid_anchor_is_one_anchor(supervised, anchors):
    mask = torch.zeros(8, dtype=torch.uint8)
    mask[supervised] = 1
    assert draw_anchors(mask, 16, seed=0, epoch=0, key="k").tolist() == anchors


def test_batches_hold_the_stored_values_and_padding_is_zero(folder):
    (mb,) = step_dataset(folder, micro=4)[2]
    assert mb.features_BSE.dtype == torch.bfloat16
    for b, key in enumerate(mb.keys):
        ids, mask, hidden = sample(int(key))
        assert torch.equal(mb.features_BSE[b, :len(ids)], hidden.flatten(1)) and not mb.features_BSE[b, len(ids):].any()
        for a, labels, alive in zip(mb.anchors_BN[b].tolist(), mb.labels_BNJ[b].tolist(), mb.mask_BNJ[b].tolist()):
            for k, (label, on) in enumerate(zip(labels, alive), start=1):
                assert not on or (label == ids[a + k] and mask[a + k])


@pytest.mark.parametrize("micro,pack", [(1, None), (4, None), (2, 64)])
def test_what_the_memory_held_before_changes_nothing(folder, micro, pack):
    data = step_dataset(folder, micro=micro, pack=pack, anchors=500)  # some rows have unused blocks
    memory = torch.full((data.largest_bytes,), 255, dtype=torch.uint8)
    for step in (0, 3):
        for index in range(data.passes.per_step):
            ours, fresh = data.fill(step, index, memory).batch(memory), data.micro_batch(step, index)
            for name, value in vars(fresh).items():
                mine = getattr(ours, name)
                assert torch.equal(mine, value) if torch.is_tensor(value) else mine == value, name


@pytest.mark.parametrize("pack", [None, 400])
def test_nothing_of_a_damaged_sample_is_left_in_the_batch(folder, tmp_path, pack):
    damaged = shutil.copytree(folder, tmp_path / "dataset")
    damage(damaged, "000009")
    data, whole = (step_dataset(at, micro=1 if pack else 2, batch=26, pack=pack, epochs=1) for at in (damaged, folder))
    keys = []
    for index in range(data.passes.per_step):
        memory = torch.full((data.largest_bytes,), 255, dtype=torch.uint8)
        ours, theirs = data.fill(0, index, memory).batch(memory), whole.micro_batch(0, index)
        keys += ours.keys
        if "000009" in theirs.keys:
            assert ours.keys == [key for key in theirs.keys if key != "000009"] and "CRC-32" in ours.damaged[0]
            assert ours.real_tokens == theirs.real_tokens - len(sample(9)[0])
        kept = torch.cat([sample(int(key))[2].flatten(1) for key in ours.keys])
        found = ours.features_BSE.flatten(0, 1)
        used = found.view(torch.int16).any(1)
        assert torch.equal(found[used], kept) and not found[~used].view(torch.int16).any()
    assert len(keys) == 25


def test_after_the_first_steps_no_memory_is_used_for_the_first_time(tmp_path):
    writer = ShardWriter(tmp_path, shard_name(0))
    for key in range(8):
        mask = torch.ones(256, dtype=torch.uint8)
        writer.add(f"{key:06d}", {}, mask.int(), mask, {"hidden": torch.randn(256, 2, 8192).bfloat16()})
    writer.finish()
    writer.publish()
    target = Target.model_construct(hidden_size=8192)
    manifest = Manifest.model_construct(target=target, features=Features(layer_ids=[1, 2]))
    passes = Passes(StepPlan(writer.samples, 0, 3, 4), world=1, micro_batch=2)
    data = StepDataset(SampleReader(LocalFolder(tmp_path), manifest, writer.samples), passes, rank=0, max_anchors=4,
                       block_size=4, mask_token_id=0)
    with StepLoader(data, 0, len(data), workers=0, budget=0) as loader:
        next(loader), next(loader)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        nbytes = sum(mb.features_BSE.nbytes for mb in next(loader).micro_batches)
        pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert nbytes == 4 * 2**23 and pages < nbytes / resource.getpagesize() / 20


def test_unused_blocks_carry_anchor_zero_and_no_label(folder):
    steps = step_dataset(folder, micro=4, anchors=500)
    for mb in steps[0]:
        unused = ~mb.mask_BNJ[:, :, 0]
        assert (mb.anchors_BN[unused] == 0).all() and not mb.mask_BNJ[unused].any()


def test_too_little_data_for_one_step_is_refused(folder):
    with pytest.raises(UserError, match="26 samples x 1 epochs make no step of 27 sequences"):
        StepPlan(read_index(folder, Manifest.read(folder)), 0, 1, 27)
