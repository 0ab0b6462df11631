"""Empty, cut-off and looping responses are told from whole ones."""

import pytest

from data_prep.quality import flaws

STOP = 2
PASSAGE = list(range(100, 164))  # 64 different tokens


def test_a_whole_answer_has_no_flaw():
    assert flaws([5, 6, 7, STOP], [STOP, 9], "fine") == []


def test_an_answer_of_blanks_is_empty_and_one_without_a_stop_token_is_cut():
    assert flaws([STOP], [STOP], "") == flaws([8, STOP], [STOP], " \n") == ["empty"]
    assert flaws([5, 6], [STOP], "fine") == ["cut"]
    assert flaws([], [STOP], "") == ["empty", "cut"]


@pytest.mark.parametrize("period", [1, 2, 5, 16, 17, 48, 64])
@pytest.mark.parametrize("end", [[], [STOP]])
def test_three_repetitions_over_48_tokens_are_a_loop_and_one_token_less_is_not(period, end):
    length = max(3 * period, 48)
    loop = (PASSAGE[:period] * 48)[:length]
    start = [PASSAGE[period - 1] + 1000]  # breaks the period in front of the tail
    assert "looping" in flaws(start + loop + end, [STOP], "x")
    assert "looping" not in flaws(start + loop[1:] + end, [STOP], "x")


def test_a_longer_period_and_a_loop_that_the_answer_left_are_no_loops():
    assert "looping" not in flaws((PASSAGE + [7]) * 4, [STOP], "x")
    assert "looping" not in flaws([5] * 100 + [6, STOP], [STOP], "x")
