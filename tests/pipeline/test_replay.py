"""The steps read off the target's own text are those that the drafting loop takes."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline import replay as module
from pipeline.drafter import DFlashDrafter
from pipeline.replay import Responder, replay
from pipeline.speculate import generate_drafted, generate_plain

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def golden(request):
    torch.set_num_threads(1)
    folder = GOLDEN / request.param
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    prompts = [case["prompt"] for case in json.loads((folder / "generate.json").read_text())]
    return target, DFlashDrafter.from_pretrained(folder / "drafter"), [*prompts, prompts[0][:1], prompts[1][:3]]


def replayed(target, drafter, prompts, limit, stops=()):
    responder = Responder(target, limit, stops)
    texts = responder.texts(prompts, drafter.config.target_layer_ids, drafter.config.block_size)
    return texts, [replay(target, drafter, text) for text in texts]


@pytest.mark.parametrize("limit", [1, 2, 40])
def test_steps_and_outputs_are_the_loops_also_behind_the_length_limit(golden, limit, monkeypatch):
    target, drafter, prompts = golden
    monkeypatch.setattr(module, "CHUNK_BYTES", 11 * 4 * drafter.config.vocab_size * (drafter.config.block_size - 1))
    texts, got = replayed(target, drafter, prompts, limit)
    for prompt, text, ours in zip(prompts, texts, got):
        loop = generate_drafted(target, drafter, prompt, limit)
        assert (ours.output_ids, ours.steps) == (loop.output_ids, loop.steps)
        plain = generate_plain(target, prompt, limit)
        assert (text.plain.output_ids, text.plain.steps) == (plain.output_ids, plain.steps)
    assert limit < 40 or max(step.accepted for run in got for step in run.steps) >= 4


def test_a_stop_token_ends_the_steps_where_the_loop_ends_them(golden):
    target, drafter, prompts = golden
    stop = generate_plain(target, prompts[1], 9).output_ids[5]
    _, got = replayed(target, drafter, prompts, 30, {stop})
    loops = [generate_drafted(target, drafter, prompt, 30, {stop}) for prompt in prompts]
    assert [(run.output_ids, run.steps) for run in got] == [(run.output_ids, run.steps) for run in loops]
    assert len({len(run.output_ids) for run in got}) > 1


def test_a_text_is_generated_once_however_many_drafters_are_judged_on_it(golden, monkeypatch):
    target, drafter, prompts = golden
    calls, generate = [], module.generate
    monkeypatch.setattr(module, "generate", lambda *args: calls.append(len(args[1])) or generate(*args))
    responder = Responder(target, 10, ())
    for block_size in (8, 4, 9):
        texts = responder.texts([*prompts[:3], prompts[0]], drafter.config.target_layer_ids, block_size)
        assert [len(text.ids) - text.prompt for text in texts] == [9 + block_size] * 4
    assert calls == [3, 3]  # a longer block looks further


@pytest.mark.parametrize(("room", "passes"), [(0, [2, 2, 2]), (1, [2, 1, 1]), (2, [2])])
def test_the_states_over_a_text_are_kept_as_far_as_there_is_room(golden, monkeypatch, room, passes):
    target, drafter, prompts = golden
    prompts, layer_ids = [prompts[0], prompts[0][:-1]], drafter.config.target_layer_ids
    one = len(layer_ids) * (len(prompts[0]) + 10) * target.config.hidden_size * 4
    monkeypatch.setattr(module, "KEPT_BYTES", room * one)
    responder = Responder(target, 10, ())
    responder._behind([tuple(prompt) for prompt in prompts], 17)  # the passes below are for the states alone
    rows = []
    hook = target.get_decoder().register_forward_pre_hook(
        lambda _module, _args, options: rows.append(len(options["input_ids"])), with_kwargs=True
    )
    with torch.no_grad():
        steps = [
            [replay(target, drafter, text).steps for text in responder.texts(prompts, layer_ids, 8)] for _ in range(3)
        ]
    hook.remove()
    assert rows == passes
    assert steps == [[generate_drafted(target, drafter, prompt, 10).steps for prompt in prompts]] * 3
