"""Acceptance metrics from the counts of accepted tokens per verification step. Plain functions, no tensors.

A run of accepted counts is what one prompt's verification steps gave: `[3, 0, 7]` means three steps that accepted 3, 0
and 7 drafted tokens and emitted 4, 1 and 8 (the target adds one token of its own to each). Everything here counts
leading-correct runs of real steps; products of per-slot marginals or of batch means would be other numbers. Ratios are
kept as numerator and denominator until they are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Ratio(NamedTuple):
    """numerator / denominator, undefined (None) while nothing was counted."""

    numerator: int
    denominator: int

    @property
    def value(self) -> float | None:
        return self.numerator / self.denominator if self.denominator else None


def emitted_tokens(accepted: Sequence[int]) -> Ratio:
    """Tokens emitted (accepted + 1 each) over verification steps: tau of one run of steps."""
    return Ratio(sum(accepted) + len(accepted), len(accepted))


def tau_pooled(accepted_per_prompt: Sequence[Sequence[int]]) -> Ratio:
    """All emitted tokens over all verification steps: every step counts once."""
    return emitted_tokens([a for run in accepted_per_prompt for a in run])


def tau_mean_of_prompts(accepted_per_prompt: Sequence[Sequence[int]]) -> float | None:
    """Mean over prompts of each prompt's own tau; prompts that needed no verification step are left out."""
    taus = [emitted_tokens(run).value for run in accepted_per_prompt if run]
    return sum(taus) / len(taus) if taus else None


def accepted_per_slot(accepted_per_prompt: Sequence[Sequence[int]], block_size: int) -> list[Ratio]:
    """For slots 1..block_size-1: steps that accepted this slot (hence all before it) over all steps.

    Cumulative, so it never rises from slot to slot, and its sum is tau - 1.
    """
    counts = [a for run in accepted_per_prompt for a in run]
    return [Ratio(sum(a >= slot for a in counts), len(counts)) for slot in range(1, block_size)]


def accepted_per_slot_conditional(accepted_per_prompt: Sequence[Sequence[int]], block_size: int) -> list[Ratio]:
    """For slots 1..block_size-1: steps that accepted this slot over steps that accepted the slot before it."""
    cumulative = accepted_per_slot(accepted_per_prompt, block_size)
    reached = [sum(len(run) for run in accepted_per_prompt), *(ratio.numerator for ratio in cumulative)]
    return [Ratio(ratio.numerator, before) for ratio, before in zip(cumulative, reached)]


def accepted_histogram(accepted_per_prompt: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """Number of steps that accepted exactly 0, 1, ..., block_size-1 tokens."""
    counts = [a for run in accepted_per_prompt for a in run]
    return [counts.count(n) for n in range(block_size)]
