"""Sampled responses: the distribution of transformers' own processors, and the same ids in every batch."""

import json
import shutil

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from data_prep.errors import UserError
from data_prep.generate import generate
from data_prep.model import load_model
from data_prep.responses import read_meta, respond
from data_prep.sampling import Sampler, Sampling, probabilities, recommended_sampling, sample_seed

from .conftest import read_lines, write_lines

SETTINGS = [
    (1.0, 1.0, 0),
    (0.6, 0.95, 20),
    (0.7, 0.8, 0),
    (1.3, 1.0, 5),
    (0.6, 0.5, 300),
    (1.0, 0.01, 0),
    (1.0, 0.9, 1),
]


def expected_probabilities(logits, temperature, top_p, top_k):
    """What transformers samples from."""
    processors = LogitsProcessorList()
    if temperature != 1:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    return processors(torch.zeros(len(logits), 1, dtype=torch.long), logits.float()).softmax(-1)


@pytest.mark.parametrize("temperature, top_p, top_k", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_are_exactly_those_of_transformers(temperature, top_p, top_k, dtype):
    logits = (3 * torch.randn(40, 300, generator=torch.Generator().manual_seed(1))).to(dtype)
    got = probabilities(logits, Sampling(temperature, top_p, top_k, seed=0))
    expected = expected_probabilities(logits, temperature, top_p, top_k)
    if dtype == torch.bfloat16:  # equal logits: which of them is the last one inside top_p is nobody's promise
        got, expected = got.sort(-1).values, expected.sort(-1).values
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
    assert top_p == 1 or (got > 0).sum() < got.numel()


def test_the_order_of_the_rules_is_that_of_transformers_generate(target):
    model = load_model(target)
    config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95, top_k=20)
    names = [type(one).__name__ for one in model._get_logits_processor(config, input_ids_seq_length=1)]
    assert names == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]


def test_ids_are_drawn_in_proportion_to_their_probability():
    logits = torch.tensor([[2.0, 0.0, 1.0, -torch.inf, 1.5]])
    sampling = Sampling(0.8, 0.95, 4, seed=3)
    count = 20_000
    drawn = Sampler(sampling, [f"s{i}" for i in range(count)], 1)(logits.expand(count, -1), list(range(count)), 0)
    share = torch.bincount(drawn, minlength=5) / count
    expected = probabilities(logits, sampling)[0]
    assert (share[expected == 0] == 0).all() and expected.count_nonzero() == 3
    assert (share - expected).abs().max() < 4 * 0.5 / count**0.5


def test_the_border_cases_of_the_uniform_number_give_possible_ids():
    sampler = Sampler(Sampling(1.0, 1.0, 3, seed=0), ["a", "b"], 1)
    sampler.uniform = torch.tensor([[0.0], [1 - 2.0**-53]], dtype=torch.float64)
    logits = torch.tensor([[-9.0, 1.0, 2.0, 3.0, -9.0]]).expand(2, -1)
    assert sampler(logits, [0, 1], 0).tolist() == [1, 3]


def test_a_sample_gets_the_same_ids_in_every_batch_and_others_with_another_seed_or_name(target):
    model = load_model(target)
    prompts = [[1, 5, 9, 20 + i] + [30 + i] * (i % 4) for i in range(9)]
    names = [f"n{i}" for i in range(9)]
    sampling = Sampling(1.0, 0.95, 50, seed=7)

    def sampled(indices, sampling=sampling, names=names):
        chosen = [names[i] for i in indices]
        return generate(model, [prompts[i] for i in indices], 10, [2], choose=Sampler(sampling, chosen, 10))

    together = sampled(range(9))
    assert [sampled([i])[0] for i in range(9)] == together
    assert sampled([5, 2, 8]) == [together[5], together[2], together[8]]
    assert sampled(range(9), Sampling(1.0, 0.95, 50, seed=8)) != together
    assert sampled(range(9), names=[f"m{i}" for i in range(9)]) != together
    assert len({sample_seed(7, name) for name in names} | {sample_seed(8, name) for name in names}) == 18


def with_settings(target, **settings):
    (target / "generation_config.json").write_text(json.dumps(settings))
    return target


def test_settings_that_the_model_does_not_name_are_off_and_what_is_not_applied_is_said(tmp_path, capsys):
    with_settings(tmp_path, temperature=0.7, repetition_penalty=1.05, min_p=None, top_p=None)
    assert recommended_sampling(tmp_path, 3) == Sampling(0.7, 1.0, 0, 3)
    out = capsys.readouterr().out
    assert "temperature 0.7, top_p 1.0, top_k 0, seed 3" in out and "repetition_penalty 1.05: not applied" in out
    assert recommended_sampling(with_settings(tmp_path, temperature=0.6, top_p=0.95, top_k=20), 0).top_k == 20


@pytest.mark.parametrize("settings", [{"eos_token_id": 2}, {"temperature": 0.0}, {"top_p": 1.5}, {"top_k": -2}])
def test_a_model_without_usable_recommended_settings_is_refused(tmp_path, settings):
    with pytest.raises(UserError, match="generation_config.json.*leave out --sample"):
        recommended_sampling(with_settings(tmp_path, **settings), 0)


def test_sampled_responses_are_the_same_in_every_run_and_record_their_settings(target, tmp_path):

    folder = with_settings(shutil.copytree(target, tmp_path / "t"), eos_token_id=2, temperature=1.2, top_k=40)
    write_lines(tmp_path / "p.jsonl", [{"id": f"p{i}", "prompt": f"Say {i}"} for i in range(6)])
    found = []
    for batch_size in (6, 2):
        out = tmp_path / f"{batch_size}.jsonl"
        respond(folder, tmp_path / "p.jsonl", out, max_new_tokens=8, batch_size=batch_size, sample=True, seed=4)
        assert read_meta(out)["sampling"] == {"temperature": 1.2, "top_p": 1.0, "top_k": 40, "seed": 4}
        found.append({line["id"]: line["response_token_ids"] for line in read_lines(out)})
    assert found[0] == found[1]
    with pytest.raises(UserError, match="sampling.*have.*4.*expected.*5"):
        respond(folder, tmp_path / "p.jsonl", out, max_new_tokens=8, batch_size=2, sample=True, seed=5)
