"""Conversations whose assistant turns get answered in order, and what a server would be sent for each of them."""

from array import array
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .errors import UserError
from .messages import Message, flaw, open_turns, to_messages, to_tools
from .sources import read_lines
from .tokens import prompt_ids

Prompt = dict[str, Any]  # {id, source, messages, tools (only where there are some)}


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a JSONL file; UserError for ids that are missing or used twice."""
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for where, line in read_lines(path):
        name = str(line.get("id", ""))
        if not name or name in seen:
            other = f"used at {seen[name]} too" if name else "missing"
            raise UserError(
                f"{where}: id {name!r} is {other}; run the file through `python -m data_prep prompts` first."
            )
        seen[name] = where
        prompt = {"id": name, "source": str(line.get("source", path.stem)), "messages": to_messages(line, where)}
        tools = to_tools(line, where)
        prompts.append(prompt | ({"tools": tools} if tools else {}))
    if not prompts:
        raise UserError(f"{path} holds no prompts.")
    return prompts


@dataclass(eq=False)
class Conversation:
    """A prompt, its turns as far as they are known (None: not answered yet), and the places of those in question."""

    prompt: Prompt
    messages: list[Message | None]
    places: list[int]

    def name(self, turn: int) -> str:
        """The sample id of the `turn`-th of `places`: the conversation's own id where it has no other turn."""
        return self.prompt["id"] if len(self.places) == 1 else f"{self.prompt['id']}#{turn + 1}"

    def history(self, turn: int) -> list[Message]:
        """What was said before that turn."""
        return self.messages[: self.places[turn]]

    def answer(self, turn: int, text: str) -> None:
        """Put the target's answer where it belongs."""
        self.messages[self.places[turn]] = {"role": "assistant", "content": text}


def conversations(prompts: list[Prompt], counts: Counter, *, keep_answers: bool = False) -> list[Conversation]:
    """Those of `prompts` with turns to answer (with `keep_answers`: with answers of the data's own), the others counted
    with their reason. UserError when two samples would have one id.
    """
    found: list[Conversation] = []
    names: dict[str, str] = {}
    for prompt in prompts:
        reason = flaw(prompt["messages"])
        messages = list(prompt["messages"]) if keep_answers else open_turns(prompt["messages"])
        places = [
            i
            for i, message in enumerate(messages)
            if message is None or (message["role"] == "assistant" and "tool_calls" not in message)
        ]
        if reason is None and not places:
            reason = "no answer in the data"
        if reason is not None:
            counts[f"dropped: {reason}"] += 1
            continue
        conversation = Conversation(prompt, messages, places)
        for turn in range(len(places)):
            name = conversation.name(turn)
            if name in names:
                raise UserError(
                    f"the conversations {names[name]!r} and {prompt['id']!r} both have a sample {name!r}; rename one."
                )
            names[name] = prompt["id"]
        found.append(conversation)
    return found


@dataclass(eq=False)
class Turn:
    """The `number`-th turn of a conversation (0-based), with the prompt's ids that serving renders for it."""

    conversation: Conversation
    number: int
    prompt: array

    @property
    def name(self) -> str:
        return self.conversation.name(self.number)

    def line(self) -> dict[str, Any]:
        """The line of the responses file without the response."""
        prompt = self.conversation.prompt
        line = {"id": self.name, "conversation": prompt["id"], "turn": self.number, "source": prompt["source"]}
        line["messages"] = self.conversation.history(self.number)
        line |= {"tools": prompt["tools"]} if "tools" in prompt else {}
        return line | {"prompt_token_ids": self.prompt.tolist()}


@dataclass(frozen=True)
class Serving:
    """How serving turns a conversation into ids, and the most ids of prompt and response together that it takes."""

    tokenizer: PreTrainedTokenizerBase
    template_args: dict[str, Any]
    context: int

    def turn(self, conversation: Conversation, number: int) -> Turn:
        """The turn with its prompt's ids; the turns before it have to be answered. UserError names the prompt."""
        history, tools = conversation.history(number), conversation.prompt.get("tools")
        try:
            ids = prompt_ids(self.tokenizer, history, self.template_args, tools)
        except UserError as error:
            raise UserError(f"prompt {conversation.prompt['id']}: {error}") from error
        return Turn(conversation, number, array("i", ids))
