"""Held-out evaluation: the split, the walk against a brute-force simulator, and every number for any number of ranks."""
import random
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from data_prep.errors import UserError
from data_prep.manifest import Manifest, SampleEntry, read_index
from pipeline.config import RunConfig
from pipeline.heldout import HeldoutSet, split, walk
from pipeline.loss import BlockLoss
from pipeline.reader import SampleReader
from pipeline.sources import LocalFolder
from tests.datasets import MASK_ID, damage, make_run_folder


def entries(count):
    return [SampleEntry("000000.tar", f"{n:06d}", 0, 1, 20, 10, 9) for n in range(count)]


def test_a_share_is_held_out_by_key_and_more_data_moves_no_sample_to_the_other_side():
    kept, held = split(entries(5000), 0.1)
    assert len(kept) + len(held) == 5000 and 430 < len(held) < 570
    fewer_kept, fewer_held = split(entries(1000), 0.1)
    assert fewer_held == held[:len(fewer_held)] and fewer_kept == kept[:len(fewer_kept)]
    assert split(entries(10), 0.0) == (entries(10), [])


def test_a_share_that_holds_out_nothing_is_refused():
    with pytest.raises(UserError, match="evaluation.share 0.0001 of 10 samples holds out 0"):
        split(entries(10), 0.0001)


def simulated(accepted, positions):
    """Token by token: a committed position is either drafted and accepted, or the target's own."""
    emitted, steps, at = 0, 0, positions[0]
    while at <= positions[-1]:
        if at not in positions:
            at += 1
            continue
        steps += 1
        run = accepted[positions.index(at)]
        emitted += run + 1
        at += run + 1
    return emitted, steps


def test_the_walk_visits_the_anchors_that_serving_visits():
    assert walk([2, 9, 9, 0, 1, 9], [5, 6, 7, 8, 9, 10]) == (6, 3)  # 5 -> 8 -> 9 -> 11
    dice = random.Random(0)
    for _ in range(200):
        positions = sorted(dice.sample(range(60), dice.randint(1, 40)))
        accepted = [dice.randint(0, 7) for _ in positions]
        assert walk(accepted, positions) == simulated(accepted, positions)


class World:
    """Ranks one after another: what they sum is added up at the end; none has a problem to tell the others."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, rank, world, total):
        self.rank, self.world, self.total = rank, world, total

    def sum(self, values):
        if values.dim() == 0:
            return values
        self.total.append(values.clone())
        return torch.stack(self.total).sum(0)


def oracle(wrong_every):
    """A drafter that is wrong at the slots whose label is a multiple of `wrong_every`."""
    def forward(mb):
        labels, mask = mb.labels_BNJ[0], mb.mask_BNJ[0]
        correct = labels % wrong_every != 0
        nll = torch.where(correct, 0.1, 3.0) * mask
        return BlockLoss(nll.sum(), nll, mask.float(), correct)
    return forward


@pytest.fixture
def heldout(tmp_path):
    folder = make_run_folder(tmp_path / "run") / "dataset"
    manifest = Manifest.read(folder)
    entries = read_index(folder, manifest)
    _, held = split(entries, 0.3)
    run = RunConfig(out=tmp_path, drafter={"block_size": 5}, loss={"max_anchors": 4})
    return HeldoutSet(SampleReader(LocalFolder(folder), manifest, entries), held, run, MASK_ID)


def test_the_numbers_are_the_same_for_1_2_and_3_ranks_and_each_anchor_counts_once(heldout):
    never = SimpleNamespace(asked=lambda: False)
    found = []
    for world in (1, 2, 3):
        total = []
        for rank in range(world):
            with suppress(UserError):  # before the last rank's part is added, a sum may hold no whole sample
                values = heldout.evaluate(oracle(3), World(rank, world, total), never)
        found.append(values)
    assert found[0] == found[1] == found[2]
    assert found[0]["heldout/anchors"] == sum(e.anchors for e in heldout.samples) > 20
    assert 1.0 < found[0]["heldout/walk_tau"] < 5.0


def test_a_perfect_drafter_walks_in_whole_blocks_and_a_hopeless_one_in_single_tokens(heldout):
    never = SimpleNamespace(asked=lambda: False)
    best = heldout.evaluate(oracle(10**9), World(0, 1, []), never)
    walks = [simulated([min(4, e.anchors - i) for i in range(e.anchors)], list(range(e.anchors))) for e in heldout.samples]
    assert best["heldout/walk_tau"] == sum(emitted for emitted, _ in walks) / sum(steps for _, steps in walks)
    worst = heldout.evaluate(oracle(1), World(0, 1, []), never)
    assert worst["heldout/walk_tau"] == worst["heldout/all_anchors_tau"] == 1.0


def test_a_damaged_sample_ends_the_evaluation_or_is_left_out_under_skip(heldout, tmp_path, capsys):
    never = SimpleNamespace(asked=lambda: False)
    victim = heldout.samples.pop(1)
    run = RunConfig(out=tmp_path, drafter={"block_size": 5}, loss={"max_anchors": 4}, data={"on_error": "skip"})
    without = HeldoutSet(heldout.reader, heldout.samples, run, MASK_ID).evaluate(oracle(3), World(0, 1, []), never)
    damage(tmp_path / "run/dataset", victim.key)
    skipping = HeldoutSet(heldout.reader, [*heldout.samples, victim], run, MASK_ID)
    assert skipping.evaluate(oracle(3), World(0, 1, []), never) == without
    assert f"skipped: shard {tmp_path}/run/dataset/{victim.shard}, sample {victim.key}" in capsys.readouterr().err
    skipping.on_error = "stop"
    with pytest.raises(UserError, match=f"the held-out evaluation: shard .* sample {victim.key}"):
        skipping.evaluate(oracle(3), World(0, 1, []), never)


def test_a_stop_asked_for_on_any_rank_ends_the_evaluation_at_the_same_pass(heldout):
    answers = iter([False, True])
    assert heldout.evaluate(oracle(3), World(0, 1, []), SimpleNamespace(asked=lambda: next(answers))) is None
    assert next(answers, "used up") == "used up"
