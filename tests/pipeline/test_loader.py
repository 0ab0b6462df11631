"""Reading ahead: bounded, ended cleanly, and failing on all ranks together."""
import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
import time

import pytest
import torch

from data_prep.errors import UserError
from pipeline.loader import StepLoader, agree, read_ahead
from pipeline.sources import RemoteFolder
from tests.datasets import damage, make_run_folder, step_dataset
from tests.ranks import run_ranks
from tests.server import serving


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run_folder(tmp_path_factory.mktemp("loader") / "run") / "dataset"


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "dataset")


def keys(batches):
    return [[mb.keys for mb in batch.micro_batches] for batch in batches]


def children():
    return {child.pid for child in multiprocessing.active_children()}


@pytest.mark.parametrize("pack", [None, 64])
def test_any_number_of_workers_gives_the_same_steps(made, pack):
    data = step_dataset(made, pack=pack)
    everything = [[mb.keys for mb in data[step]] for step in range(len(data))]
    for workers in (0, 2):
        with StepLoader(data, 3, len(data), workers=workers, budget=2**20) as loader:
            assert keys(next(loader) for _ in range(3, len(data))) == everything[3:]


def test_fewer_shards_than_workers_and_ranks_split_the_samples(tmp_path):
    folder = make_run_folder(tmp_path / "run", shard_samples=(12,)) / "dataset"
    seen = []
    for rank in (0, 1):
        data = step_dataset(folder, rank=rank, world=2, batch=4, epochs=1)
        with StepLoader(data, 0, len(data), workers=2, budget=2**20) as loader:
            seen += [key for _ in range(len(data)) for mb in next(loader).micro_batches for key in mb.keys]
    assert sorted(seen) == [f"{key:06d}" for key in range(12)]


def test_workers_read_no_more_bytes_ahead_than_the_budget(made):
    pytest.importorskip("aiohttp", reason="reading https:// needs aiohttp: pip install '.[remote]'")
    with serving(made) as server:
        data = step_dataset(made, source=RemoteFolder(server.url))
        budget = 5 * data.largest_bytes
        with StepLoader(data, 0, len(data), workers=2, budget=budget) as loader:
            quiet, sent = 0, -1
            while quiet < 10:
                time.sleep(0.05)
                quiet, sent = (quiet + 1, sent) if sent == server.sent else (0, server.sent)
            assert len(server.requests) == 4, "2 workers share a budget of 5 micro-batches evenly"
            # A range holds the sample's ids, mask and JSON too; they are about 1 KiB here.
            assert sent <= budget + 2048 * len(server.requests)
            next(loader)


@pytest.mark.parametrize("workers,budget,expected", [
    (2, 1000, (2, 5)), (4, 300, (3, 1)), (2, 10**9, (2, 8)), (0, 1, (0, 0))])
def test_the_budget_decides_how_many_micro_batches_are_read_ahead(workers, budget, expected):
    assert read_ahead(workers, budget, 100) == expected


def test_a_budget_below_one_micro_batch_is_refused_with_the_remedy():
    with pytest.raises(UserError, match="data.prefetch_bytes 99 is less than the largest micro-batch of this run, 100"):
        read_ahead(2, 99, 100)


def test_workers_end_with_the_loop_also_in_the_middle_and_ignore_the_ranks_signals(made):
    before, data = children(), step_dataset(made)
    with StepLoader(data, 0, len(data), workers=2, budget=2**20) as loader:
        for pid in children() - before:
            os.kill(pid, signal.SIGTERM)
        next(loader)
        assert len(children() - before) == 2
    assert children() == before


@pytest.mark.parametrize("workers,pack", [(0, None), (2, None), (2, 64)])
def test_tensors_that_are_kept_keep_their_values_however_far_the_loop_goes_on(made, workers, pack):
    def tensors(micro_batches):
        return [{name: value for name, value in vars(mb).items() if torch.is_tensor(value)} for mb in micro_batches]

    data = step_dataset(made, pack=pack)
    with StepLoader(data, 0, len(data), workers=workers, budget=2 * data.largest_bytes) as loader:
        kept = [tensors(batch.micro_batches) for batch in loader]
    for step, found in enumerate(kept):
        for ours, fresh in zip(found, tensors(data[step]), strict=True):
            assert ours.keys() == fresh.keys() and all(torch.equal(ours[name], fresh[name]) for name in ours)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_dropped_need_no_more_buffers_than_one_step_and_what_is_read_ahead(made, workers):
    data = step_dataset(made)
    with StepLoader(data, 0, len(data), workers=workers, budget=3 * data.largest_bytes) as loader:
        places = set()
        for _ in range(len(data)):
            batch = next(loader)
            places |= {mb.features_BSE.data_ptr() for mb in batch.micro_batches}
            del batch
    assert len(places) <= data.passes.per_step + (2 if workers else 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_a_gpu_still_copies_is_not_overwritten_though_nobody_holds_it(made, workers):
    data, copied = step_dataset(made), threading.Event()
    with StepLoader(data, 0, len(data), workers=workers, budget=data.largest_bytes) as loader:
        leases = [mb.lease for mb in next(loader).micro_batches]
        memories = [lease.buffer.memory for lease in leases]  # without a lease
        before = [memory.clone() for memory in memories]
        for lease in leases:
            lease.hold(copied.is_set)
        leases = lease = None
        threading.Timer(0.3, copied.set).start()
        steps = 1
        while not copied.is_set():
            assert all(map(torch.equal, memories, before))
            batch = next(loader)
            assert batch.micro_batches and not batch.problem
            del batch
            steps += 1
        for _ in range(steps, len(data)):
            next(loader)
    assert not any(map(torch.equal, memories, before)), "the buffers were not used again"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: copies run behind the process")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_whole_on_a_gpu_that_is_far_behind(made, workers):
    data, device = step_dataset(made), torch.device("cuda")
    with StepLoader(data, 0, len(data), workers=workers, budget=3 * data.largest_bytes, pin_memory=True) as loader:
        torch.cuda._sleep(10**9)  # the stream starts copying about a second from now
        moved = []
        for batch in loader:
            assert all(mb.features_BSE.is_pinned() for mb in batch.micro_batches)
            moved.append([mb.to(device, torch.bfloat16) for mb in batch.micro_batches])
            del batch
    for step, batch in enumerate(moved):
        for ours, fresh in zip(batch, data[step], strict=True):
            assert torch.equal(ours.features_BSE.cpu(), fresh.features_BSE)
            assert torch.equal(ours.labels_BNJ.cpu(), fresh.labels_BNJ)


def test_workers_end_when_their_rank_is_killed(made):
    def rank(pipe):
        data = step_dataset(made)
        with StepLoader(data, 0, len(data), workers=2, budget=2**20) as loader:
            next(loader)
            pipe.send([worker.process.pid for worker in loader.workers])
            os.kill(os.getpid(), signal.SIGKILL)

    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=rank, args=(theirs,))
    process.start()
    workers = ours.recv()
    process.join()
    give_up = time.monotonic() + 30
    try:
        while any(os.path.exists(f"/proc/{pid}") for pid in workers):
            assert time.monotonic() < give_up
            time.sleep(0.1)
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_killed_worker_is_named_on_its_rank_and_stops_the_other_one_at_the_same_step(made):
    def body(runtime):
        data = step_dataset(made, rank=runtime.rank, world=2, epochs=20)
        with StepLoader(data, 0, len(data), workers=1, budget=data.largest_bytes) as loader:
            for step in range(len(data)):
                batch = next(loader)
                if step == 2 and runtime.rank == 1:
                    (worker,) = loader.workers
                    os.kill(worker.process.pid, signal.SIGKILL)
                agree(step, batch, torch.ones((), dtype=torch.float64), "stop", runtime)

    other, dead = run_ranks(body)
    assert isinstance(other, UserError) and isinstance(dead, UserError)
    assert "exit code -9" in str(dead) and "pid" in str(dead) and "lower data.prefetch_bytes" in str(dead)
    assert "another rank could not read its samples" in str(other)
    assert str(dead).split(":")[0] == str(other).split(":")[0], "the ranks stopped at different steps"


def test_a_worker_that_hangs_is_a_problem_and_not_a_wait_for_ever(made, monkeypatch):
    data = step_dataset(made)
    monkeypatch.setattr("pipeline.workers.PATIENCE", 1)
    monkeypatch.setattr("pipeline.workers.LAST_WORDS", 0.1)
    monkeypatch.setattr(data.reader, "fill", lambda entry, hidden: time.sleep(60))
    with StepLoader(data, 0, len(data), workers=1, budget=2**20) as loader:
        assert "delivered nothing for 1 s" in next(loader).problem


def test_a_worker_with_an_error_that_nobody_foresaw_prints_it_and_is_named(made, monkeypatch, capfd):
    data = step_dataset(made)
    monkeypatch.setattr(data.reader, "fill", lambda entry, hidden: 1 / 0)
    with StepLoader(data, 0, len(data), workers=1, budget=2**20) as loader:
        assert "exit code 1) died" in next(loader).problem
    assert "ZeroDivisionError" in capfd.readouterr().err


def steps_of(folder, on_error, batch=4, pack=None):
    def body(runtime):
        data = step_dataset(folder, rank=runtime.rank, world=2, batch=batch, epochs=1, pack=pack)
        found = []
        with StepLoader(data, 0, len(data), workers=0, budget=1) as loader:
            for step in range(len(data)):
                read = next(loader)
                anchors = sum((mb.mask_BNJ[..., 0].sum() for mb in read.micro_batches), torch.zeros(()))
                total, damaged = agree(step, read, anchors.double(), on_error, runtime)
                keys = [key for mb in read.micro_batches for key in mb.keys]
                found.append((total, damaged, len(read.micro_batches), keys))
        return found

    return run_ranks(body)


@pytest.mark.parametrize("pack", [None, 64])
def test_a_damaged_sample_is_skipped_and_counted_on_all_ranks_and_they_keep_their_other_samples(folder, capfd, pack):
    whole = steps_of(folder, "skip", pack=pack)
    shard = damage(folder, "000009")
    damaged = steps_of(folder, "skip", pack=pack)
    assert [step[:2] for step in damaged[0]] == [step[:2] for step in damaged[1]]
    (at,) = [t for t, step in enumerate(damaged[0]) if step[1]]
    for rank, other in zip(whole, damaged):
        for t, (before, after) in enumerate(zip(rank, other)):
            assert after[1] == (t == at) and after[2] == before[2]
            assert after[3] == [key for key in before[3] if key != "000009"]
            assert after[0] == before[0] if t != at else after[0] < before[0]
    said = capfd.readouterr().err
    assert said.count("skipped") == 1 and f"{shard}, sample 000009: its tensors do not have the CRC-32" in said


def test_a_damaged_sample_stops_all_ranks_at_its_step_unless_skipping_was_asked_for(folder):
    shard = damage(folder, "000009")
    texts = sorted(map(str, steps_of(folder, "stop")))
    named = [text for text in texts if f"{shard}, sample 000009" in text]
    assert len(named) == 1 and "data.on_error: skip" in named[0]
    assert len({text.split(":")[0] for text in texts}) == 1 and any("another rank" in text for text in texts)


def test_a_shard_that_cannot_be_read_at_all_stops_also_under_skip(folder):
    (folder / "000001.tar").unlink()
    texts = list(map(str, steps_of(folder, "skip")))
    assert any("000001.tar cannot be read" in text for text in texts) and all("all ranks stop" in text for text in texts)


def test_a_step_without_any_readable_sample_stops_also_under_skip(folder):
    for key in range(26):
        damage(folder, f"{key:06d}")
    assert all("all ranks stop before it" in str(answer) for answer in steps_of(folder, "skip"))
