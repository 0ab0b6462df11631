"""Generation on this machine: batches that follow from memory and settings, and what happens when memory runs out."""

import inspect
import json
import os
import shutil
import subprocess
import sys
from array import array

import pytest
import torch
from transformers import DynamicCache

from data_prep import memory
from data_prep.conversations import Conversation, Turn
from data_prep.local import batches
from data_prep.model import load_model
from data_prep.responses import meta_path, read_meta, respond
from data_prep.tiny_target import make_tiny_target

from .conftest import read_lines, write_lines

# `respond` in an address space that is little larger than what the process has, then a prompt with next to none left.
LIMITED = """
import resource, sys
from array import array
from pathlib import Path
import torch
from tqdm import tqdm
from data_prep.conversations import Conversation, Turn
from data_prep.errors import UserError
from data_prep.local import LocalTarget
from data_prep.responses import respond

def allow(more):
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, resource.RLIM_INFINITY))

torch.set_num_threads(1)
folder = Path(sys.argv[2])
local = LocalTarget(Path(sys.argv[1]), [2], 6, None)
local.model
allow(30_000_000)
respond(local.folder, folder / "p.jsonl", folder / "limited.jsonl", max_new_tokens=6, batch_size=16)
allow(500_000)
huge = Turn(Conversation({"id": "huge"}, [None], [0]), 0, array("i", [5] * 4000))
try:
    list(local.answer([huge], tqdm(disable=True)))
except UserError as error:
    print(error)
"""


def turns_of(*lengths: int) -> list[Turn]:
    talks = [Conversation({"id": f"p{i}"}, [None], [0]) for i in range(len(lengths))]
    return [Turn(talk, 0, array("i", [5] * length)) for talk, length in zip(talks, lengths)]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_bytes_of_a_tokens_keys_and_values_are_what_a_cache_really_takes(tmp_path, family):
    model = load_model(make_tiny_target(tmp_path, family=family))
    cache = DynamicCache(config=model.config)
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=True, **{argument: cache})
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) == 3 * memory.cache_bytes(model)


def test_batches_are_sorted_by_length_and_keep_to_the_token_budget():
    turns = turns_of(*(7 * i % 101 for i in range(1, 90)), 3000)
    found = list(batches(turns, 20, None, 1000))
    flat = [turn for batch in found for turn in batch]
    assert sorted(map(id, flat)) == sorted(map(id, turns))
    assert [len(turn.prompt) for turn in flat] == sorted(len(turn.prompt) for turn in turns)
    full = [len(batch) * (len(batch[-1].prompt) + 20) for batch in found[:-1]]
    assert max(full) <= 1000 and len(found[-1]) == 1  # the one that fits no budget is alone
    assert all(len(a) + 1 > 1000 // (len(b[0].prompt) + 20) for a, b in zip(found, found[1:]))
    assert [len(batch) for batch in batches(turns_of(*[4] * 600), 20, None, 1 << 40)] == [256, 256, 88]
    assert [len(batch) for batch in batches(turns, 20, 40, None)] == [40, 40, 10]


def test_an_automatic_batch_size_is_recorded_and_the_run_that_carries_on_repeats_it(target, tmp_path, monkeypatch):
    write_lines(tmp_path / "p.jsonl", [{"id": f"p{i}", "prompt": "Say" + " it" * (i % 3)} for i in range(9)])
    cost = memory.cache_bytes(load_model(target))
    free = memory.psutil.virtual_memory().available
    monkeypatch.setattr(memory, "SHARE", 100 * cost / free)  # room for about 100 tokens: two or three prompts a batch
    out = tmp_path / "r.jsonl"
    respond(target, tmp_path / "p.jsonl", out, max_new_tokens=10)
    meta = read_meta(out)
    assert meta["batch_size"] is None and 50 < meta["batch_tokens"] < 200
    monkeypatch.setattr(memory, "SHARE", 0.5)
    whole = out.read_bytes()
    out.write_bytes(whole[: len(whole) // 2])
    respond(target, tmp_path / "p.jsonl", out, max_new_tokens=10)
    assert out.read_bytes() == whole and read_meta(out) == meta


def test_out_of_memory_halves_the_batch_and_goes_on_to_the_same_responses(target, tmp_path):
    lines = [{"id": f"p{i}", "prompt": f"{i} " + "word " * (150 + i)} for i in range(16)]
    write_lines(tmp_path / "p.jsonl", lines)
    # glibc takes all blocks of tensors straight from the system, so that what is free is what the limit leaves
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, target, tmp_path],
        env=os.environ | malloc | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "out of memory with 16 prompts" in run.stdout and "going on with 8" in run.stdout, run.stderr
    respond(target, tmp_path / "p.jsonl", tmp_path / "free.jsonl", max_new_tokens=6, batch_size=16)
    assert (tmp_path / "limited.jsonl").read_bytes() == (tmp_path / "free.jsonl").read_bytes()
    assert "memory does not suffice for the 4000 prompt tokens of 'huge' and 6 new ones" in run.stdout, run.stderr


def test_an_error_that_has_nothing_to_do_with_memory_is_none():
    assert not memory.is_out_of_memory(RuntimeError("shape mismatch"))
    assert not memory.is_out_of_memory(ValueError("not enough memory"))
    assert memory.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")) and memory.is_out_of_memory(
        MemoryError()
    )


def test_responses_do_not_depend_on_the_batch_size(target, prompts, responses, tmp_path):
    respond(target, prompts, tmp_path / "r.jsonl", max_new_tokens=12, batch_size=3)
    found, expected = ({line["id"]: line for line in read_lines(path)} for path in (tmp_path / "r.jsonl", responses))
    assert found == expected


def test_lines_may_come_in_any_order_and_those_of_a_half_kept_batch_are_not_made_twice(
    target, prompts, responses, tmp_path
):
    out = tmp_path / "r.jsonl"
    shutil.copy(meta_path(responses), meta_path(out))
    lines = read_lines(responses)
    write_lines(out, lines[20:22] + lines[3:7][::-1])
    counts = respond(target, prompts, out, max_new_tokens=12, batch_size=8)
    assert counts["generated"] == 21 and counts["lines"] == 27
    key = json.dumps
    assert sorted(map(key, read_lines(out))) == sorted(map(key, lines))
