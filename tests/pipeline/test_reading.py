"""Shards that are few, uneven, missing or cut: every sample is read once, or nothing starts."""

import pytest
from torch.utils.data import DataLoader

from data_prep.errors import UserError
from data_prep.manifest import Manifest, read_index
from pipeline.batches import StepDataset, StepPlan
from pipeline.config import load_run
from pipeline.dataset import open_dataset
from tests.datasets import MASK_ID, make_run_folder


def keys_of_ranks(folder, world: int, workers: int, epochs: int = 1) -> list[list[str]]:
    """The keys that each rank reads, in order, with `workers` worker processes each."""
    entries = read_index(folder, Manifest.read(folder))
    plan = StepPlan(entries, seed=3, epochs=epochs, global_batch=4)
    ranks = []
    for rank in range(world):
        steps = StepDataset(
            folder, plan, rank=rank, world=world, micro_batch=1, max_anchors=4, block_size=4, mask_token_id=MASK_ID
        )
        loader = DataLoader(steps, batch_size=None, num_workers=workers)
        ranks.append([key for micro_batches in loader for batch in micro_batches for key in batch.keys])
    return ranks


def test_one_shard_serves_two_ranks_of_two_workers_each_and_every_sample_once(tmp_path):
    folder = make_run_folder(tmp_path / "run", shard_samples=(8,)) / "dataset"
    one, other = keys_of_ranks(folder, world=2, workers=2)
    assert len(one) == len(other) == 4 and sorted(one + other) == [f"{i:06d}" for i in range(8)]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_uneven_shards_and_workers_give_every_rank_the_same_number_of_samples(tmp_path, workers):
    folder = make_run_folder(tmp_path / "run", shard_samples=(7, 1, 4)) / "dataset"
    ranks = keys_of_ranks(folder, world=2, workers=workers, epochs=2)
    assert list(map(len, ranks)) == [12, 12]
    assert ranks == keys_of_ranks(folder, world=2, workers=0, epochs=2)


@pytest.mark.parametrize("damage, words", [
    (lambda path: path.unlink(), "000003.tar is missing"),
    (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), r"000003.tar has \d+ bytes, expected"),
    (lambda path: path.write_bytes(b""), "000003.tar has 0 bytes")])
def test_a_shard_that_is_missing_or_cut_is_named_before_the_first_step(tmp_path, damage, words):
    out = make_run_folder(tmp_path / "run")
    run = load_run("launch/runs/smoke.yaml", [f"out={out}", "drafter.num_layers=1"])
    assert open_dataset(run).entries
    damage(out / "dataset" / "000003.tar")
    with pytest.raises(UserError, match=words):
        open_dataset(run)


def test_a_foreign_shard_in_the_folder_is_never_read(tmp_path):
    folder = make_run_folder(tmp_path / "run", shard_samples=(4, 4)) / "dataset"
    (folder / "000000-copy.tar").write_bytes((folder / "000000.tar").read_bytes())
    assert {entry.shard for entry in read_index(folder, Manifest.read(folder))} == {"000000.tar", "000001.tar"}
