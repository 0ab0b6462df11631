"""Responses in the target's own words, from this machine or from servers: resumable line by line.

    python -m data_prep respond --target TARGET --prompts prompts/train.jsonl --out responses.jsonl

Every assistant turn of a conversation is generated in order and becomes a line of its own, with the ids that went into
the target and the ids that came out: nothing is tokenised twice. A line:

    {id, conversation, turn, source, messages, tools (where there are some), prompt_token_ids, response_token_ids,
     finish_reason: "stop" | "length", response, ids_from: "target" | "text"}

`id` is the conversation's where it has one answer, else CONVERSATION#1, #2, ...; `turn` counts them from 0;
`response_token_ids` end with the stop token if there was one. Lines may come in any order. Beside the file lies
FILE.meta.json, the settings it was made with; another run into the same file has to agree with them.

Of several tasks (--num-tasks N --task-id I) each answers every N-th conversation into FILE.task-I-of-N; merge_responses.py
makes them one file.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import memory
from .answers import answer_from_data
from .conversations import Serving, conversations, read_prompts
from .errors import UserError
from .files import canonical_json, sha256_hex, write_atomic
from .fleet import Fleet
from .local import LocalTarget, answer_locally
from .manifest import differences
from .model import compute_dtype, dtype_name
from .remote import answer_remotely
from .response_file import ResponseFile
from .sampling import recommended_sampling
from .servers import Server, Settings
from .target import read_config, stop_token_ids, target_facts, text_config, tokenizer_sha256
from .tokens import check_template_args, load_tokenizer, template_sha256

BATCHING = ("batch_size", "batch_tokens")  # fields of a local run's settings: rows, or else tokens that memory allows
FINISHED = "finished"  # field of a task's settings: its lines, once all are there
SHOWN = 3  # failures in the error's text


def meta_path(responses: Path) -> Path:
    """Where the settings of the responses file lie."""
    return responses.with_name(responses.name + ".meta.json")


def share_path(out: Path, task_id: int, num_tasks: int) -> Path:
    """Where task `task_id` of `num_tasks` writes its share of `out`."""
    return out.with_name(f"{out.name}.task-{task_id}-of-{num_tasks}")


def read_meta(responses: Path) -> dict[str, Any]:
    """The settings that `responses` was made with. UserError when they are missing."""
    path = meta_path(responses)
    if not path.is_file():
        raise UserError(
            f"{responses} has no {path.name} beside it, so nothing says which target wrote it; make it with `python -m "
            "data_prep respond`, and move both files together."
        )
    return json.loads(path.read_text())


def check_meta(out: Path, meta: dict[str, Any]) -> dict[str, Any] | None:
    """The settings that `out` was begun with, None for a new file. UserError where they differ from `meta`."""
    if not meta_path(out).is_file():
        if out.exists() and out.stat().st_size:
            raise UserError(
                f"{out} exists and was not made by respond (no {meta_path(out).name}); choose another --out."
            )
        return None
    have = read_meta(out)
    changed = differences(have, meta)
    if changed:
        raise UserError(
            f"{out} was made with other settings ({'; '.join(changed)}); repeat those settings to carry on, or "
            "choose another --out."
        )
    return have


def _check_options(batch_size: int | None, sample: bool, servers: Sequence[str], keep_answers: bool) -> None:
    """UserError for options that contradict each other."""
    given = {"--server": bool(servers), "--sample": sample, "--batch-size": batch_size is not None}
    generating = [name for name, is_given in given.items() if is_given]
    if keep_answers and generating:
        raise UserError(
            f"--keep-answers generates nothing, so {' and '.join(generating)} cannot be meant too; leave out one."
        )
    if servers and batch_size is not None:
        raise UserError(
            "--server leaves batching to the servers, so --batch-size cannot be meant too; see --concurrency."
        )
    double = [url for url, count in Counter(url.rstrip("/") for url in servers).items() if count > 1]
    if double:
        raise UserError(f"--server {double[0]} is given twice; pass it once (more requests at a time: --concurrency).")


def respond(
    target: Path,
    prompts_path: Path,
    out: Path,
    *,
    max_new_tokens: int = 2048,
    batch_size: int | None = None,
    template_args: dict[str, Any] | None = None,
    sample: bool = False,
    seed: int = 0,
    servers: Sequence[str] = (),
    concurrency: int = 64,
    timeout: float = 600,
    keep_answers: bool = False,
    num_tasks: int = 1,
    task_id: int = 0,
) -> Counter:
    """Append a line per assistant turn to `out` until all are there; returns counts: lines, generated (by this run),
    tokens, stop, empty, cut, looping; where there are some: ids from text, stripped, and every reason for "dropped".
    Of several tasks this one answers conversations task_id, task_id + num_tasks, ... into its `share_path` of `out`.

    Without `servers` the target runs here, in batches of `batch_size` (default: what memory allows; the choice is
    recorded, and a run that carries on repeats it). `keep_answers` takes the data's own answers instead.
    UserError when `out` was made with other settings; `servers`, `concurrency` and `timeout` (seconds) are none.
    """
    _check_options(batch_size, sample, servers, keep_answers)
    if not 0 <= task_id < num_tasks:
        raise UserError(f"--task-id {task_id} of --num-tasks {num_tasks}: ids run from 0 to {num_tasks - 1}.")
    if num_tasks > 1:
        out = share_path(out, task_id, num_tasks)
    template_args = template_args or {}
    prompts = read_prompts(prompts_path)
    tokenizer = load_tokenizer(target)
    check_template_args(tokenizer, template_args)
    stops = stop_token_ids(target, tokenizer)
    sampling = recommended_sampling(target, seed) if sample else None
    generator = "data" if keep_answers else "server" if servers else "transformers"
    dtype = dtype_name(compute_dtype())
    meta = {
        # servers do not say which dtype they compute in
        "target": target_facts(target, dtype) | ({} if generator == "transformers" else {"dtype": None}),
        "tokenizer_sha256": tokenizer_sha256(target),
        "template_sha256": template_sha256(tokenizer),
        "template_args": template_args,
        "stop_token_ids": stops,
        "max_new_tokens": None if keep_answers else max_new_tokens,
        "generator": generator,
        "sampling": sampling.meta() if sampling else None,
        "prompts_sha256": sha256_hex(canonical_json(prompts)),
    }
    local = LocalTarget(target, stops, max_new_tokens, sampling)
    if batch_size is not None:
        meta |= {"batch_size": batch_size, "batch_tokens": None}
    with ResponseFile(out, tokenizer, stops) as file:
        begun = check_meta(out, meta)
        fleet = [Server(url, target, Settings(max_new_tokens, stops, sampling), timeout) for url in servers]
        if begun is not None:
            meta |= {name: begun[name] for name in BATCHING if name in begun}
        else:
            if generator == "transformers" and batch_size is None:
                meta |= {"batch_size": None, "batch_tokens": memory.batch_tokens(local.model)}
            write_atomic(meta_path(out), (json.dumps(meta, indent=2) + "\n").encode())
        talks = conversations(prompts[task_id::num_tasks], file.counts, keep_answers=keep_answers)
        contexts = [text_config(read_config(target)).get("max_position_embeddings"), *(one.context for one in fleet)]
        serving = Serving(tokenizer, template_args, min((size for size in contexts if size), default=1 << 40))
        names = [talk.name(turn) for talk in talks for turn in range(len(talk.places))]
        file.begin(names, max_new_tokens)
        failures: list[str] = []
        if keep_answers:
            answer_from_data(file, talks, serving)
        elif servers:
            failures = answer_remotely(
                file, talks, serving, Fleet(fleet, concurrency), max_new_tokens=max_new_tokens, seed=seed
            )
        else:
            answer_locally(file, talks, serving, local, **{name: meta[name] for name in BATCHING})
        file.report()
    if failures:
        raise UserError(
            f"{file.counts['failed']} of {file.counts['failed'] + file.counts['lines']} responses failed, among them "
            f"{'; '.join(failures[:SHOWN])}. The others are in {out}; the same command asks again for what is missing."
        )
    if num_tasks > 1:
        write_atomic(meta_path(out), (json.dumps(meta | {FINISHED: file.counts["lines"]}, indent=2) + "\n").encode())
    return file.counts
