"""How sure an accepted length is: percentile intervals of the bootstrap over prompts (Efron and Tibshirani, 1993).

Steps of one prompt are alike, so whole prompts are drawn, not steps. P prompts, R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95


class Interval(NamedTuple):
    """The central `LEVEL` of what resampled prompts give."""

    low: float
    high: float


def _draws(prompts: int) -> np.ndarray:
    """How often each prompt is drawn, int [R, P]; always the same ones, so that reports can be compared."""
    return np.random.default_rng(0).multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)


def _percentiles(values_R: np.ndarray) -> Interval:
    tail = 100 * (1 - LEVEL) / 2
    return Interval(*(float(v) for v in np.percentile(values_R, (tail, 100 - tail))))


def _counts(accepted_per_prompt: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Emitted tokens and steps of each prompt, float [P] each."""
    steps = np.array([len(run) for run in accepted_per_prompt], dtype=float)
    return np.array([sum(run) for run in accepted_per_prompt], dtype=float) + steps, steps


def tau_interval(accepted_per_prompt: Sequence[Sequence[int]]) -> Interval | None:
    """Interval of the pooled tau; None for fewer than two prompts with steps."""
    runs = [run for run in accepted_per_prompt if run]
    if len(runs) < 2:
        return None
    emitted, steps = _counts(runs)
    draws_RP = _draws(len(runs))
    return _percentiles(draws_RP @ emitted / (draws_RP @ steps))


def mean_of_prompts_interval(accepted_per_prompt: Sequence[Sequence[int]]) -> Interval | None:
    """Interval of the mean over prompts of their own tau; None for fewer than two prompts with steps."""
    runs = [run for run in accepted_per_prompt if run]
    if len(runs) < 2:
        return None
    emitted, steps = _counts(runs)
    return _percentiles(_draws(len(runs)) @ (emitted / steps) / len(runs))


def tau_difference(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> tuple[float, Interval] | None:
    """Pooled tau of `other` minus that of `one` on the same prompts, and its interval: both are drawn together.

    None for fewer than two prompts with steps in both. ValueError when the numbers of prompts differ.
    """
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a and b]
    if len(pairs) < 2:
        return None
    (emitted_a, steps_a), (emitted_b, steps_b) = (_counts(runs) for runs in zip(*pairs))
    draws_RP = _draws(len(pairs))
    differences = draws_RP @ emitted_b / (draws_RP @ steps_b) - draws_RP @ emitted_a / (draws_RP @ steps_a)
    return float(emitted_b.sum() / steps_b.sum() - emitted_a.sum() / steps_a.sum()), _percentiles(differences)


# Runs of one cell with several seeds on the same prompts: [seed][prompt][step] accepted tokens.
SeededRuns = Sequence[Sequence[Sequence[int]]]


def _mean_of_seeds(draws_RP: np.ndarray, runs: SeededRuns) -> np.ndarray:
    """Pooled tau of each resample, averaged over the seeds, float [R]."""
    taus = []
    for one in runs:
        emitted, steps = _counts(one)
        taus.append(draws_RP @ emitted / (draws_RP @ steps))
    return np.mean(taus, axis=0)


def seeds_interval(runs: SeededRuns) -> tuple[float, Interval]:
    """Pooled tau averaged over seeds, and its interval over prompts: the seeds are those that were run, only prompts
    are drawn."""
    prompts = len(runs[0])
    return float(_mean_of_seeds(np.ones((1, prompts)), runs)[0]), _percentiles(_mean_of_seeds(_draws(prompts), runs))


def seeds_difference(one: SeededRuns, other: SeededRuns) -> tuple[float, Interval]:
    """That of `other` minus that of `one`, both on the same drawn prompts."""
    prompts = len(one[0])
    whole, draws_RP = np.ones((1, prompts)), _draws(prompts)
    found = float(_mean_of_seeds(whole, other)[0] - _mean_of_seeds(whole, one)[0])
    return found, _percentiles(_mean_of_seeds(draws_RP, other) - _mean_of_seeds(draws_RP, one))
