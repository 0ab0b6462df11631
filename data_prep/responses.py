"""Responses in the target's own words: greedy, batched, and resumable line by line.

    python -m data_prep respond --target TARGET --prompts prompts/train.jsonl --out responses.jsonl

Every assistant turn of a conversation is generated in order and becomes a line of its own, with the ids that went into
the target and the ids that came out: nothing is tokenised twice. Beside the file lies FILE.meta.json, the settings it
was made with; another run into the same file has to agree with them. Batches are a pure function of prompts and
settings, so an interrupted run that is carried on gives the file of a run that never stopped.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from .errors import UserError
from .files import canonical_json, sha256_hex, write_atomic
from .generate import greedy
from .manifest import differences
from .model import compute_dtype, dtype_name, load_model
from .prompts import open_turns, read_lines, to_messages
from .target import read_config, stop_token_ids, target_facts, text_config, tokenizer_sha256
from .tokens import check_template_args, load_tokenizer, prompt_ids, template_sha256

# {line: a responses line without its response, talk: the conversation, place: of the answer in it}
Job = dict[str, Any]


def meta_path(responses: Path) -> Path:
    """Where the settings of the responses file lie."""
    return responses.with_name(responses.name + ".meta.json")


def read_meta(responses: Path) -> dict[str, Any]:
    """The settings that `responses` was made with. UserError when they are missing."""
    path = meta_path(responses)
    if not path.is_file():
        raise UserError(
            f"{responses} has no {path.name} beside it, so nothing says which target wrote it; make it with `python -m "
            "data_prep respond`, and move both files together."
        )
    return json.loads(path.read_text())


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """All prompts of a JSONL file as {id, source, messages, tools?}; UserError for ids missing or used twice."""
    prompts: list[dict[str, Any]] = []
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
        prompts.append(prompt | ({"tools": line["tools"]} if line.get("tools") else {}))
    if not prompts:
        raise UserError(f"{path} holds no prompts.")
    return prompts


def _batches(
    prompts: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    template_args: dict[str, Any],
    longest: int,
    batch_size: int,
    counts: Counter,
) -> Iterator[list[Job]]:
    """Batches of jobs, sorted by prompt length, first all first turns, then all second turns, and so on.

    The answers of a round, put into job["response"] by the consumer, become history of the next one. Prompts of more
    than `longest` ids are dropped, with their later turns, and counted.
    """
    talks = [(prompt, open_turns(prompt["messages"])) for prompt in prompts]
    places = [[i for i, message in enumerate(talk) if message is None] for _, talk in talks]
    for turn in range(max(map(len, places))):
        jobs: list[Job] = []
        for (prompt, talk), own in zip(talks, places):
            if turn >= len(own):
                continue
            try:
                ids = prompt_ids(tokenizer, talk[: own[turn]], template_args, prompt.get("tools"))
            except UserError as error:
                raise UserError(f"prompt {prompt['id']}: {error}") from error
            if len(ids) > longest:
                counts["dropped: prompt and response exceed the target's context"] += len(own) - turn
                own.clear()
                continue
            name = prompt["id"] if len(own) == 1 else f"{prompt['id']}#{turn + 1}"
            line = {"id": name, "conversation": prompt["id"], "turn": turn, "source": prompt["source"]}
            line["messages"] = talk[: own[turn]]
            line |= {"tools": prompt["tools"]} if "tools" in prompt else {}
            jobs.append({"line": line | {"prompt_token_ids": ids}, "talk": talk, "place": own[turn]})
        jobs.sort(key=lambda job: (len(job["line"]["prompt_token_ids"]), job["line"]["id"]))
        for i in range(0, len(jobs), batch_size):
            yield jobs[i : i + batch_size]
        for job in jobs:
            job["talk"][job["place"]] = {"role": "assistant", "content": job["response"]}


def _finished_lines(file: BinaryIO) -> list[dict[str, Any]]:
    """The whole lines of `file`; a last line that was cut short is cut off the file."""
    file.seek(0)
    content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        file.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def respond(
    target: Path,
    prompts_path: Path,
    out: Path,
    *,
    max_new_tokens: int = 128,
    batch_size: int = 64,
    template_args: dict[str, Any] | None = None,
) -> Counter:
    """Append a line per assistant turn to `out` until all are there; returns counts (lines, generated, tokens,
    stop, length, empty, dropped).

    A line: {id, source, messages, prompt_token_ids, response_token_ids, finish_reason: "stop" | "length", response},
    where response_token_ids end with the stop token if there was one. UserError when `out` was made with other
    settings.
    """
    template_args = template_args or {}
    prompts = read_prompts(prompts_path)
    tokenizer = load_tokenizer(target)
    check_template_args(tokenizer, template_args)
    stops = stop_token_ids(target, tokenizer)
    meta = {
        "target": target_facts(target, dtype_name(compute_dtype())),
        "tokenizer_sha256": tokenizer_sha256(target),
        "template_sha256": template_sha256(tokenizer),
        "template_args": template_args,
        "stop_token_ids": stops,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "generator": "transformers",
        "sampling": None,
        "prompts_sha256": sha256_hex(canonical_json(prompts)),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists() and not meta_path(out).is_file() and out.stat().st_size:
        raise UserError(f"{out} exists and was not made by respond (no {meta_path(out).name}); choose another --out.")
    if meta_path(out).is_file():
        changed = differences(read_meta(out), meta)
        if changed:
            raise UserError(
                f"{out} was made with other settings ({'; '.join(changed)}); repeat those settings to carry on, or "
                "choose another --out."
            )
    else:
        write_atomic(meta_path(out), (json.dumps(meta, indent=2) + "\n").encode())
    with open(out, "ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another respond is writing {out}; wait for it or stop it.") from error
        longest = text_config(read_config(target)).get("max_position_embeddings", 1 << 40) - max_new_tokens
        return _write(target, prompts, tokenizer, stops, meta, longest, file)


def _write(
    target: Path,
    prompts: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    stops: list[int],
    meta: dict[str, Any],
    longest: int,
    file: BinaryIO,
) -> Counter:
    """Go through all batches: take from `file` what is there, generate and append the rest."""
    counts: Counter = Counter()
    limit = meta["max_new_tokens"]
    model = None
    kept = _finished_lines(file)
    taken = 0
    total = sum(open_turns(prompt["messages"]).count(None) for prompt in prompts)
    with tqdm(total=total * limit, desc="responses", unit="tok", unit_scale=True, smoothing=0.05) as bar:
        for batch in _batches(prompts, tokenizer, meta["template_args"], longest, meta["batch_size"], counts):
            lines = kept[taken : taken + len(batch)]
            taken += len(lines)
            for job, line in zip(batch, lines):
                if any(job["line"][name] != line[name] for name in ("id", "prompt_token_ids")):
                    raise UserError(
                        f"{file.name} holds {line['id']!r} where {job['line']['id']!r} belongs: its lines were changed "
                        "or reordered; restore the file or choose another --out."
                    )
            if len(lines) < len(batch):
                # a batch is always generated whole, so that its ids do not depend on where the last run stopped
                model = model or load_model(target)
                prompts_ids = [job["line"]["prompt_token_ids"] for job in batch]
                for job, ids in list(zip(batch, greedy(model, prompts_ids, limit, stops, bar.update)))[len(lines) :]:
                    text = tokenizer.decode(ids[:-1] if ids[-1] in stops else ids, skip_special_tokens=True)
                    line = job["line"] | {
                        "response_token_ids": ids,
                        "finish_reason": "stop" if ids[-1] in stops else "length",
                        "response": text,
                        "ids_from": "target",
                    }
                    lines.append(line)
                    file.write((json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8"))
                    counts["generated"] += 1
                file.flush()
                os.fsync(file.fileno())
            for job, line in zip(batch, lines):
                job["response"] = line["response"]
                counts[line["finish_reason"]] += 1
                counts["empty"] += not line["response"].strip()
                counts["tokens"] += len(line["response_token_ids"])
            # early stops shorten the way
            bar.total = (total - counts["stop"] - counts["length"]) * limit + bar.n
            bar.refresh()
    counts["lines"] = counts["stop"] + counts["length"]
    if taken < len(kept):
        raise UserError(
            f"{file.name} holds {len(kept)} lines, the prompts give {taken}: restore the file or choose another --out."
        )
    return counts
