"""A conversation of any common spelling -> the messages of an OpenAI chat, and the places where the target speaks.

A row spells its conversation in one of these ways; of several in one row, the first counts:

    messages       [{"role": "user", "content": "..."}, ...]
    conversations  ShareGPT: [{"from": "human", "value": "..."}, ...]
    turns          ["first user turn", "second user turn", ...]
    prompt         "..." or messages, with the answer in `response` or `completion`, if any

`system` (or `system_prompt`) beside them is the system turn, `tools` the functions that the target may call: a list, or
a JSON string of one. A field that is None is absent. Columns such as `answer` or `output` are not read: in many data
sets they are a reference, not what an assistant said.
"""

import json
from typing import Any

from .errors import UserError

Message = dict[str, Any]

ROLES = {"system", "developer", "user", "assistant", "tool"}
# What chat templates read. Anything else (time stamps, user ids) would make equal prompts different.
FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


def to_messages(line: dict[str, Any], where: str) -> list[Message]:
    """The messages of a row, copied: `role` and `content` (text) in all, and those of FIELDS that are there; the
    arguments of tool calls are objects. UserError, starting with `where`, for a row that cannot be understood.
    """
    line = {name: value for name, value in line.items() if value is not None}
    messages = [_message(message, where) for message in _spelled_turns(line, where)]
    system = _only_one(line, ("system", "system_prompt"), where)
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise UserError(f"{where}: the system turn is {_short(system)}, it has to be text.")
    if any(message["role"] == "system" for message in messages):
        if messages[0] == {"role": "system", "content": system}:
            return messages
        raise UserError(f"{where} has a system turn and another text in the field system; remove one of them.")
    return [{"role": "system", "content": system}, *messages]


def to_tools(line: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The `tools` of a row as servers expect them: [{"type": "function", "function": {...}}]; [] when it has none."""
    tools = line.get("tools") or []
    if isinstance(tools, str):
        tools = _parse(tools, "tools", where) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: tools is {_short(tools)}; it is a list of function descriptions, or JSON of one.")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


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


def flaw(messages: list[Message]) -> str | None:
    """Why a target cannot be asked this conversation; None when it can.

    Its answers replace the data's: one that answers nothing, or that a tool's result has to follow, has no such place.
    """
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        return "no user text"
    talk = open_turns(messages)
    if None not in talk:
        return "ends with a tool call"
    for before, turn in zip([{"role": "start"}, *talk], talk):
        if turn is None and (before is None or before["role"] not in ("user", "tool")):
            return "an answer follows no user or tool turn"
        called = before is not None and (before["role"] == "tool" or before.get("tool_calls"))
        if turn is not None and turn["role"] == "tool" and not called:
            return "a tool result follows no tool call"
    return None


def _spelled_turns(line: dict[str, Any], where: str) -> list[Any]:
    """The turns in the row's own spelling, as messages that are not checked yet."""
    if "messages" in line:
        return _list(line, "messages", where)
    if "conversations" in line:
        return [_sharegpt(turn, where) for turn in _list(line, "conversations", where)]
    if "turns" in line:
        return [{"role": "user", "content": turn} for turn in _list(line, "turns", where)]
    if "prompt" in line:
        answer = _only_one(line, ("response", "completion"), where)
        spoken = [("user", line["prompt"])] + ([("assistant", answer)] if answer is not None else [])
        return [
            message
            for role, turn in spoken
            for message in (turn if isinstance(turn, list) else [{"role": role, "content": turn}])
        ]
    raise UserError(f"{where}: keys {sorted(line)}; a line needs messages, conversations, turns or prompt.")


def _sharegpt(turn: Any, where: str) -> Any:
    """A ShareGPT turn as a message; some files that call themselves ShareGPT hold messages already."""
    if not isinstance(turn, dict) or "role" in turn:
        return turn
    speaker = turn.get("from")
    if speaker not in SHAREGPT_ROLES:
        raise UserError(f"{where}: turn from {speaker!r}; ShareGPT turns are from {sorted(SHAREGPT_ROLES)}.")
    message = {"role": SHAREGPT_ROLES[speaker], "content": turn.get("value")}
    if speaker == "function_call":
        calls = _parse(message["content"], "the function call", where)
        message |= {"content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    return message


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"{where}: a turn is {_short(message)}; it has to be an object with role and content.")
    kept = {name: message[name] for name in FIELDS if message.get(name) is not None}
    if kept.get("role") not in ROLES:
        raise UserError(f"{where}: role {kept.get('role')!r}; roles are {sorted(ROLES)}.")
    calls = kept.pop("tool_calls", None)
    if isinstance(calls, str):
        calls = _parse(calls, "tool_calls", where)
    if calls:
        if not isinstance(calls, list):
            raise UserError(f"{where}: tool_calls is {_short(calls)}; it has to be a list.")
        kept.setdefault("content", "")  # what servers render for the null of OpenAI's own answers
        kept["tool_calls"] = [_tool_call(call, where) for call in calls]
    if not isinstance(kept.get("content"), str):
        raise UserError(
            f"{where}: content of the {kept['role']} turn is {_short(kept.get('content'))}, it has to be text."
        )
    return kept


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """{"id" if any, "type": "function", "function": {"name", "arguments": object}}: servers hand templates objects."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: a tool call is {_short(call)}; it needs the function's name and arguments.")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parse(arguments, "the arguments of a tool call", where)
    if not isinstance(arguments, dict):
        raise UserError(f"{where}: the arguments of {function['name']} are {_short(arguments)}; they are an object.")
    identity = {"id": call["id"]} if call.get("id") is not None else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _only_one(line: dict[str, Any], names: tuple[str, ...], where: str) -> Any:
    """The value of that one of `names` which the row has; None when it has none of them."""
    found = [name for name in names if name in line]
    if len(found) > 1:
        raise UserError(f"{where} has both {' and '.join(found)}; remove those that are not meant.")
    return line[found[0]] if found else None


def _list(line: dict[str, Any], name: str, where: str) -> list[Any]:
    if not isinstance(line[name], list):
        raise UserError(f"{where}: {name} is {_short(line[name])}; it has to be a list of turns.")
    return line[name]


def _parse(text: Any, what: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, json.JSONDecodeError) as error:
        raise UserError(f"{where}: {what} is {_short(text)}, which is not JSON ({error}); correct it there.") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
