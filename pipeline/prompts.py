"""The prompts of an evaluation: any JSONL file of conversations, or the named benchmarks in a folder of such files.

A line holds a conversation as `python -m data_prep prompts` writes or reads it (`messages`, `turns`, `conversations`,
`prompt`; `tools`), or `prompt_token_ids`. As in training data the target answers every turn in its own words, whatever
answers the line has.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import UserError
from data_prep.messages import Message, flaw, open_turns, to_messages, to_tools
from data_prep.sources import read_lines

# The benchmarks that drafters are compared on; DIR/NAME.jsonl holds one.
BENCHMARKS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "alpaca")


@dataclass(frozen=True)
class Conversation:
    """One line of the prompts: a ready prompt of token ids, or messages with None where the target answers.

    source: the benchmark it comes from: what the line says, else the file's name.
    """

    where: str
    source: str
    token_ids: tuple[int, ...] = ()
    talk: tuple[Message | None, ...] = ()
    tools: tuple[dict, ...] = ()

    @property
    def answers(self) -> int:
        return self.talk.count(None) or 1


def benchmark_files(names: list[str], folder: Path) -> list[Path]:
    """DIR/NAME.jsonl of every name. UserError for a benchmark that is not there, with those that are."""
    there = sorted(path.stem for path in folder.glob("*.jsonl"))
    if missing := [name for name in names if name not in there]:
        raise UserError(
            f"{folder} has no {', '.join(f'{name}.jsonl' for name in missing)} (it has "
            f"{', '.join(there) or 'no *.jsonl'}); put the benchmarks' prompts there, one conversation a line"
        )
    return [folder / f"{name}.jsonl" for name in names]


def read_conversations(paths: list[Path], limit: int | None = None) -> list[Conversation]:
    """All prompts of the files, at most `limit` of each. UserError names the line that holds none, or two."""
    conversations = []
    for path in paths:
        found = [_conversation(path, where, line) for where, line in read_lines(path)]
        if not found:
            raise UserError(f"{path} holds 0 prompts; it needs at least one line")
        conversations += found[:limit]
    return conversations


def _conversation(path: Path, where: str, line: dict) -> Conversation:
    source, ids = str(line.get("source") or path.stem), line.get("prompt_token_ids")
    if ids is None:
        messages = to_messages(line, where)
        if reason := flaw(messages):
            raise UserError(f"{where}: {reason}; correct or remove this conversation")
        return Conversation(where, source, talk=tuple(open_turns(messages)), tools=tuple(to_tools(line, where) or ()))
    if others := {"messages", "conversations", "turns", "prompt"} & set(line):
        raise UserError(f"{where} holds prompt_token_ids and {', '.join(sorted(others))}; a line has one of them")
    if not isinstance(ids, list) or not ids or not all(type(item) is int for item in ids):
        raise UserError(f"{where}: prompt_token_ids is {ids!r}; it must be a list of at least one int")
    return Conversation(where, source, token_ids=tuple(ids))
