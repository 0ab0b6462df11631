import pytest

from pipeline import acceptance

RUNS = [3, 2, 1, 0]  # leading-correct runs of four steps, three drafted tokens each
BATCHINGS = [[RUNS], [[3, 2], [1, 0]], [[3], [2], [1], [0]], [[0, 3, 1], [2]], [[3, 2, 1, 0], []]]


@pytest.mark.parametrize("prompts", BATCHINGS)
def test_runs_3_2_1_0_emit_two_and_a_half_tokens_a_step_in_any_batching(prompts):
    tau = acceptance.tau_pooled(prompts)
    assert (tau.numerator, tau.denominator) == (10, 4)
    assert tau.value == 2.5
    assert tau.value - 1 == 1.5


def test_multiplying_marginals_gives_the_known_wrong_answers():
    """1.219 for all steps at once, 1.25 when batches of two are averaged: neither may be what is reported."""

    def product_of_marginals(runs):
        total, product = 0.0, 1.0
        for slot in (1, 2, 3):
            product *= sum(run >= slot for run in runs) / len(runs)
            total += product
        return total

    assert product_of_marginals(RUNS) == pytest.approx(1.219, abs=1e-3)
    assert (product_of_marginals([3, 1]) + product_of_marginals([2, 0])) / 2 == 1.25
    assert acceptance.tau_pooled([[3, 1], [2, 0]]).value - 1 == 1.5


def test_mean_of_prompts_weighs_prompts_and_pooled_weighs_steps():
    prompts = [[7], [0, 0, 0]]
    assert acceptance.tau_mean_of_prompts(prompts) == 4.5
    assert acceptance.tau_pooled(prompts).value == 11 / 4


def test_prompts_without_a_step_are_left_out_of_the_mean():
    assert acceptance.tau_mean_of_prompts([[1], []]) == 2.0


def test_slots_are_cumulative_and_sum_to_tau_minus_one():
    slots = acceptance.accepted_per_slot([RUNS], block_size=4)
    assert [(r.numerator, r.denominator) for r in slots] == [(3, 4), (2, 4), (1, 4)]
    assert sum(r.value for r in slots) == 1.5


def test_conditional_slots_are_given_the_slot_before():
    slots = acceptance.accepted_per_slot_conditional([RUNS], block_size=4)
    assert [(r.numerator, r.denominator) for r in slots] == [(3, 4), (2, 3), (1, 2)]


def test_a_slot_that_was_never_reached_has_no_conditional_value():
    slots = acceptance.accepted_per_slot_conditional([[0, 0]], block_size=3)
    assert [r.value for r in slots] == [0.0, None]


def test_histogram_counts_every_step_once():
    assert acceptance.accepted_histogram([[3, 0], [0, 1]], block_size=4) == [2, 1, 0, 1]


def test_nothing_counted_is_undefined_not_zero():
    assert acceptance.tau_pooled([]).value is None
    assert acceptance.tau_mean_of_prompts([[]]) is None
