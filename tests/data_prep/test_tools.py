"""A conversation with tools goes through every stage as the server would see it."""

import json
import shutil

from data_prep.__main__ import main
from data_prep.manifest import Manifest, read_index
from data_prep.samples import read_sample
from data_prep.tokens import load_tokenizer

from .conftest import read_lines, write_lines

TEMPLATE = (
    "{%- if tools -%}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' -}}{%- endif -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') -}}"
    "{%- for call in m.tool_calls or [] -%}{{- '<call>' + call.function.name + call.function.arguments | tojson -}}"
    "{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
TALK = [
    {"role": "system", "content": "Use tools."},
    {"role": "user", "content": "What is 2 + 3?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "5"},
    {"role": "assistant", "content": "the data's answer"},
]


def test_ids_mask_and_states_of_a_tool_conversation_are_those_of_serving_it(target, tmp_path):
    folder = shutil.copytree(target, tmp_path / "target")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    write_lines(tmp_path / "in.jsonl", [{"id": "t", "messages": TALK, "tools": json.dumps(TOOLS)}])
    commands = [
        ["prompts", "in.jsonl", "--out", "prompts", "--heldout", "0"],
        ["respond", "--prompts", "prompts/train.jsonl", "--out", "r.jsonl", "--max-new-tokens", "8", "--target", "target"],
        ["extract", "--responses", "r.jsonl", "--out", "d", "--layer-ids", "0,2", "--target", "target"],
        ["verify", "d", "--recompute", "1", "--target", "target"],
    ]
    files = {"in.jsonl", "prompts", "prompts/train.jsonl", "r.jsonl", "d", "target"}
    for stage, *arguments in commands:
        assert main([stage, *(str(tmp_path / part) if part in files else part for part in arguments)]) == 0
    (line,) = read_lines(tmp_path / "r.jsonl")
    served = load_tokenizer(folder).apply_chat_template(
        line["messages"], tools=TOOLS, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    text = load_tokenizer(folder).decode(served)
    assert '"add"' in text and '<call>add{"a": 2, "b": 3}' in text and "the data's answer" not in text
    (entry,) = read_index(tmp_path / "d", Manifest.read(tmp_path / "d"))
    sample = read_sample(tmp_path / "d" / entry.shard, entry.offset, entry.nbytes)
    ids, mask = sample["input_ids"], sample["loss_mask"]
    assert ids.tolist() == served + line["response_token_ids"] and len(ids) == len(mask) == len(sample["hidden"])
    assert ids[mask.bool()].tolist() == line["response_token_ids"]
