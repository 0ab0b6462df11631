"""Conversations of every accepted spelling: one schema out, nothing of it lost, nothing guessed."""

import pytest

from data_prep.errors import UserError
from data_prep.messages import flaw, open_turns, to_messages, to_tools

ASK = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "c"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
}
TOOL = {"role": "tool", "content": "4", "tool_call_id": "1"}


@pytest.mark.parametrize(
    "row, messages",
    [
        ({"messages": [SYSTEM, ASK, ANSWER, ASK]}, [SYSTEM, ASK, ANSWER, ASK]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [ASK, ANSWER]),
        ({"conversations": [ASK, ANSWER]}, [ASK, ANSWER]),
        ({"turns": ["a", "a"]}, [ASK, ASK]),
        ({"prompt": "a"}, [ASK]),
        ({"prompt": [SYSTEM, ASK]}, [SYSTEM, ASK]),
        ({"prompt": "a", "response": "b"}, [ASK, ANSWER]),
        ({"prompt": [SYSTEM, ASK], "completion": [ANSWER]}, [SYSTEM, ASK, ANSWER]),
        ({"prompt": "a", "system": "c"}, [SYSTEM, ASK]),
        ({"turns": ["a"], "system_prompt": "c"}, [SYSTEM, ASK]),
        ({"messages": [SYSTEM, ASK], "system": "c"}, [SYSTEM, ASK]),
        ({"prompt": "a", "answer": "42", "output": "43"}, [ASK]),  # a reference, or an answer? not guessed
        ({"messages": [ASK, ANSWER], "prompt": "other"}, [ASK, ANSWER]),
    ],
)
def test_every_spelling_becomes_the_same_messages(row, messages):
    assert to_messages(row, "here") == messages


def test_fields_that_parquet_filled_with_none_are_absent():
    nones = {"tool_calls": None, "name": None, "tool_call_id": None}
    empty = {"messages": None, "turns": None, "response": None, "system": None, "tools": None}
    row = {**empty, "prompt": [{**ASK, **nones}]}
    assert to_messages(row, "here") == [ASK] and to_tools(row, "here") == []


def test_fields_that_no_template_reads_do_not_survive():
    thought = {**CALL, "reasoning_content": "hm"}
    row = {"messages": [{**ASK, "timestamp": 7, "name": "eve"}, thought, TOOL]}
    assert to_messages(row, "here") == [{**ASK, "name": "eve"}, thought, TOOL]


@pytest.mark.parametrize(
    "calls",
    [
        [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        [{"id": "1", "name": "f", "arguments": {"x": 1}}],
        '[{"id": "1", "name": "f", "arguments": "{\\"x\\": 1}"}]',
    ],
)
def test_tool_calls_of_all_spellings_have_objects_as_arguments_and_content(calls):
    row = {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": calls}, TOOL]}
    assert to_messages(row, "here") == [ASK, CALL, TOOL]


def test_sharegpt_function_calls_and_observations_are_tool_calls_and_tool_turns():
    turns = [("system", "c"), ("human", "a"), ("function_call", '{"name": "f", "arguments": {}}'), ("observation", "4")]
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert to_messages({"conversations": [{"from": who, "value": text} for who, text in turns]}, "here") == [
        SYSTEM,
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
    ]


def test_tools_are_a_list_or_json_of_one_and_come_out_as_servers_expect_them():
    full = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    text = '[{"name": "f", "parameters": {}}]'
    assert to_tools({"tools": full}, "here") == to_tools({"tools": text}, "here") == full
    assert to_tools({"tools": ""}, "here") == to_tools({"tools": "[]"}, "here") == to_tools({}, "here") == []


def messages_with(**call):
    return {"messages": [ASK, {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    "row, complaint",
    [
        ({"text": "x"}, r"keys \['text'\]; a line needs messages"),
        ({"messages": "hi"}, "messages is 'hi'; it has to be a list of turns"),
        ({"messages": ["hi"]}, "a turn is 'hi'; it has to be an object"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role 'wizard'"),
        ({"messages": [ASK, {"role": "assistant", "content": None}]}, "content of the assistant turn is None"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"content of the user turn is \[\{'type"),
        ({"prompt": 3}, "content of the user turn is 3"),
        ({"turns": [["a"]]}, r"content of the user turn is \['a'\]"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "turn from 'alien'"),
        ({"conversations": [{"from": "human"}]}, "content of the user turn is None"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, r"the function call is 'f\(\)', which is not"),
        ({"prompt": "a", "response": "b", "completion": "c"}, "both response and completion"),
        ({"prompt": "a", "system": "b", "system_prompt": "c"}, "both system and system_prompt"),
        ({"messages": [SYSTEM, ASK], "system": "other"}, "has a system turn and another text"),
        ({"prompt": "a", "system": 3}, "the system turn is 3"),
        (messages_with(arguments={}), "it needs the function's name"),
        (messages_with(name="f", arguments="{"), r"the arguments of a tool call is '\{', which is not JSON"),
        (messages_with(name="f", arguments="[1]"), r"the arguments of f are \[1\]; they are an object"),
    ],
)
def test_a_row_that_cannot_be_understood_is_refused_by_its_place_and_value(row, complaint):
    with pytest.raises(UserError, match=f"^here:? ?.*{complaint}"):
        to_messages(row, "here")


@pytest.mark.parametrize("tools", ["{oops", '{"name": "f"}', ["f"], 3])
def test_tools_that_are_no_list_of_functions_are_refused(tools):
    with pytest.raises(UserError, match="here: tools is"):
        to_tools({"tools": tools}, "here")


def test_the_target_speaks_after_every_user_and_tool_turn_and_tool_calls_stay():
    assert open_turns([ASK]) == [ASK, None]
    assert open_turns([SYSTEM, ASK, ANSWER]) == [SYSTEM, ASK, None]
    assert open_turns([ASK, ASK]) == [ASK, None, ASK, None]
    assert open_turns([ASK, CALL, TOOL, ANSWER, ASK]) == [ASK, CALL, TOOL, None, ASK, None]


@pytest.mark.parametrize(
    "messages, reason",
    [
        ([ASK], None),
        ([SYSTEM, ASK, ANSWER, ASK], None),
        ([ASK, CALL, TOOL, TOOL, ANSWER], None),
        ([], "no user text"),
        ([SYSTEM, ANSWER], "no user text"),
        ([{"role": "user", "content": " \n"}], "no user text"),
        ([ASK, CALL], "ends with a tool call"),
        ([ANSWER, ASK], "an answer follows no user or tool turn"),
        ([ASK, ANSWER, ANSWER], "an answer follows no user or tool turn"),
        ([ASK, TOOL], "a tool result follows no tool call"),
        ([ASK, ANSWER, TOOL], "a tool result follows no tool call"),
    ],
)
def test_conversations_without_a_sound_place_for_the_target_are_recognised(messages, reason):
    assert flaw(messages) == reason
