"""Responses from servers of the target: conversations side by side, turns in order, lines as they finish."""

import sys

from transformers import PreTrainedTokenizerBase

from .conversations import Conversation, Serving, Turn
from .fleet import Fleet, Request
from .response_file import CONTEXT, ResponseFile
from .sampling import sample_seed
from .servers import Reply


def response_ids(tokenizer: PreTrainedTokenizerBase, reply: Reply, stop_ids: list[int]) -> list[int]:
    """The ids of a reply; those of a text end with the stop token that the server named, else with the end-of-turn
    token.
    """
    if reply.ids is not None:
        return reply.ids
    ids = tokenizer(reply.text, add_special_tokens=False)["input_ids"]
    end = next((i for i, token in enumerate(ids) if token in stop_ids), None)
    if end is not None:
        return ids[: end + 1]
    usual = tokenizer.eos_token_id if tokenizer.eos_token_id in stop_ids else stop_ids[0]
    return [*ids, usual if reply.stop is None else reply.stop] if reply.stopped else ids


class _Run:
    """The state of `answer_remotely`."""

    def __init__(self, file: ResponseFile, serving: Serving, fleet: Fleet, max_new_tokens: int, seed: int):
        self.file, self.serving, self.fleet = file, serving, fleet
        self.max_new_tokens, self.seed = max_new_tokens, seed
        self.open = 0
        self.failures: list[str] = []

    def ask(self, talk: Conversation, number: int) -> None:
        """Submit the conversation's next turn from `number` on that the file does not hold."""
        for turn_number in range(number, len(talk.places)):
            turn = self.serving.turn(talk, turn_number)
            text = self.file.kept(turn)
            if text is None:
                if len(turn.prompt) + self.max_new_tokens > self.serving.context:
                    self.file.skip(CONTEXT, len(talk.places) - turn_number)
                    return
                self.fleet.submit(Request(turn, sample_seed(self.seed, turn.name)))
                self.open += 1
                return
            talk.answer(turn_number, text)

    def finish(self, turn: Turn, outcome: Reply | Exception) -> None:
        """Write the outcome and ask on in its conversation."""
        self.open -= 1
        talk = turn.conversation
        if not isinstance(outcome, Reply):
            self.file.skip("failed", len(talk.places) - turn.number)
            self.failures.append(f"{turn.name}: {outcome}")
            return
        ids = response_ids(self.serving.tokenizer, outcome, self.file.stop_ids)
        self.file.bar.update(len(ids))
        talk.answer(turn.number, self.file.add(turn, ids, "text" if outcome.ids is None else "target"))
        self.ask(talk, turn.number + 1)


def answer_remotely(
    file: ResponseFile, talks: list[Conversation], serving: Serving, fleet: Fleet, *, max_new_tokens: int, seed: int
) -> list[str]:
    """Answer everything that `file` does not hold; returns "NAME: REASON" for what failed. UserError when no server is
    left; what was answered is in the file.
    """
    run = _Run(file, serving, fleet, max_new_tokens, seed)
    waiting = iter(talks)
    with fleet:
        while True:
            while run.open < fleet.capacity and (talk := next(waiting, None)) is not None:
                run.ask(talk, 0)
            if not run.open:
                break
            request, outcome = fleet.take()
            run.finish(request.turn, outcome)
    if file.counts["ids from text"]:
        print(
            f"warning: {file.counts['ids from text']} responses came as text, so their ids are a tokenisation of it "
            "and may differ from what the target emitted; vLLM (return_token_ids) and SGLang return ids.",
            file=sys.stderr,
        )
    return run.failures
