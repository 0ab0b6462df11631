import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from data_prep.errors import UserError
from pipeline import acceptance
from pipeline.drafter import DFlashDrafter
from pipeline.speculate import accept_greedy, accept_sampled, check_drafter_fits, generate_drafted, generate_plain

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FAMILIES = ["qwen3", "llama"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request):
    folder = GOLDEN / request.param
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    drafter = DFlashDrafter.from_pretrained(folder / "drafter")
    return target, drafter, json.loads((folder / "generate.json").read_text())


def tiny_target(vocab_size, seed=0, **overrides):
    """A random 4-layer target whose hidden size exceeds the vocabulary, so any logits can be produced by its head."""
    torch.manual_seed(seed)
    config = Qwen3Config(**{
        "vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **overrides,
    })
    return Qwen3ForCausalLM(config).eval()


class ScriptedDrafter:
    """The drafter API over a function `logits(position) -> [V]`: the hidden states are those whose head gives them."""

    def __init__(self, target, block_size, logits):
        self.config = SimpleNamespace(block_size=block_size, mask_token_id=0, target_layer_ids=[1, 2])
        self.inverse_head = torch.linalg.pinv(target.lm_head.weight.detach())
        self.logits = logits

    def new_cache(self):
        return SimpleNamespace(length=0)

    def extend(self, cache, features_1TE):
        assert features_1TE.shape[-1] == 2 * 64
        cache.length += features_1TE.shape[1]

    def draft(self, cache, noise_1KD):
        slots = [self.logits(cache.length + k) for k in range(noise_1KD.shape[1])]
        return (torch.stack(slots) @ self.inverse_head.T)[None]


def knowing_drafter(target, prompt, block_size, new_tokens, offset):
    """Drafts the target's greedy continuation shifted by `offset` token ids: 0 is the oracle, 1 is never right."""
    vocab = target.config.vocab_size
    text = prompt + generate_plain(target, prompt, new_tokens + block_size).output_ids

    def logits(position):
        token = (text[position] + offset) % vocab if position < len(text) else 0
        return torch.nn.functional.one_hot(torch.tensor(token), vocab).float()

    return ScriptedDrafter(target, block_size, logits)


def accepted(generation):
    return [step.accepted for step in generation.steps]


# --- greedy -----------------------------------------------------------------------------------------------------


def test_golden_generations_are_reproduced_with_their_emitted_tokens_per_step(golden):
    target, drafter, cases = golden
    assert len(cases) == 6
    for case in cases:
        response = case["output_ids"][len(case["prompt"]) :]
        got = generate_drafted(target, drafter, case["prompt"], len(response))
        assert got.output_ids == response
        expected = case["accepted_per_step"]  # counts emitted tokens: accepted + 1
        if 1 + sum(expected[:-1]) >= len(response):
            expected = expected[:-1]  # the public code runs one step more although the limit is already reached
        assert [a + 1 for a in accepted(got)] == expected


def test_greedy_output_is_the_targets_own_and_that_of_transformers_generate(golden):
    target, drafter, cases = golden
    for case in cases[:2]:
        plain = generate_plain(target, case["prompt"], 40)
        reference = target.generate(torch.tensor([case["prompt"]]), max_new_tokens=40, do_sample=False)
        assert plain.output_ids == reference[0, len(case["prompt"]) :].tolist()
        assert generate_drafted(target, drafter, case["prompt"], 40).output_ids == plain.output_ids
        assert accepted(plain) == [0] * 39


@pytest.mark.parametrize("offset, tau", [(0, 6.0), (1, 1.0)])
def test_oracle_emits_whole_blocks_and_a_never_right_drafter_one_token_a_step(offset, tau):
    target, prompt = tiny_target(vocab_size=40), [3, 14, 15, 9]
    drafter = knowing_drafter(target, prompt, block_size=6, new_tokens=30, offset=offset)
    got = generate_drafted(target, drafter, prompt, 30)
    assert acceptance.tau_pooled([accepted(got)]).value == tau
    assert all(step.drafted == 5 for step in got.steps)
    assert got.output_ids == generate_plain(target, prompt, 30).output_ids


@pytest.mark.parametrize("offset", [0, 1])
def test_a_sliding_window_target_is_rolled_back_exactly(offset):
    target = tiny_target(vocab_size=40, use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert "sliding_attention" in target.config.layer_types
    prompt = list(range(12))
    drafter = knowing_drafter(target, prompt, block_size=4, new_tokens=24, offset=offset)
    reference = target.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, 12:].tolist()
    assert generate_drafted(target, drafter, prompt, 24).output_ids == reference


def test_the_context_is_every_committed_position_before_the_block(golden):
    """The drafter sees exactly the states that hidden_states[id + 1] of one uncached forward holds."""
    target, drafter, cases = golden
    prompt, seen = cases[0]["prompt"], []

    class Recorder:
        config = drafter.config
        new_cache, draft = drafter.new_cache, drafter.draft

        def extend(self, cache, features_1TE):
            seen.append(features_1TE)
            drafter.extend(cache, features_1TE)

    got = generate_drafted(target, Recorder(), prompt, 20)
    features = torch.cat(seen, dim=1)
    committed = len(prompt) + sum(a + 1 for a in accepted(got))
    assert features.shape[1] == committed
    text = torch.tensor([(prompt + got.output_ids)[:committed]])
    with torch.inference_mode():
        hidden = target(text, output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    torch.testing.assert_close(features[:, : text.shape[1]], expected, atol=1e-4, rtol=1e-4)


def test_output_ends_with_the_stop_token_even_inside_an_accepted_block(golden):
    target, drafter, cases = golden
    prompt = cases[1]["prompt"]
    response = cases[1]["output_ids"][len(prompt) :]
    stop = response[4]  # the first step emits seven tokens, of which this is in the middle
    got = generate_drafted(target, drafter, prompt, 40, stop_token_ids={stop})
    assert got.output_ids == response[: response.index(stop) + 1]
    assert got.output_ids == generate_plain(target, prompt, 40, stop_token_ids={stop}).output_ids
    assert len(got.steps) == 1


def test_every_length_limit_is_met_exactly(golden):
    target, drafter, cases = golden
    prompt = cases[0]["prompt"]
    response = cases[0]["output_ids"][len(prompt) :]
    for limit in range(1, 14):
        assert generate_drafted(target, drafter, prompt, limit).output_ids == response[:limit]


def test_nothing_is_left_over_from_the_previous_prompt(golden):
    target, drafter, cases = golden
    prompts = [cases[5]["prompt"], cases[0]["prompt"][:5], cases[0]["prompt"][:1], cases[5]["prompt"]]
    hooks = [len(layer._forward_hooks) for layer in target.model.layers]
    runs = [generate_drafted(target, drafter, prompt, 12) for prompt in prompts]
    for prompt, run in zip(prompts, runs):
        fresh = generate_drafted(target, drafter, prompt, 12)
        assert (fresh.output_ids, fresh.steps) == (run.output_ids, run.steps)
        assert run.output_ids == generate_plain(target, prompt, 12).output_ids
        assert len(run.steps) > 0
    assert [len(layer._forward_hooks) for layer in target.model.layers] == hooks


def test_one_new_token_needs_no_verification(golden):
    target, drafter, cases = golden
    got = generate_drafted(target, drafter, cases[0]["prompt"], 1)
    assert (len(got.output_ids), got.steps) == (1, [])


def test_greedy_acceptance_stops_at_the_first_difference():
    logits = torch.eye(8)[[5, 6, 7, 1]]
    assert accept_greedy([5, 6, 7], logits) == (3, 1)
    assert accept_greedy([5, 0, 7], logits) == (1, 6)
    assert accept_greedy([], logits[:1]) == (0, 5)


# --- sampled ----------------------------------------------------------------------------------------------------


def assert_follows(counts, probabilities):
    """Pearson's chi-square below its mean plus five standard deviations (p about 1e-5; draws are seeded)."""
    expected = probabilities * counts.sum()
    keep = expected > 5
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum().item()
    freedom = int(keep.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, (statistic, freedom)


def test_rejection_sampling_emits_the_targets_distribution_and_not_the_drafters():
    """Joint distribution of the two tokens that a one-token draft leads to, where p and q differ widely."""
    generator = torch.Generator().manual_seed(1)
    p, q = torch.softmax(torch.randn(2, 6, generator=generator) * 2, dim=-1), torch.full((1, 6), 1 / 6)
    counts = torch.zeros(6)
    for token in torch.multinomial(q[0], 10_000, replacement=True, generator=generator).tolist():
        number, following = accept_sampled([token], q, p, generator)
        counts[token if number else following] += 1
    assert_follows(counts, p[0])
    with pytest.raises(AssertionError):
        assert_follows(counts, q[0])


def test_equal_distributions_accept_everything():
    generator = torch.Generator().manual_seed(2)
    p = torch.softmax(torch.randn(4, 6, generator=generator), dim=-1)
    for _ in range(200):
        drafted = torch.multinomial(p[:3], 1, generator=generator)[:, 0].tolist()
        assert accept_sampled(drafted, p[:3], p, generator)[0] == 3


def test_sampled_generations_follow_the_targets_distribution():
    """Chi-square of all three-token outputs of a 5-token vocabulary against their exact probabilities."""
    target, prompt, temperature = tiny_target(vocab_size=5, seed=3, num_hidden_layers=3), [1, 4], 1.5
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(4))
    drafter = ScriptedDrafter(target, 3, lambda position: table[position % 5])
    outputs = torch.cartesian_prod(*[torch.arange(5)] * 3)
    with torch.inference_mode():
        texts = torch.cat([torch.tensor(prompt).expand(125, 2), outputs], dim=1)
        log_probs = torch.log_softmax(target(texts).logits[:, 1:4] / temperature, dim=-1)
    probabilities = log_probs.gather(-1, outputs[..., None]).sum(dim=(1, 2)).exp()

    generator = torch.Generator().manual_seed(5)
    counts, emitted = torch.zeros(125), []
    for _ in range(700):
        got = generate_drafted(target, drafter, prompt, 3, temperature=temperature, generator=generator)
        a, b, c = got.output_ids
        counts[25 * a + 5 * b + c] += 1
        emitted += accepted(got)
    assert 0 < sum(emitted) < 2 * len(emitted)  # both acceptance and rejection took part
    assert_follows(counts, probabilities)


def test_sampling_is_a_function_of_the_generators_seed(golden):
    target, drafter, cases = golden

    prompt = cases[0]["prompt"]

    def sample(seed):
        generator = torch.Generator().manual_seed(seed)
        return generate_drafted(target, drafter, prompt, 20, temperature=4.0, generator=generator).output_ids

    assert sample(1) == sample(1)
    assert len({tuple(sample(seed)) for seed in range(4)}) > 1


# --- what is refused ----------------------------------------------------------------------------------------------


def test_empty_prompts_and_limits_below_one_are_refused(golden):
    target, drafter, _ = golden
    with pytest.raises(UserError, match="0 tokens"):
        generate_drafted(target, drafter, [], 4)
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        generate_plain(target, [1], 0)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_target_layers"])
def test_a_drafter_of_another_target_is_refused_with_both_values(golden, field):
    target, drafter, _ = golden
    config = target.config.to_dict()
    check_drafter_fits(drafter.config, config)
    wrong = SimpleNamespace(**{**vars(drafter.config), field: 77})
    with pytest.raises(UserError, match=rf"{field} is 77, the target has \d+"):
        check_drafter_fits(wrong, config)
