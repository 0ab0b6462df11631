"""Prompts of any common spelling -> one JSONL schema, without duplicates, split by a hash of their text.

    python -m data_prep prompts a.jsonl b.parquet saved_dataset/ --out prompts/ --heldout 0.02 --target TARGET
    python -m data_prep prompts gsm8k.jsonl mt-bench.jsonl --out benchmarks/ --benchmark

A line of the result: {"id", "source", "messages": [{"role", "content", ...}, ...], "tools": [...] if there are any}.
Every row that was read is in one of the files or counted in summary.json with the reason. Cost: all texts are held in
memory, 1.1 kB beside each; 2000 prompts of 50 words a second on one core, and with a target as much again for the
token counts.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from .errors import UserError
from .files import canonical_json, sha256_hex, write_atomic
from .messages import Message, flaw, open_turns, to_messages, to_tools
from .near_duplicates import near_duplicates
from .sources import read_lines as read_lines  # evaluation and responses read prompts files with it
from .sources import read_rows
from .target import tokenizer_sha256
from .tokens import check_template_args, load_tokenizer, prompt_ids, template_sha256

Prompt = dict[str, Any]  # a line of the result

EXAMPLES = 20  # pairs of near-duplicates that the summary shows


def prompt_key(messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
    """SHA-256 of the conversation's text without the answers that the target will write itself."""
    talk = open_turns(messages)
    return sha256_hex(canonical_json([talk, tools] if tools else talk))


def is_heldout(key: str, share: float) -> bool:
    """Whether the prompt of this prompt_key is held out: it depends on the prompt's text and on `share` alone."""
    return int(key, 16) < share * 2**256


def compared_texts(prompt: Prompt) -> tuple[str, str]:
    """What is asked (user and tool turns), and the same with the system turns and tools.

    Near-duplicates are alike in both: neither a long system turn that all prompts share nor one question under
    different system turns makes them so.
    """
    asked = [message["content"] for message in prompt["messages"] if message["role"] in ("user", "tool")]
    frame = [message["content"] for message in prompt["messages"] if message["role"] in ("system", "developer")]
    if "tools" in prompt:
        frame.append(json.dumps(prompt["tools"], ensure_ascii=False))
    return "\n".join(asked), "\n".join([*frame, *asked])


def prepare_prompts(
    paths: list[Path],
    out: Path,
    heldout: float,
    *,
    similarity: float = 0.8,
    target: Path | None = None,
    template_args: dict[str, Any] | None = None,
) -> Counter:
    """Write out/train.jsonl, out/heldout.jsonl (both in input order) and out/summary.json; returns counts: read,
    dropped per reason, train, heldout.

    A prompt is held out if the hash of its text falls into the first `heldout` (0 to 1) of all hashes: files, order and
    other prompts do not matter. Before that, all but one of equal prompts and of those whose `similarity` is reached
    are dropped (1: only equal ones). With a target, prompts are measured as it is served them, and those that its chat
    template refuses are dropped. UserError for rows that cannot be understood, and when nothing is left to train on.
    """
    template_args = template_args or {}
    if not similarity > 0:
        raise UserError(f"--similarity {similarity} would make all prompts duplicates; pass a share above 0.")
    _check_overwriting(paths, [out / "train.jsonl", out / "heldout.jsonl"])
    tokenizer = None
    if target is not None:
        tokenizer = load_tokenizer(target)
        check_template_args(tokenizer, template_args)
    tally: Counter = Counter()  # by (source, what became of the prompt)
    prompts = _read_prompts(paths, tally)
    inputs = [str(path) for path in paths]
    summary: dict[str, Any] = {"inputs": inputs, "heldout_share": heldout, "similarity": similarity}
    if similarity < 1:
        summary["near_duplicates"] = _drop_near_duplicates(prompts, similarity, tally)
    lengths: dict[str, list[int]] = {}
    if tokenizer is not None:
        summary["target"] = {
            "tokenizer_sha256": tokenizer_sha256(target),
            "template_sha256": template_sha256(tokenizer),
            "template_args": template_args,
        }
        lengths["tokens"], summary["refused_by_the_chat_template"] = _measure(prompts, tokenizer, template_args, tally)
    lengths["characters"] = [len(compared_texts(prompt)[1]) for prompt in prompts.values()]
    summary["lengths"] = {unit: _statistics(values) for unit, values in lengths.items()}

    split: dict[str, list[Prompt]] = {"train": [], "heldout": []}
    for key, prompt in prompts.items():
        side = "heldout" if is_heldout(key, heldout) else "train"
        split[side].append(prompt)
        tally[prompt["source"], side] += 1
    counts = _totals(tally)
    if not split["train"]:
        found = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise UserError(
            f"--heldout {heldout} leaves no prompts to train on ({found}); pass more of them or hold out less."
        )
    summary |= {"counts": counts, "sources": _per_source(tally)}
    out.mkdir(parents=True, exist_ok=True)
    for side, lines in split.items():
        write_atomic(out / f"{side}.jsonl", _jsonl(lines))
    write_atomic(out / "summary.json", (json.dumps(summary, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))
    _print_summary(summary)
    return counts


def prepare_benchmarks(paths: list[Path], out: Path) -> Counter:
    """Write each benchmark to out/NAME.jsonl, NAME being its file's name: all rows in order, with the ids NAME-0001 and
    so on. Returns their counts. UserError for a row that cannot be asked: a benchmark without it is another benchmark.
    """
    files = {out / f"{path.stem}.jsonl": path for path in paths}
    if len(files) < len(paths):
        names = ", ".join(sorted(str(path) for path in paths))
        raise UserError(f"benchmarks are named by their files, and two of {names} have one name; rename one.")
    _check_overwriting(paths, list(files))
    written: dict[Path, list[Prompt]] = {}
    for file, path in files.items():
        prompts = written[file] = []
        for where, row in tqdm(read_rows(path), desc=f"reading {path.name}", unit=" prompts"):
            messages, tools = to_messages(row, where), to_tools(row, where)
            reason = flaw(messages)
            if reason:
                raise UserError(f"{where}: {reason}; a benchmark is kept whole: correct the row, or take it out.")
            name = f"{path.stem}-{len(prompts) + 1:04}"
            prompts.append(_prompt(name, path.stem, messages, tools))
        if not prompts:
            raise UserError(f"{path} holds no prompts.")
    out.mkdir(parents=True, exist_ok=True)
    for file, prompts in written.items():
        write_atomic(file, _jsonl(prompts))
    return Counter({file.stem: len(prompts) for file, prompts in written.items()})


def _check_overwriting(paths: list[Path], results: list[Path]) -> None:
    for path in paths:
        if path.resolve() in [result.resolve() for result in results]:
            raise UserError(f"the result would replace its own input {path}; choose another --out.")


def _prompt(name: str, source: str, messages: list[Message], tools: list[dict[str, Any]]) -> Prompt:
    return {"id": name, "source": source, "messages": messages} | ({"tools": tools} if tools else {})


def _jsonl(prompts: list[Prompt]) -> bytes:
    return b"".join((json.dumps(prompt, ensure_ascii=False) + "\n").encode("utf-8") for prompt in prompts)


def _read_prompts(paths: list[Path], tally: Counter) -> dict[str, Prompt]:
    """The distinct prompts of all files by prompt_key, in input order; what is dropped is counted in `tally`."""
    prompts: dict[str, Prompt] = {}
    ids: dict[str, str] = {}
    for path, where, row in _rows(paths):
        source = str(path.stem if row.get("source") is None else row["source"])
        tally[source, "read"] += 1
        messages, tools = to_messages(row, where), to_tools(row, where)
        reason = flaw(messages)
        if reason:
            tally[source, f"dropped: {reason}"] += 1
            continue
        try:
            key = prompt_key(messages, tools)
        except UnicodeEncodeError:  # half of a surrogate pair: no tokenizer can encode it, no file can hold it
            tally[source, "dropped: broken Unicode"] += 1
            continue
        if key in prompts:
            tally[source, "dropped: duplicate"] += 1
            continue
        name = str(key[:16] if row.get("id") is None else row["id"])
        if name in ids:
            raise UserError(
                f"{where} and {ids[name]} both have the id {name!r}; ids name samples, make them different."
            )
        ids[name] = where
        prompts[key] = _prompt(name, source, messages, tools)
    return prompts


def _rows(paths: list[Path]) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    for path in paths:
        for where, row in tqdm(read_rows(path), desc=f"reading {path.name}", unit=" prompts"):
            yield path, where, row


def _drop_near_duplicates(prompts: dict[str, Prompt], similarity: float, tally: Counter) -> list[dict[str, Any]]:
    """Take near-duplicates out of `prompts`, count them, and return the first pairs for the summary."""
    alike = near_duplicates(prompts, compared_texts, similarity)
    examples = []
    for key in [key for key in prompts if key in alike]:
        kept, share = alike[key]
        if len(examples) < EXAMPLES:
            examples.append({"dropped": prompts[key]["id"], "kept": prompts[kept]["id"], "similarity": round(share, 3)})
        tally[prompts[key]["source"], "dropped: near-duplicate"] += 1
    for key in alike:
        del prompts[key]
    return examples


def _measure(
    prompts: dict[str, Prompt], tokenizer: PreTrainedTokenizerBase, template_args: dict[str, Any], tally: Counter
) -> tuple[list[int], dict[str, dict[str, Any]]]:
    """Tokens of each prompt up to its first open turn, and what the template said about those it refuses, with the
    number of such prompts and the id of one. Refused prompts are taken out of `prompts` and counted.
    """
    tokens: list[int] = []
    refused: dict[str, dict[str, Any]] = {}
    for key, prompt in tqdm(list(prompts.items()), desc="counting tokens", unit=" prompts"):
        talk = open_turns(prompt["messages"])
        tools = {"tools": prompt["tools"]} if "tools" in prompt else {}
        try:
            tokens.append(len(prompt_ids(tokenizer, talk[: talk.index(None)], template_args, **tools)))
        except UserError as error:
            if not isinstance(error.__cause__, (TemplateError, TypeError)):
                raise  # the template itself is unusable, whatever it is given
            reason = refused.setdefault(str(error.__cause__), {"count": 0, "example": prompt["id"]})
            reason["count"] += 1
            tally[prompt["source"], "dropped: refused by the chat template"] += 1
            del prompts[key]
    return tokens, refused


def _statistics(values: list[int]) -> dict[str, float | int]:
    """Mean, median, 90th and 99th percentile (by nearest rank) and largest of `values`; {} for none."""
    if not values:
        return {}
    median, p90, p99 = np.percentile(values, (50, 90, 99), method="inverted_cdf").tolist()
    return {"mean": round(float(np.mean(values)), 1), "median": median, "p90": p90, "p99": p99, "max": max(values)}


def _totals(tally: Counter) -> Counter:
    """The counts of all sources together: read, dropped in the order it happened, train, heldout."""
    totals = Counter({"read": 0})
    for (_, name), count in tally.items():
        totals[name] += count
    sides = {side: totals.pop(side, 0) for side in ("train", "heldout")}
    return Counter({**totals, **sides})


def _per_source(tally: Counter) -> dict[str, dict[str, int]]:
    sources: dict[str, dict[str, int]] = {}
    for (source, name), count in tally.items():
        sources.setdefault(source, {})[name] = count
    return sources


def _print_summary(summary: dict[str, Any]) -> None:
    """A line for every reason to drop prompts, with an example where that helps, and one for the lengths in tokens."""
    examples = {}
    for pair in summary.get("near_duplicates", [])[:1]:
        examples["dropped: near-duplicate"] = "{dropped!r} shares {similarity} with {kept!r}".format(**pair)
    for reason, found in summary.get("refused_by_the_chat_template", {}).items():
        examples.setdefault("dropped: refused by the chat template", f"{found['example']!r}: {reason}")
    for name, count in summary["counts"].items():
        if name.startswith("dropped"):
            print(f"{name} {count}" + (f", for example {examples[name]}" if name in examples else ""))
    for unit, statistics in summary["lengths"].items():
        print(f"{unit} of a prompt: " + ", ".join(f"{name} {value}" for name, value in statistics.items()))
