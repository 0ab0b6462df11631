"""Responses generated on this machine: batches sorted by length, halved where memory does not suffice.

Batches are a pure function of prompts and settings, and a batch is generated whole, so an interrupted run that is
carried on gives the file of a run that never stopped.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedModel

from . import memory
from .conversations import Conversation, Serving, Turn
from .errors import UserError
from .generate import generate, greedy
from .model import load_model
from .response_file import CONTEXT, ResponseFile
from .sampling import Sampler, Sampling


@dataclass
class LocalTarget:
    """The target in `folder`, loaded when it is needed, and how it answers. `room` is the most tokens, padding
    included, that a batch turned out to hold.
    """

    folder: Path
    stop_ids: list[int]
    max_new_tokens: int
    sampling: Sampling | None
    room: int = 1 << 62

    @cached_property
    def model(self) -> PreTrainedModel:
        return load_model(self.folder)

    def answer(self, turns: list[Turn], bar: tqdm) -> Iterator[tuple[Turn, list[int]]]:
        """Each turn with its response's ids, in order. UserError when memory does not even suffice for one."""
        done = 0
        while done < len(turns):
            rest = turns[done:]
            length = max(len(turn.prompt) for turn in rest) + self.max_new_tokens
            part = rest[: max(self.room // length, 1)]
            before = bar.n
            try:
                ids = self._generate(part, bar)
            except Exception as error:
                if not memory.is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0]
            else:
                yield from zip(part, ids)
                done += len(part)
                continue
            # outside of the except block, where the traceback does not hold the batch's tensors any more
            memory.release_memory()
            bar.update(before - bar.n)
            if len(part) == 1:
                raise UserError(
                    f"memory does not suffice for the {len(part[0].prompt)} prompt tokens of {part[0].name!r} and "
                    f"{self.max_new_tokens} new ones ({reason}); pass a smaller --max-new-tokens, free memory, or "
                    "serve the target and pass --server."
                )
            self.room = len(part) // 2 * length
            fewer = len(part) // 2
            tqdm.write(f"out of memory with {len(part)} prompts of up to {length} tokens; going on with {fewer}")

    def _generate(self, turns: list[Turn], bar: tqdm) -> list[list[int]]:
        names = [turn.name for turn in turns]
        choose = Sampler(self.sampling, names, self.max_new_tokens) if self.sampling else greedy
        prompts = [turn.prompt.tolist() for turn in turns]
        return generate(self.model, prompts, self.max_new_tokens, self.stop_ids, bar.update, choose)


def batches(turns: list[Turn], max_new_tokens: int, size: int | None, tokens: int | None) -> Iterator[list[Turn]]:
    """The turns by length, cut into batches of `size`, or else of at most `tokens` with padding and responses."""
    batch: list[Turn] = []
    for turn in sorted(turns, key=lambda turn: (len(turn.prompt), turn.name)):
        rows = size or min(memory.ROWS, tokens // (len(turn.prompt) + max_new_tokens))
        if batch and len(batch) >= rows:
            yield batch
            batch = []
        batch.append(turn)
    if batch:
        yield batch


def answer_locally(
    file: ResponseFile,
    talks: list[Conversation],
    serving: Serving,
    target: LocalTarget,
    *,
    batch_size: int | None,
    batch_tokens: int | None,
) -> None:
    """Answer all first turns, then all second turns, and so on; what `file` holds is taken from there."""
    dropped: set[Conversation] = set()
    for number in range(max((len(talk.places) for talk in talks), default=0)):
        turns: list[Turn] = []
        for talk in talks:
            if number >= len(talk.places) or talk in dropped:
                continue
            turn = serving.turn(talk, number)
            if len(turn.prompt) + target.max_new_tokens > serving.context:
                file.skip(CONTEXT, len(talk.places) - number)
                dropped.add(talk)
                continue
            turns.append(turn)
        for batch in batches(turns, target.max_new_tokens, batch_size, batch_tokens):
            texts = {turn: file.kept(turn) for turn in batch}
            if None in texts.values():
                for turn, ids in target.answer(batch, file.bar):
                    if texts[turn] is None:
                        texts[turn] = file.add(turn, ids, "target")
                file.sync()
            for turn, text in texts.items():
                turn.conversation.answer(number, text)
