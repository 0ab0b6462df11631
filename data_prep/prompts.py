"""Prompts of any common spelling -> one JSONL schema, without duplicates, split by a hash of their text.

    python -m data_prep prompts IN.jsonl --out prompts/ --heldout 24

A line of the result: {"id": ..., "source": ..., "messages": [{"role": ..., "content": ...}, ...]}.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .errors import UserError
from .files import canonical_json, sha256_hex, write_atomic

Message = dict[str, Any]

ROLES = {"system", "developer", "user", "assistant", "tool"}
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


def to_messages(line: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The messages of a line that spells them as `messages`, `conversations`, `turns` or `prompt`. UserError
    otherwise.
    """
    if "messages" in line:
        messages = line["messages"]
    elif "conversations" in line:
        messages = []
        for turn in line["conversations"]:
            if turn.get("from") not in SHAREGPT_ROLES:
                raise UserError(
                    f"{where}: turn from {turn.get('from')!r}; ShareGPT turns are from {sorted(SHAREGPT_ROLES)}."
                )
            messages.append({"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]})
    elif "turns" in line:
        messages = [{"role": "user", "content": turn} for turn in line["turns"]]
    elif "prompt" in line:
        prompt = line["prompt"]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    else:
        raise UserError(f"{where}: keys {sorted(line)}; a line needs messages, conversations, turns or prompt.")
    for message in messages:
        if message.get("role") not in ROLES:
            raise UserError(f"{where}: role {message.get('role')!r}; roles are {sorted(ROLES)}.")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise UserError(
                f"{where}: content of the {message['role']} turn is {message.get('content')!r}, it has to be text."
            )
    return messages


def open_turns(messages: list[Message]) -> list[Message | None]:
    """The conversation with None at every place where the target speaks: it answers each user or tool turn.

    An assistant turn that calls tools stays as it is: the tool's answer that follows belongs to it. Other assistant
    turns of the data become None, and one is added between two user turns and behind a conversation that nobody
    answered.
    """
    talk: list[Message | None] = []
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            talk.append(None)
            continue
        if message["role"] == "user" and talk and talk[-1] is not None and talk[-1]["role"] == "user":
            talk.append(None)
        talk.append(message)
    return talk if talk[-1] is None or talk[-1]["role"] == "assistant" else [*talk, None]


def prompt_key(messages: list[dict[str, Any]]) -> str:
    """SHA-256 of the conversation's text without the answers that the target will write itself."""
    return sha256_hex(canonical_json(open_turns(messages)))


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("FILE:LINE", parsed line) of a JSONL file; blank lines are passed over. UserError for a line that is no
    object.
    """
    if not path.is_file():
        raise UserError(f"there is no prompts file {path}; pass a JSONL file.")
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}:{number} is not JSON ({error}); a prompts file has one JSON object a line."
                ) from error
            if not isinstance(line, dict):
                raise UserError(
                    f"{path}:{number} is a {type(line).__name__}; a prompts file has one JSON object a line."
                )
            yield f"{path}:{number}", line


def _jsonl(lines: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode("utf-8")


def prepare_prompts(paths: list[Path], out: Path, heldout: int) -> Counter:
    """Write out/train.jsonl and out/heldout.jsonl (input order) and return counts: read, dropped per reason, written.

    The held-out lines are the `heldout` prompts with the smallest SHA-256 of their text: files, order and other
    prompts' ids do not matter.
    """
    counts: Counter = Counter()
    lines: dict[str, dict[str, Any]] = {}  # by prompt_key, in input order
    ids: dict[str, str] = {}
    for path in paths:
        for where, line in tqdm(read_lines(path), desc=f"reading {path.name}", unit=" prompts"):
            counts["read"] += 1
            messages = to_messages(line, where)
            if not any(message["role"] == "user" and (message.get("content") or "").strip() for message in messages):
                counts["dropped: no user text"] += 1
                continue
            key = prompt_key(messages)
            if key in lines:
                counts["dropped: duplicate"] += 1
                continue
            name = str(line.get("id", key[:16]))
            if name in ids:
                raise UserError(
                    f"{where} and {ids[name]} both have the id {name!r}; ids name samples, make them different."
                )
            ids[name] = where
            lines[key] = {"id": name, "source": str(line.get("source", path.stem)), "messages": messages}
    if heldout >= len(lines):
        raise UserError(f"--heldout {heldout} of {len(lines)} prompts leaves none to train on; pass a smaller number.")
    held = set(sorted(lines)[:heldout])
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "heldout.jsonl", _jsonl([line for key, line in lines.items() if key in held]))
    write_atomic(out / "train.jsonl", _jsonl([line for key, line in lines.items() if key not in held]))
    counts["train"], counts["heldout"] = len(lines) - len(held), len(held)
    return counts
