"""Intervals over prompts: against a plain loop, against theory, and paired."""

import random

import numpy as np
import pytest

from pipeline.bootstrap import RESAMPLES, mean_of_prompts_interval, tau_difference, tau_interval


def runs(prompts: int, seed: int, top: int = 4) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(top) for _ in range(draw.randrange(5, 15))] for _ in range(prompts)]


def test_the_interval_is_that_of_a_plain_loop_over_resampled_prompts():
    prompts, draw = runs(20, seed=1), random.Random(2)
    taus = []
    for _ in range(RESAMPLES):
        chosen = [draw.choice(prompts) for _ in prompts]
        taus.append(sum(sum(run) + len(run) for run in chosen) / sum(map(len, chosen)))
    assert tau_interval(prompts) == pytest.approx(np.percentile(taus, (2.5, 97.5)), abs=0.01)


def test_the_interval_of_the_mean_is_the_normal_one_for_many_prompts():
    prompts = runs(400, seed=3)
    taus = np.array([np.mean(run) + 1 for run in prompts])
    spread = 1.96 * taus.std() / np.sqrt(len(taus))
    low, high = mean_of_prompts_interval(prompts)
    assert (low, high) == pytest.approx((taus.mean() - spread, taus.mean() + spread), abs=0.006)


def test_a_paired_difference_is_surer_than_two_intervals():
    one = [[base] * 10 for base in (0, 1, 2, 3, 4, 5) * 4]
    other = [[a + (i % 5 == 0) for i, a in enumerate(run)] for run in one]
    difference, (low, high) = tau_difference(one, other)
    assert difference == pytest.approx(0.2) and (low, high) == pytest.approx((0.2, 0.2))
    first, second = tau_interval(one), tau_interval(other)
    assert first.high > second.low  # unpaired, the same two would not be told apart


def test_nothing_is_said_of_fewer_than_two_prompts_with_steps():
    assert tau_interval([[1, 2], []]) is None and mean_of_prompts_interval([]) is None
    assert tau_difference([[1], [2]], [[1], []]) is None


def test_other_prompts_cannot_be_paired():
    with pytest.raises(ValueError):
        tau_difference([[1], [2]], [[1]])
