"""From finished prompts to the content of report.json.

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
    "lossless": "drafted output ids equal the target's plain greedy ids on every prompt; null when sampled, by the"
    " method `walk`, which reads the steps off the target's own text, and for a server",
    "largest_logit_gap": "by how much the target, run once more over its own drafted output, would prefer another"
    " token at most; null in float32, where outputs are compared token by token",
    "tokens_per_second": "output tokens after the first over seconds after the prompt's forward pass; `plain` is the"
    " same loop with block size 1, `generate` is transformers' own on the first prompts; null by the method `walk`;"
    " of a server's whole request",
    "speedup": "drafted over plain; speedup_over_generate: drafted over `generate`, both on its prompts",
    "training_template": "chat template of the drafter's training data, null where nothing says",
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
    comparable = facts["settings"]["temperature"] == 0 and facts["settings"]["method"] == "loop"
    report = {
        **_drafter_block(records, "drafter", block_sizes["drafter"], comparable),
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
        block = _drafter_block(records, "baseline", block_sizes["baseline"], comparable)
        report["baseline"] = {**block, "drafter": identity}
    return report


def _drafter_block(records: list[dict], role: str, block_size: int, comparable: bool) -> dict:
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
    timed = [record for record in records if "generate" in record]
    rates = {"plain": tokens_per_second(plain), "drafted": tokens_per_second(runs),
             "generate": tokens_per_second([record["generate"] for record in timed])}
    gaps = [gap for run in runs for gap in run.get("logit_gaps", [])]
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
        "lossless": not differences if comparable else None,
        "differences": differences if comparable else None,
        "largest_logit_gap": max(gaps, default=None),
        "speedup": _over(rates["drafted"], rates["plain"]),
        "speedup_over_generate": _over(tokens_per_second([record[role] for record in timed]), rates["generate"]),
        "tokens_per_second": rates,
        "seconds": {"plain": _sum_seconds(plain), "drafted": _sum_seconds(runs)},
        "emitted_per_step": [[a + 1 for a in run] for run in accepted],
        "output_ids": [run["output_ids"] for run in runs],
    }


def _source_block(records: list[dict]) -> dict:
    """The numbers of one benchmark alone."""
    accepted = [record["drafter"]["accepted"] for record in records]
    plain, drafted = (tokens_per_second([record[role] for record in records]) for role in ("plain", "drafter"))
    return {"prompts": len(records), "tau": acceptance.tau_pooled(accepted).value,
            "tau_interval": bootstrap.tau_interval(accepted),
            "tau_mean_of_prompts": acceptance.tau_mean_of_prompts(accepted), "speedup": _over(drafted, plain)}


def _over(rate: float | None, other: float | None) -> float | None:
    return rate / other if rate and other else None


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
