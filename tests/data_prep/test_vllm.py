"""Responses from a real vLLM server, where its command is installed."""

import shutil
import threading
import time

import pytest

from data_prep import fleet
from data_prep.errors import UserError
from data_prep.responses import respond
from data_prep.tiny_target import make_tiny_target
from data_prep.tokens import load_tokenizer
from tests.vllm_server import needs_vllm, vllm_server

from .conftest import read_lines, write_lines

STOPS = '{"eos_token_id": [2, 247]}'

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A tiny target with heads wide enough for vLLM's kernels, and the URL of a server of it."""
    folder = make_tiny_target(tmp_path_factory.mktemp("served") / "tiny", hidden=128)
    (folder / "generation_config.json").write_text(STOPS)
    with vllm_server(folder, folder.with_name("vllm.log"), "--max-model-len", 512) as (url, process):
        yield folder, url, process


def responses_of(folder, prompts, out, **options) -> dict[str, dict]:
    respond(folder, prompts, out, max_new_tokens=24, **options)
    return {line["id"]: line for line in read_lines(out)}


def test_greedy_responses_of_vllm_are_token_for_token_the_local_ones(served, prompts, tmp_path):
    folder, url, _ = served
    remote = responses_of(folder, prompts, tmp_path / "remote.jsonl", servers=[url], concurrency=8)
    assert remote == responses_of(folder, prompts, tmp_path / "local.jsonl", batch_size=8)
    assert {line["finish_reason"] for line in remote.values()} == {"stop", "length"}
    assert len(remote) == 27 and {line["ids_from"] for line in remote.values()} == {"target"}


def test_sampled_responses_of_vllm_repeat_and_change_with_the_seed(served, prompts, tmp_path):
    folder, url, _ = served
    (folder / "generation_config.json").write_text(STOPS[:-1] + ', "temperature": 0.8, "top_p": 0.95, "top_k": 50}')
    one, again, other = (
        responses_of(folder, prompts, tmp_path / f"{i}.jsonl", servers=[url], sample=True, seed=seed)
        for i, seed in enumerate((1, 1, 2))
    )
    ids = [[line["response_token_ids"] for _, line in sorted(found.items())] for found in (one, again, other)]
    assert ids[0] == ids[1] != ids[2]


def test_a_prompt_that_vllm_refuses_fails_alone_with_the_servers_reason(served, tmp_path):
    folder, url, _ = served
    wider = shutil.copytree(folder, tmp_path / "tiny")
    tokenizer = load_tokenizer(wider)
    tokenizer.add_tokens([f"<{i}>" for i in range(9)])  # the last ones have no row in the embedding table
    tokenizer.save_pretrained(wider)
    write_lines(tmp_path / "p.jsonl", [{"id": "good", "prompt": "x"}, {"id": "bad", "prompt": "x <8>"}])
    with pytest.raises(UserError, match="1 of 2 responses failed, among them bad: status 400.*out of vocabulary"):
        responses_of(wider, tmp_path / "p.jsonl", tmp_path / "r.jsonl", servers=[url])
    assert [line["id"] for line in read_lines(tmp_path / "r.jsonl")] == ["good"]


def test_a_server_that_is_killed_leaves_what_was_answered(served, tmp_path, monkeypatch):
    folder, url, process = served
    monkeypatch.setattr(fleet, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(fleet, "FAILURES", 2)
    write_lines(tmp_path / "p.jsonl", [{"id": f"p{i}", "prompt": f"Say {i}"} for i in range(400)])
    out = tmp_path / "r.jsonl"

    def kill_in_the_middle():
        while not out.exists() or out.read_bytes().count(b"\n") < 20:
            time.sleep(0.01)
        process.kill()

    threading.Thread(target=kill_in_the_middle, daemon=True).start()
    with pytest.raises(UserError, match="no server answers any more.*finished responses are kept"):
        respond(folder, tmp_path / "p.jsonl", out, max_new_tokens=24, servers=[url], concurrency=2)
    assert 20 <= len(read_lines(out)) < 400
