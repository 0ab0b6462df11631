"""Real 2-rank ZeRO-3 runs over damaged, remote and packed data: the same losses however samples are read and laid out."""
import re
import shutil

import pytest

from tests.datasets import damage, make_run_folder, read_metrics
from tests.distributed import Ranks
from tests.server import serving

SETTINGS = ("optim.max_steps=8", "optim.global_batch=8", "checkpoint.every=8", "evaluation.every=null")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run_folder(tmp_path_factory.mktemp("data_runs") / "data")


@pytest.fixture(scope="module")
def ranks(folder):
    group = Ranks(2, folder.parent)
    yield group
    group.close()


def run(ranks, folder, name, *arguments, key="000009", check=True):
    """A run of its own over the dataset with sample `key` damaged."""
    out = folder.parent / name
    shutil.copytree(folder, out)
    shard = damage(out / "dataset", key)
    return out, shard, ranks.train(out, *SETTINGS, *arguments, check=check)


@pytest.fixture(scope="module")
def plain(ranks, folder):
    """One sequence a row and pass, from the local folder, without workers; the pass of the skipped sample stays empty."""
    return run(ranks, folder, "plain", "optim.micro_batch=1", "data.on_error=skip")


def test_a_damaged_sample_is_skipped_once_an_epoch_and_counted_at_its_steps(plain):
    out, shard, done = plain
    counts = [line["damaged_samples"] for line in read_metrics(out)]
    sequences = [line["sequences"] for line in read_metrics(out)]
    assert sum(counts) in (2, 3) and sequences == [8 - count for count in counts]  # 64 draws of 26 samples
    named = re.findall(rf"skipped: shard \S+/{shard}, sample 000009: its tensors do not have the CRC-32", done.stdout)
    assert len(named) == sum(counts)


def test_packed_rows_read_from_a_url_by_workers_give_the_same_losses(ranks, folder, plain):
    pytest.importorskip("aiohttp", reason="reading https:// needs aiohttp: pip install '.[remote]'")
    with serving(plain[0] / "dataset") as server:
        out, _, done = run(ranks, folder, "packed", f"data.path={server.url}", "data.pack_tokens=70", "data.workers=2",
                           "optim.micro_batch=1", "data.on_error=skip", "data.prefetch_bytes=100000")
        assert server.sent
    assert "rows of up to 70 tokens" in done.stdout
    assert re.search(r"padding 0\.0% of the positions \(\d\.\d% with", done.stdout)
    for ours, theirs in zip(read_metrics(out), read_metrics(plain[0]), strict=True):
        for name in ("loss", "grad_norm", "accepted_length", "anchors", "sequences", "tokens", "damaged_samples", "lr"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), (ours["step"], name)


def test_without_skipping_both_ranks_stop_before_the_step_with_shard_key_and_remedy(ranks, folder, plain):
    out, shard, done = run(ranks, folder, "stopped", "optim.micro_batch=2", check=False)
    first = next(line["step"] for line in read_metrics(plain[0]) if line["damaged_samples"])
    assert done.returncode == 2 and done.stdout.count(f"error: step {first}:") == 2
    assert f"{shard}, sample 000009" in done.stdout and "data.on_error: skip" in done.stdout
    assert len(read_metrics(out)) == first - 1
