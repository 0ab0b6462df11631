"""From finished prompts to report.json and the table on the terminal.

A record is one prompt's line of the result log: `prompt_token_ids` and, for each of `plain`, `drafter` and (where a
second drafter was given) `baseline`, a run: `output_ids`, `drafted` and `accepted` per verification step, `seconds`.
"""

from __future__ import annotations

from dataclasses import asdict

from pipeline import acceptance, bootstrap
from pipeline.speculate import Generation

NOTES = {
    "tau": "tokens emitted per verification step (accepted + 1), all steps of all prompts pooled",
    "tau_interval": "95 % percentile bootstrap over prompts, null for fewer than two",
    "emitted_per_step": "one list per prompt: accepted + 1 of every verification step as the target judged it, the last"
    " step too when a stop token or the length limit cut its tokens off the output; the first token of an output"
    " comes from the prompt's forward pass and belongs to no step",
    "output_ids": "response ids of the drafted runs, one list per prompt, prompt excluded",
    "lossless": "drafted output ids equal the target's plain greedy ids on every prompt; null when sampled",
    "tokens_per_second": "output tokens after the first over seconds after the prompt's forward pass; `plain` is the"
    " same loop with block size 1",
    "accepted_per_slot": "share of steps that accepted slot 1, 2, ...; the conditional share is among the steps that"
    " accepted the slot before, null where none did",
}


def run_record(generation: Generation) -> dict:
    """A generation as plain JSON values."""
    return {
        "output_ids": generation.output_ids,
        "drafted": [step.drafted for step in generation.steps],
        "accepted": [step.accepted for step in generation.steps],
        "seconds": asdict(generation.seconds),
    }


def build_report(records: list[dict], sources: list[str], block_sizes: dict[str, int], facts: dict) -> dict:
    """The content of report.json; `sources` names the benchmark of every record, `block_sizes` K for `drafter` and, if
    evaluated, `baseline`."""
    sampled = facts["settings"]["temperature"] > 0
    report = {
        **_drafter_block(records, "drafter", block_sizes["drafter"], sampled),
        "prompts": len(records),
        "sources": sources,
        "by_source": {name: _source_block([r for r, s in zip(records, sources) if s == name])
                      for name in dict.fromkeys(sources)},
        "prompt_token_ids": [record["prompt_token_ids"] for record in records],
        **facts,
        "notes": NOTES,
    }
    if "baseline" in block_sizes:
        identity = report.pop("baseline")
        block = _drafter_block(records, "baseline", block_sizes["baseline"], sampled)
        report["baseline"] = {**block, "drafter": identity}
    return report


def _drafter_block(records: list[dict], role: str, block_size: int, sampled: bool) -> dict:
    runs, plain = [record[role] for record in records], [record["plain"] for record in records]
    accepted = [run["accepted"] for run in runs]
    tau = acceptance.tau_pooled(accepted)
    per_slot = acceptance.accepted_per_slot(accepted, block_size)
    conditional = acceptance.accepted_per_slot_conditional(accepted, block_size)
    differences = [
        {"prompt": i, "position": first_difference(run["output_ids"], own["output_ids"])}
        for i, (run, own) in enumerate(zip(runs, plain))
        if run["output_ids"] != own["output_ids"]
    ]
    rates = {"plain": tokens_per_second(plain), "drafted": tokens_per_second(runs)}
    return {
        "tau": tau.value,
        "tau_interval": bootstrap.tau_interval(accepted),
        "tau_mean_of_prompts": acceptance.tau_mean_of_prompts(accepted),
        "tau_mean_of_prompts_interval": bootstrap.mean_of_prompts_interval(accepted),
        "accepted_per_slot": [ratio.value for ratio in per_slot],
        "accepted_per_slot_conditional": [ratio.value for ratio in conditional],
        "accepted_per_slot_counts": [ratio.numerator for ratio in per_slot],
        "accepted_histogram": acceptance.accepted_histogram(accepted, block_size),
        "verification_steps": tau.denominator,
        "emitted_tokens": tau.numerator,
        "drafted_tokens": sum(sum(run["drafted"]) for run in runs),
        "lossless": None if sampled else not differences,
        "differences": None if sampled else differences,
        "speedup": _speedup(rates),
        "tokens_per_second": rates,
        "seconds": {"plain": _sum_seconds(plain), "drafted": _sum_seconds(runs)},
        "emitted_per_step": [[a + 1 for a in run] for run in accepted],
        "output_ids": [run["output_ids"] for run in runs],
    }


def _source_block(records: list[dict]) -> dict:
    """The numbers of one benchmark alone."""
    accepted = [record["drafter"]["accepted"] for record in records]
    rates = {"plain": tokens_per_second([r["plain"] for r in records]),
             "drafted": tokens_per_second([r["drafter"] for r in records])}
    return {"prompts": len(records), "tau": acceptance.tau_pooled(accepted).value,
            "tau_interval": bootstrap.tau_interval(accepted),
            "tau_mean_of_prompts": acceptance.tau_mean_of_prompts(accepted), "speedup": _speedup(rates)}


def _speedup(rates: dict[str, float | None]) -> float | None:
    return rates["drafted"] / rates["plain"] if all(rates.values()) else None


def first_difference(a: list[int], b: list[int]) -> int:
    """First index at which two different lists differ; the shorter one's length when it is a prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def tokens_per_second(runs: list[dict]) -> float | None:
    """Tokens after the first over seconds after the prefill; None when no prompt went past its first token, or nothing
    was timed."""
    tokens = sum(len(run["output_ids"]) - 1 for run in runs)
    seconds = sum(run["seconds"][part] for run in runs for part in ("draft", "verify", "rest"))
    return tokens / seconds if tokens and seconds else None


def _sum_seconds(runs: list[dict]) -> dict[str, float]:
    return {part: sum(run["seconds"][part] for run in runs) for part in ("prefill", "draft", "verify", "rest")}


def format_table(report: dict) -> str:
    """Aligned rows for the terminal: the trained drafter and, where evaluated, the untrained one."""
    rows = [("", "tau", "95 %", "tok/s plain", "tok/s drafted", "speed-up", "lossless", "acceptance per slot")]
    blocks = {"trained": report} | ({"untrained": report["baseline"]} if "baseline" in report else {})
    for name, block in blocks.items():
        rate = block["tokens_per_second"]
        slots = " ".join(_number(share, 2) for share in block["accepted_per_slot"])
        rows.append((
            name, _number(block["tau"], 3), _interval(block["tau_interval"]), _number(rate["plain"], 1), _number(rate["drafted"], 1),
            _times(block["speedup"]), _lossless(block), slots,
        ))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = [
        "  ".join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:])), slots])
        for name, *cells, slots in rows
    ]
    lines += [f"output equals the target's own greedy output ({name}): {_lossless_line(block, report)}"
              for name, block in blocks.items()]
    return "\n".join(line.rstrip() for line in lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _interval(ends: list[float] | None) -> str:
    return "-" if ends is None else "{:.2f}..{:.2f}".format(*ends)


def _lossless(block: dict) -> str:
    return {True: "yes", False: "no", None: "-"}[block["lossless"]]


def _lossless_line(block: dict, report: dict) -> str:
    if block["lossless"] is None:
        return "not compared, tokens were sampled"
    if block["lossless"]:
        return "yes"
    first, dtype = block["differences"][0], report["settings"]["dtype"]
    line = (
        f"no, {len(block['differences'])} of {report['prompts']} prompts differ, the first is prompt {first['prompt']}"
        f" at response token {first['position']}"
    )
    return line if dtype == "float32" else f"{line} ({dtype} rounding turns near-ties; compare with --dtype float32)"
