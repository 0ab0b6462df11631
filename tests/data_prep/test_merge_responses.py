"""Responses by several tasks: together those of a single one, and never joined while something is missing."""

import json

import pytest

from data_prep.__main__ import main
from data_prep.errors import UserError
from data_prep.extract import extract
from data_prep.merge_responses import merge_responses
from data_prep.responses import meta_path, respond, share_path

from .conftest import SETTINGS, read_lines, snapshot

TASKS = 3
OPTIONS = {"max_new_tokens": 12, "batch_size": 8}


@pytest.fixture(scope="module")
def shares(target, prompts, tmp_path_factory):
    """A folder with the files of three tasks, which came in another order than they are numbered."""
    folder = tmp_path_factory.mktemp("shares")
    for task in (2, 0, 1):
        respond(target, prompts, folder / "r.jsonl", **OPTIONS, num_tasks=TASKS, task_id=task)
    return folder


@pytest.fixture
def out(shares, tmp_path):
    for path in shares.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path / "r.jsonl"


def by_id(path):
    return {line["id"]: line for line in read_lines(path)}


def test_tasks_together_answer_what_a_single_one_does_and_a_dataset_can_be_made_of_it(out, target, responses, tmp_path, capsys):
    assert main(["merge", str(out)]) == 0 and "27 lines of all tasks" in capsys.readouterr().out
    assert by_id(out) == by_id(responses)
    assert {line["id"] for line in read_lines(out)[:9]} == {f"p{i}" for i in range(0, 25, 3)}
    assert json.loads(meta_path(out).read_text()) == json.loads(meta_path(responses).read_text())
    assert extract(target, out, tmp_path / "d", **SETTINGS).sealed


def test_merging_again_writes_the_same_file_and_a_single_task_finds_nothing_left_to_do(out, target, prompts):
    merge_responses(out)
    before = {path.name: path.read_bytes() for path in out.parent.iterdir()}
    merge_responses(out)
    assert {path.name: path.read_bytes() for path in out.parent.iterdir()} == before
    assert respond(target, prompts, out, **OPTIONS)["generated"] == 0


def test_a_task_that_is_missing_or_was_interrupted_is_named_and_nothing_is_written(out, target, prompts):
    share = share_path(out, 1, TASKS)
    meta = json.loads(meta_path(share).read_text())
    del meta["finished"]
    meta_path(share).write_text(json.dumps(meta))
    share.write_bytes(share.read_bytes()[:-40])  # killed while it wrote
    before = snapshot(out.parent)
    with pytest.raises(UserError, match=r"1 of 3 tasks .* \(r.jsonl.task-1-of-3\)"):
        merge_responses(out)
    assert snapshot(out.parent) == before
    assert respond(target, prompts, out, **OPTIONS, num_tasks=TASKS, task_id=1)["generated"] == 1
    assert merge_responses(out) == 27
    share_path(out, 2, TASKS).unlink()
    with pytest.raises(UserError, match="task-2-of-3"):
        merge_responses(out)


def test_shares_of_another_number_of_tasks_or_of_other_settings_are_refused(out, target, prompts):
    respond(target, prompts, out, **OPTIONS, num_tasks=40, task_id=39)  # more tasks than prompts: an empty share
    with pytest.raises(UserError, match="3 and of 40 tasks .* ambiguous"):
        merge_responses(out)
    for path in out.parent.glob("*-of-40*"):
        path.unlink()
    meta = meta_path(share_path(out, 2, TASKS))
    meta.write_text(meta.read_text().replace('"max_new_tokens": 12', '"max_new_tokens": 13'))
    with pytest.raises(UserError, match="task-2-of-3 was made with other settings .*max_new_tokens: have 13, expected 12"):
        merge_responses(out)
    with pytest.raises(UserError, match="ids run from 0 to 2"):
        respond(target, prompts, out, **OPTIONS, num_tasks=TASKS, task_id=3)


def test_a_file_without_tasks_is_refused_with_the_command_that_makes_them(tmp_path):
    with pytest.raises(UserError, match="--num-tasks N --task-id I"):
        merge_responses(tmp_path / "r.jsonl")
