"""The credits that ask which slots are right, against a slot-by-slot oracle, and what they are divided by."""

import itertools
import math

import pytest
import torch

from pipeline.credit import DECAY_GAMMA, STATIC_KINDS, credit_weights
from pipeline.normalisation import denominator

# Every pattern of 4 slots: which are right, and where the block's supervision ends.
CASES = [(correct, end) for correct in itertools.product([True, False], repeat=4) for end in range(5)]


def weights_of(kind, correct, end, **options):
    mask = torch.arange(4) < end
    correct = torch.tensor(correct)
    return credit_weights(kind, torch.rand(4, dtype=torch.float64), mask, correct=correct & mask, **options).tolist()


@pytest.mark.parametrize("correct,end", CASES)
def test_the_accepted_prefix_ends_with_the_first_wrong_slot_or_the_supervision(correct, end):
    expected, accepted = [], True
    for slot in range(4):
        expected.append(float(accepted and slot < end))
        accepted = accepted and correct[slot]
    assert weights_of("accepted_prefix", correct, end) == expected


@pytest.mark.parametrize("correct,end", CASES)
def test_the_reanchored_decay_is_1_up_to_the_first_wrong_slot_and_decays_from_there(correct, end):
    first = next((slot for slot in range(4) if not correct[slot]), 4)
    expected = [(1.0 if slot <= first else math.exp(-(slot - first) / 3.0)) * (slot < end) for slot in range(4)]
    assert weights_of("reanchored_decay", correct, end, gamma=3.0) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("block", DECAY_GAMMA)
def test_where_the_first_slot_is_wrong_the_reanchored_decay_is_dflashs_decay(block):
    nll, mask = torch.rand(1, block - 1), torch.ones(1, block - 1, dtype=torch.bool)
    wrong = torch.zeros_like(mask)
    assert torch.equal(credit_weights("reanchored_decay", nll, mask, correct=wrong), credit_weights("decay", nll, mask))


@pytest.mark.parametrize("kind", ["accepted_prefix", "reanchored_decay"])
def test_credits_that_depend_on_the_drafter_divide_by_the_valid_anchors(kind):
    mask = torch.tensor([[True, True, False], [True, False, False], [False, True, True]])
    assert kind not in STATIC_KINDS and denominator("global", kind, mask, sequences=7, gamma=2.0).item() == 2.0


@pytest.mark.parametrize("kind", ["accepted_prefix", "reanchored_decay"])
def test_a_credit_that_needs_to_know_which_slots_are_right_refuses_to_guess(kind):
    with pytest.raises(ValueError, match="pass `correct`"):
        credit_weights(kind, torch.rand(1, 7), torch.ones(1, 7, dtype=torch.bool))
