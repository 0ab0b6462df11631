"""Responses from servers: those of the target itself, whatever the servers do in between."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from data_prep import fleet
from data_prep.errors import UserError
from data_prep.remote import response_ids
from data_prep.responses import read_meta, respond
from data_prep.sampling import sample_seed
from data_prep.servers import Reply
from data_prep.tokens import load_tokenizer

from .conftest import read_lines, write_lines
from .serving import Oracle, TargetServer, change, replace, reset, stall, status, trickle, truncate

OPTIONS = {"max_new_tokens": 12, "concurrency": 4, "timeout": 5}


@pytest.fixture(scope="module")
def oracle(target, responses):
    """Knows the answers to the prompts of `responses` already: a busy machine does not look like a slow server."""
    oracle = Oracle(target)
    for line in read_lines(responses):
        oracle(line["prompt_token_ids"], 12)
    return oracle


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(fleet, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(fleet, "LONGEST_WAIT", 0.1)


def by_id(path) -> dict[str, dict]:
    lines = read_lines(path)
    found = {line["id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_responses_of_a_server_are_token_for_token_the_local_ones(target, prompts, responses, oracle, tmp_path):
    with TargetServer(oracle, lambda number, prompt: stall(0.02)) as server:
        counts = respond(target, prompts, tmp_path / "r.jsonl", servers=[server.url], **OPTIONS)
    assert by_id(tmp_path / "r.jsonl") == by_id(responses)
    assert counts["lines"] == counts["generated"] == 27 and 1 < server.most_open <= 4
    meta = read_meta(tmp_path / "r.jsonl")
    assert (meta["generator"], meta["sampling"]) == ("server", None) and "batch_size" not in meta


@pytest.mark.parametrize(
    "fault",
    [
        status(500),
        status(503),
        status(429, Retry_After="0"),
        status(429, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
        reset,
        stall(1.2),
        trickle,
        truncate,
        replace(b"<html>nothing</html>"),
        replace(b"{}"),
        replace(b'{"choices": []}'),
        change(finish_reason=None),
        change(token_ids=[5, "x"]),
        change(token_ids=[5, 6], finish_reason="stop", stop_reason=None),
    ],
    ids="500 503 429 429-date reset stall trickle truncated html empty no-choice aborted no-ids no-stop".split(),
)
def test_a_server_that_fails_is_asked_again(target, prompts, responses, oracle, tmp_path, fault):
    timeout = {"timeout": 1} if fault in (trickle,) or fault.__qualname__.startswith("stall") else {}
    with TargetServer(oracle, lambda number, prompt: fault if number in (1, 2, 9) else None) as server:
        counts = respond(target, prompts, tmp_path / "r.jsonl", servers=[server.url], **OPTIONS | timeout)
    assert by_id(tmp_path / "r.jsonl") == by_id(responses)
    assert counts["generated"] == 27 and len(server.asked) == 30


def test_a_server_is_not_asked_before_it_wants_to_be(target, prompts, oracle, tmp_path):
    fault = status(429, Retry_After="1")
    with TargetServer(oracle, lambda number, prompt: fault if number == 3 else None) as server:
        respond(target, prompts, tmp_path / "r.jsonl", servers=[server.url], **OPTIONS | {"concurrency": 1})
    waits = [later - earlier for earlier, later in zip(server.times, server.times[1:])]
    assert waits[3] >= 1


def test_answers_may_come_in_any_order_but_turns_are_asked_in_theirs(target, prompts, responses, oracle, tmp_path):
    moments = random.Random(0)
    with TargetServer(oracle, lambda number, prompt: stall(moments.random() / 5)) as server:
        respond(target, prompts, tmp_path / "r.jsonl", servers=[server.url], **OPTIONS | {"concurrency": 16})
    names = [line["id"] for line in read_lines(tmp_path / "r.jsonl")]
    assert names[:-1] != [line["id"] for line in read_lines(prompts)]
    assert names.index("talk/with.dots#1") < names.index("talk/with.dots#2")
    assert by_id(tmp_path / "r.jsonl") == by_id(responses)


def test_where_only_text_comes_back_its_tokens_are_the_ids_and_the_line_says_so(
    target, prompts, oracle, tmp_path, capsys
):
    with TargetServer(oracle, ids=False) as server:
        counts = respond(target, prompts, tmp_path / "r.jsonl", servers=[server.url], **OPTIONS)
    assert counts["ids from text"] == counts["lines"] == 27
    assert "27 responses came as text" in capsys.readouterr().err
    tokenizer = load_tokenizer(target)
    ends = set()
    for line in by_id(tmp_path / "r.jsonl").values():
        assert line["ids_from"] == "text"
        real = oracle(line["prompt_token_ids"], 12)
        end = real[-1:] if line["finish_reason"] == "stop" else []
        ends.update(end)
        assert line["response_token_ids"] == tokenizer(oracle.text(real))["input_ids"] + end
    assert 247 in ends  # the server named it; it is not the tokenizer's end of turn


def test_a_text_gets_the_stop_token_that_was_named_else_the_end_of_turn_and_none_where_it_was_cut(oracle):
    def ids(text, stopped, stop=None):
        return response_ids(oracle.tokenizer, Reply(None, text, stopped, stop), [2, 247])

    yes = oracle.tokenizer("yes")["input_ids"]
    assert ids("yes", True, 247) == [*yes, 247] and ids("yes", True) == [*yes, 2]
    assert ids("", True) == [2] and ids("yes", False) == yes
    assert ids("yes<|im_end|>\n", True) == [*yes, 2]  # some servers leave it in the text


@pytest.mark.parametrize("ids", [True, False])
def test_sglang_is_asked_for_ids_in_its_own_way(target, prompts, responses, oracle, tmp_path, ids):
    with TargetServer(oracle, sglang=True, ids=ids) as server:
        respond(target, prompts, tmp_path / "r.jsonl", servers=[server.url], **OPTIONS)
    assert server.bodies[0]["sampling_params"]["stop_token_ids"] == [2, 247]
    lines = by_id(tmp_path / "r.jsonl")
    assert lines == by_id(responses) if ids else {line["ids_from"] for line in lines.values()} == {"text"}


def test_a_stop_token_that_the_server_kept_to_itself_is_put_back(target, prompts, responses, oracle, tmp_path):
    def without_stop(handler, answer):
        whole = json.loads(answer)
        choice = whole["choices"][0]
        if choice["finish_reason"] == "stop":
            choice["stop_reason"] = choice["token_ids"].pop()
        handler.send(200, json.dumps(whole).encode())

    with TargetServer(oracle, lambda number, prompt: without_stop) as server:
        respond(target, prompts, tmp_path / "r.jsonl", servers=[server.url], **OPTIONS)
    assert by_id(tmp_path / "r.jsonl") == by_id(responses)


def test_a_server_that_ignores_stop_tokens_is_cut_at_the_first(target, prompts, responses, oracle, tmp_path):
    def run_on(handler, answer):
        whole = json.loads(answer)
        choice = whole["choices"][0]
        if choice["finish_reason"] == "stop":
            choice |= {"token_ids": choice["token_ids"] + [7, 8, 9], "finish_reason": "length"}
        handler.send(200, json.dumps(whole).encode())

    with TargetServer(oracle, lambda number, prompt: run_on) as server:
        respond(target, prompts, tmp_path / "r.jsonl", servers=[server.url], **OPTIONS)
    assert by_id(tmp_path / "r.jsonl") == by_id(responses)


def test_a_restart_asks_for_nothing_that_is_finished(target, prompts, responses, oracle, tmp_path, monkeypatch):
    monkeypatch.setattr(fleet, "FAILURES", 3)
    out = tmp_path / "r.jsonl"
    with TargetServer(oracle, lambda number, prompt: reset if number >= 10 else None) as server:
        with pytest.raises(
            UserError, match=rf"no server answers any more \({server.url}: .*finished responses are kept"
        ):
            respond(target, prompts, out, servers=[server.url], **OPTIONS)
    finished = {tuple(line["prompt_token_ids"]) for line in read_lines(out)}
    assert len(finished) == 10
    out.write_bytes(out.read_bytes()[:-5])  # the last line was only half written
    with TargetServer(oracle) as server:
        counts = respond(target, prompts, out, servers=[server.url], **OPTIONS | {"concurrency": 2, "timeout": 7})
        assert counts["lines"] == 27 and counts["generated"] == len(server.asked) == 18
        assert len(finished & set(map(tuple, server.asked))) == 1
        assert respond(target, prompts, out, servers=[server.url], **OPTIONS)["generated"] == 0
        assert len(server.asked) == 18
    assert by_id(out) == by_id(responses)


def test_two_servers_share_the_work_and_the_death_of_one_is_survived(target, prompts, responses, oracle, tmp_path):
    def after_the_others_death(number, prompt):
        while len(other.asked) < 6:
            time.sleep(0.01)

    with TargetServer(oracle, lambda number, prompt: reset if number >= 5 else None) as other:
        with TargetServer(oracle, after_the_others_death) as one:
            out = tmp_path / "r.jsonl"
            respond(target, prompts, out, servers=[one.url, other.url], **OPTIONS | {"concurrency": 2})
    assert len(other.asked) > 5 and len(one.asked) == 22
    assert by_id(tmp_path / "r.jsonl") == by_id(responses)


def test_a_prompt_that_is_refused_fails_alone_and_the_next_run_asks_for_it_again(target, prompts, oracle, tmp_path):
    out = tmp_path / "r.jsonl"
    bad = [prompt for prompt in read_lines(prompts) if prompt["id"] in ("p3", "talk/with.dots")]
    write_lines(tmp_path / "p.jsonl", bad + [{"id": "fine", "prompt": "Hello"}])

    def refuse(number, prompt):
        text = oracle.tokenizer.decode(prompt)
        return status(400) if "Say 3" in text or "Be short" in text else None

    with TargetServer(oracle, refuse) as server:
        with pytest.raises(UserError, match=r"3 of 4 responses failed.*status 400: told to fail.*asks again"):
            respond(target, tmp_path / "p.jsonl", out, servers=[server.url], **OPTIONS)
        assert len(server.asked) == 3  # a refusal is final, and the turn behind it is not asked for
    assert list(by_id(out)) == ["fine"]
    with TargetServer(oracle) as server:
        counts = respond(target, tmp_path / "p.jsonl", out, servers=[server.url], **OPTIONS)
    assert len(server.asked) == 3 and counts["lines"] == 4


def test_a_prompt_that_always_fails_is_given_up_alone(target, prompts, oracle, tmp_path):
    def poison(number, prompt):
        return status(500) if "Say 3" in oracle.tokenizer.decode(prompt) else None

    with TargetServer(oracle, poison) as server:
        with pytest.raises(UserError, match="1 of 27 responses failed, among them p3: status 500"):
            respond(target, prompts, tmp_path / "r.jsonl", servers=[server.url], **OPTIONS)
    assert len(server.asked) == 26 + fleet.ATTEMPTS and len(by_id(tmp_path / "r.jsonl")) == 26


def test_a_wrong_key_stops_at_once_and_the_right_one_is_sent(target, prompts, oracle, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with TargetServer(oracle, lambda number, prompt: status(401)) as server:
        with pytest.raises(UserError, match="no server answers.*status 401"):
            respond(target, prompts, tmp_path / "r.jsonl", servers=[server.url], **OPTIONS)
        assert len(server.asked) <= 4 and server.keys == {"Bearer secret"}


def test_a_server_that_answers_other_prompts_is_refused(target, prompts, oracle, tmp_path):
    with TargetServer(oracle, lambda number, prompt: change(prompt_token_ids=[1, *prompt])) as server:
        with pytest.raises(UserError, match="it changes prompts"):
            respond(target, prompts, tmp_path / "r.jsonl", servers=[server.url], **OPTIONS)


def test_servers_that_cannot_serve_are_refused_before_anything_is_written(target, prompts, oracle, tmp_path):
    out = tmp_path / "r.jsonl"
    with TargetServer(oracle) as server:
        pass
    with pytest.raises(UserError, match=rf"--server {server.url}: GET .*NewConnectionError.*start the server"):
        respond(target, prompts, out, servers=[server.url], **OPTIONS)
    with pytest.raises(UserError, match="node1:8000/v1 is no address"):
        respond(target, prompts, out, servers=["node1:8000/v1"], **OPTIONS)
    with TargetServer(oracle, models=[{"id": "one"}, {"id": "two"}]) as server:
        with pytest.raises(UserError, match="serves one, two; .* ends in tiny"):
            respond(target, prompts, out, servers=[server.url], **OPTIONS)
        with pytest.raises(UserError, match="status 404"):
            respond(target, prompts, out, servers=[server.url.removesuffix("/v1")], **OPTIONS)
        with pytest.raises(UserError, match="given twice"):
            respond(target, prompts, out, servers=[server.url, server.url + "/"], **OPTIONS)
    assert out.read_bytes() == b"" and not out.with_name("r.jsonl.meta.json").exists()


def test_of_several_models_the_one_named_like_the_target_is_asked(target, oracle, tmp_path):
    write_lines(tmp_path / "p.jsonl", [{"id": "a", "prompt": "Hello"}])
    with TargetServer(oracle, models=[{"id": "adapter"}, {"id": "chat", "root": "/models/tiny"}]) as server:
        respond(target, tmp_path / "p.jsonl", tmp_path / "r.jsonl", servers=[server.url], **OPTIONS)
    assert server.bodies[0]["model"] == "chat"


def test_prompts_that_do_not_fit_the_servers_context_are_dropped_and_counted(target, oracle, tmp_path):
    write_lines(tmp_path / "p.jsonl", [{"id": "a", "prompt": "short"}, {"id": "b", "turns": ["long " * 40, "more"]}])
    with TargetServer(oracle, context=60) as server, TargetServer(oracle) as other:
        urls = [server.url, other.url]
        counts = respond(target, tmp_path / "p.jsonl", tmp_path / "r.jsonl", servers=urls, **OPTIONS)
    assert counts["lines"] == 1 and counts["dropped: prompt and response exceed the context"] == 2


def test_requests_say_everything_that_a_server_would_otherwise_assume(target, prompts, oracle, tmp_path):
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "min_p": 0}
    with TargetServer(oracle) as server:
        respond(target, prompts, tmp_path / "r.jsonl", servers=[server.url], **OPTIONS)
    for body in server.bodies:
        wanted = neutral | {"temperature": 0, "top_p": 1, "top_k": -1, "max_tokens": 12, "stop_token_ids": [2, 247]}
        assert {name: body.get(name) for name in wanted} == wanted and "seed" not in body


@pytest.mark.parametrize("sglang", [False, True])
def test_sampling_asks_for_the_recommended_settings_with_a_seed_for_each_sample(
    prompts, oracle, tmp_path, target, sglang
):
    folder = shutil.copytree(target, tmp_path / "tiny")
    recommended = {"eos_token_id": [2, 247], "temperature": 0.6, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    with TargetServer(oracle, sglang=sglang) as server:
        out = tmp_path / "r.jsonl"
        respond(folder, prompts, out, servers=[server.url], sample=True, seed=5, **OPTIONS)
    assert read_meta(out)["sampling"] == {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "seed": 5}
    seeds = {}
    for body in server.bodies:
        said = body["sampling_params"] if sglang else body
        assert (said["temperature"], said["top_p"], said["top_k"]) == (0.6, 0.95, -1)
        prompt = body["input_ids"] if sglang else body["prompt"]
        seeds[tuple(prompt)] = said["sampling_seed" if sglang else "seed"]
    expected = {tuple(line["prompt_token_ids"]): sample_seed(5, line["id"]) for line in read_lines(out)}
    assert seeds == expected and len(set(seeds.values())) == 27


def test_interrupted_by_the_keyboard_it_exits_at_once_and_carries_on_later(
    target, prompts, responses, oracle, tmp_path
):
    out = tmp_path / "r.jsonl"
    command = [sys.executable, "-m", "data_prep", "respond", "--target", target, "--prompts", prompts, "--out", out]
    with TargetServer(oracle, lambda number, prompt: stall(300) if number >= 6 else None) as server:
        command += ["--server", server.url, "--max-new-tokens", "12", "--concurrency", "4"]
        process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            # whoever runs the tests in the background has SIGINT ignored, and processes inherit that
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        while len(server.asked) < 10 or len(out.read_bytes().splitlines()) < 6:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)  # far less than the answers would take
    assert process.returncode == 130 and "the same command carries on" in errors
    assert len(read_lines(out)) == 6
    with TargetServer(oracle) as server:
        assert respond(target, prompts, out, servers=[server.url], **OPTIONS)["generated"] == 21
    assert by_id(out) == by_id(responses)
