"""A report as text: the table on the terminal, and report.md."""

from __future__ import annotations


def format_table(report: dict) -> str:
    """Aligned rows for the terminal: the trained drafter and, where evaluated, the untrained one."""
    rows = [("", "tau", "95 %", "tok/s plain", "tok/s drafted", "speed-up", "lossless", "acceptance per slot")]
    blocks = {"trained": report} | ({"untrained": report["baseline"]} if "baseline" in report else {})
    for name, block in blocks.items():
        rate = block["tokens_per_second"]
        slots = " ".join(_number(share, 2) for share in block["accepted_per_slot"])
        rows.append(
            (
                name,
                _number(block["tau"], 3),
                _interval(block["tau_interval"]),
                _number(rate["plain"], 1),
                _number(rate["drafted"], 1),
                _times(block["speedup"]),
                _lossless(block),
                slots,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = [
        "  ".join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:])), slots])
        for name, *cells, slots in rows
    ]
    lines += [
        f"output equals the target's own greedy output ({name}): {_lossless_line(block, report)}"
        for name, block in blocks.items()
    ]
    return "\n".join(line.rstrip() for line in lines)


def markdown(report: dict) -> str:
    """report.md: what was measured, drafter by drafter and benchmark by benchmark."""
    settings, template = report["settings"], report["template"]
    blocks = {"trained": report} | ({"untrained": report["baseline"]} if "baseline" in report else {})
    rows = [["", "tau", "95 %", "mean of prompts", "95 %", "speed-up", "over `generate`", "lossless"]]
    rows += [
        [
            name,
            _number(block["tau"], 3),
            _interval(block["tau_interval"]),
            _number(block["tau_mean_of_prompts"], 3),
            _interval(block["tau_mean_of_prompts_interval"]),
            _times(block["speedup"]),
            _times(block["speedup_over_generate"]),
            _lossless(block),
        ]
        for name, block in blocks.items()
    ]
    parts = [_table(rows)]
    if len(report["by_source"]) > 1:
        rows = [["prompts of", "number", "tau", "95 %", "mean of prompts", "speed-up"]]
        rows += [
            [
                name,
                str(one["prompts"]),
                _number(one["tau"], 3),
                _interval(one["tau_interval"]),
                _number(one["tau_mean_of_prompts"], 3),
                _times(one["speedup"]),
            ]
            for name, one in report["by_source"].items()
        ]
        parts.append(_table(rows))
    slots = range(1, len(report["accepted_per_slot"]) + 1)
    rows = [["slot", *map(str, slots)]]
    rows.append(["accepted with all before it", *(_number(share, 3) for share in report["accepted_per_slot"])])
    rows.append(
        ["accepted, given the one before", *(_number(share, 3) for share in report["accepted_per_slot_conditional"])]
    )
    parts.append(_table(rows))
    histogram, steps = report["accepted_histogram"], report["verification_steps"]
    parts.append(
        _table([["tokens accepted by a step", *map(str, range(len(histogram)))], ["steps", *map(str, histogram)]])
    )
    seconds = report["seconds"]
    if any(seconds["drafted"].values()):
        rows = [["seconds", *seconds["drafted"]]]
        rows += [[name, *(_number(value, 2) for value in parts_of.values())] for name, parts_of in seconds.items()]
        parts.append(_table(rows))
    trained = report["training_template"]
    parts.append(
        "\n".join(
            [
                (
                    f"- {report['prompts']} prompts, {steps} verification steps, {report['emitted_tokens']} tokens"
                    f" emitted by them, {report['drafted_tokens']} drafted"
                ),
                "- " + ", ".join(f"{name} {value}" for name, value in settings.items()),
                f"- chat template {template['sha256']} with {template['args']}; in training "
                + (f"{trained['sha256']} with {trained['args']}" if trained else "unknown"),
                f"- target {report['target']['name']}, drafter {report['drafter']['name']}",
                *(
                    f"- output equals the target's own greedy output ({name}): {_lossless_line(block, report)}"
                    for name, block in blocks.items()
                ),
            ]
        )
    )
    return "\n\n".join(parts) + "\n"


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


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
        if report["settings"]["temperature"] > 0:
            return "not compared, tokens were sampled"
        walked = report["settings"]["method"] == "walk"
        return "not compared, the steps were read off it" if walked else "not compared, a server has no plain run"
    if block["lossless"]:
        return "yes"
    first, dtype = block["differences"][0], report["settings"]["dtype"]
    line = (
        f"no, {len(block['differences'])} of {report['prompts']} prompts differ, the first is prompt {first['prompt']}"
        f" at response token {first['position']}"
    )
    return (
        line
        if dtype == "float32"
        else (
            f"{line} ({dtype} rounding turns near-ties: run over its own output again, the target prefers another token"
            f" by {block['largest_logit_gap']:.3f} at most; --dtype float32 compares exactly)"
        )
    )
