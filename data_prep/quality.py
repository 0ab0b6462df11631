"""What can be wrong with a response, told from its ids and text alone."""

PERIOD = 64  # tokens of the longest passage whose repetition counts as a loop
REPEATS = 3
TAIL = 48  # tokens that the repetitions have to cover: "-" 20 times or a short list is no loop


def flaws(response_token_ids: list[int], stop_ids: list[int], text: str) -> list[str]:
    """Those of "empty", "cut" and "looping" that hold, in this order.

    empty: nothing but blanks before the stop token; cut: no stop token at the end; looping: the ids (without the stop
    token) end in exact repetitions of one passage of at most PERIOD tokens, REPEATS times or more, over at least TAIL
    tokens (the last repetition may be cut short only where TAIL is what decides).
    """
    stopped = bool(response_token_ids) and response_token_ids[-1] in stop_ids
    found = [] if text.strip() else ["empty"]
    if not stopped:
        found.append("cut")
    if _loops(response_token_ids[:-1] if stopped else response_token_ids):
        found.append("looping")
    return found


def _loops(ids: list[int]) -> bool:
    for period in range(1, PERIOD + 1):
        tail = ids[-max(REPEATS * period, TAIL) :]
        if len(tail) >= max(REPEATS * period, TAIL) and tail[period:] == tail[:-period]:
            return True
    return False
