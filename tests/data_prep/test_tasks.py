"""Several tasks, tasks that die or run twice, and the merge: nothing is lost, mixed or counted twice."""

import random
import shutil
import signal
import time

import pytest

from data_prep.errors import UserError
from data_prep.extract import extract
from data_prep.manifest import Manifest
from data_prep.merge import merge
from data_prep.records import read_record, scan_shard
from data_prep.verify import verify

from .children import start
from .conftest import SETTINGS, snapshot

KILLS = 20


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_any_number_of_tasks_in_any_order_gives_the_bytes_of_a_single_one(target, responses, clean_dataset, tmp_path, order):
    for task in order:
        manifest = extract(target, responses, tmp_path / "d", **SETTINGS, num_tasks=3, task_id=task)
        assert not manifest.sealed
    merge(tmp_path / "d")
    assert contents(tmp_path / "d") == contents(clean_dataset)


def test_tasks_may_run_at_the_same_time_and_twice(target, responses, clean_dataset, tmp_path):
    children = [start(target, responses, tmp_path / "d", **SETTINGS, num_tasks=2, task_id=task) for task in (0, 1, 0, 1)]
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 4
    merge(tmp_path / "d")
    assert contents(tmp_path / "d") == contents(clean_dataset)


def test_the_same_single_task_twice_at_once_ends_in_one_sealed_dataset(target, responses, clean_dataset, tmp_path):
    children = [start(target, responses, tmp_path / "d", **SETTINGS) for _ in range(3)]
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 3
    assert contents(tmp_path / "d") == contents(clean_dataset)


def test_merging_with_a_task_missing_names_its_shards_and_changes_nothing(target, responses, tmp_path):
    extract(target, responses, tmp_path / "d", **SETTINGS, num_tasks=2, task_id=0)
    before = snapshot(tmp_path / "d")
    with pytest.raises(UserError, match="missing .*000001.tar.*task I makes"):
        merge(tmp_path / "d")
    assert snapshot(tmp_path / "d") == before


def test_merging_again_changes_nothing(dataset):
    before = snapshot(dataset)
    assert merge(dataset).sealed and snapshot(dataset) == before


def test_a_shard_of_another_extraction_in_a_shards_place_is_refused(target, responses, clean_dataset, tmp_path):
    out = tmp_path / "d"
    extract(target, responses, out, **SETTINGS, num_tasks=2, task_id=0)
    shutil.copy(clean_dataset / "000002.tar", out / "000001.tar")
    with pytest.raises(UserError, match="000001.tar does not hold the samples"):
        extract(target, responses, out, **SETTINGS, num_tasks=2, task_id=1)
    shutil.copy(clean_dataset / "000002.tar", out / "000003.tar")
    with pytest.raises(UserError, match="missing or double"):
        merge(out)
    (out / "000001.tar").write_bytes(b"no tar")
    with pytest.raises(UserError, match="000001.tar is no finished shard"):
        merge(out)


def test_a_shard_cut_short_after_it_was_finished_is_refused(target, responses, tmp_path):
    out = tmp_path / "d"
    extract(target, responses, out, **SETTINGS, num_tasks=2, task_id=0)
    path = out / "000000.tar"
    path.write_bytes(path.read_bytes()[:-512])
    with pytest.raises(UserError, match="000000.tar has .*cut short or replaced"):
        extract(target, responses, out, **SETTINGS)


def test_a_record_made_from_the_shard_is_the_one_that_was_written(target, responses, tmp_path):
    out = tmp_path / "d"
    extract(target, responses, out, **SETTINGS, num_tasks=2, task_id=0, storage="fp8")
    assert read_record(out, "000000.tar") == scan_shard(out / "000000.tar")


def test_a_task_that_does_not_exist_is_refused(target, responses, tmp_path):
    with pytest.raises(UserError, match="ids run from 0 to 1"):
        extract(target, responses, tmp_path / "d", **SETTINGS, num_tasks=2, task_id=2)


def test_killed_at_twenty_random_moments_a_rerun_always_ends_in_the_clean_runs_bytes(
    target, responses, clean_dataset, tmp_path
):
    start(target, responses, tmp_path / "first", **SETTINGS).join(60)  # starts the server
    began = time.monotonic()
    child = start(target, responses, tmp_path / "timed", **SETTINGS)
    child.join(60)
    whole, expected = time.monotonic() - began, contents(clean_dataset)
    draw = random.Random(0)
    stages = set()
    killed = attempts = 0
    while killed < KILLS:
        attempts += 1
        assert attempts <= 5 * KILLS, f"only {killed} of {attempts} runs could be killed before their end"
        out = tmp_path / str(attempts)
        child = start(target, responses, out, **SETTINGS)
        time.sleep(whole * draw.random())
        child.kill()
        child.join(60)
        killed += child.exitcode == -signal.SIGKILL
        if (out / "manifest.json").is_file():
            findings = verify(out).findings
            assert all(finding.startswith("unfinished") or ".tmp-" in finding for finding in findings), findings
            stages.add((Manifest.read(out).sealed, len(list(out.glob("*.tar")))))
        extract(target, responses, out, **SETTINGS)
        assert contents(out) == expected, attempts
    assert len(stages) >= 2, "every kill came at the same stage: the moments are not spread over the run"
