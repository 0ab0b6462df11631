"""Two evaluations of the same prompts: the paired difference, and what cannot be compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.errors import UserError
from pipeline.comparison import compare, format_rows
from pipeline.plots import plot_comparison
from pipeline.report import build_report

SECONDS = {"prefill": 1.0, "draft": 1.0, "verify": 1.0, "rest": 1.0}
SETTINGS = {"max_new_tokens": 8, "temperature": 0.0, "stop_token_ids": [2], "dtype": "float32", "method": "loop"}


def report(folder: Path, accepted: list[list[int]], prompts=None, **settings) -> Path:
    """A report.json of one drafter that accepted so many tokens at each step of each prompt."""
    run = {"output_ids": [1, 2, 3], "drafted": [], "accepted": [], "seconds": SECONDS}
    records = [
        {"prompt_token_ids": ids, "plain": run, "drafter": {**run, "accepted": own, "drafted": [3] * len(own)}}
        for ids, own in zip(prompts or [[i] for i in range(len(accepted))], accepted)
    ]
    facts = {"target": {"weights_sha256": "t"}, "template": None, "settings": SETTINGS | settings}
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(build_report(records, ["p"] * len(records), {"drafter": 4}, facts)))
    return folder / "report.json"


ONE = [[base] * 10 for base in (0, 1, 2) * 4]
BETTER = [[min(a + (i % 5 == 0), 3) for i, a in enumerate(run)] for run in ONE]


def test_a_small_gain_on_every_prompt_is_told_from_none(tmp_path):
    rows = compare([report(tmp_path / "a", ONE), report(tmp_path / "b", BETTER), report(tmp_path / "c", ONE)])
    assert [row["tau"] for row in rows] == pytest.approx([2.0, 2.2, 2.0])
    assert rows[0]["difference"] is None and rows[2]["difference"] == 0
    assert rows[1]["difference"] == pytest.approx(0.2) and rows[1]["difference_interval"] == pytest.approx((0.2, 0.2))
    marks = [line.endswith("*") for line in format_rows(rows).splitlines()[1:]]
    assert marks == [False, True, False]
    plot_comparison(rows, tmp_path / "taus.png")
    assert (tmp_path / "taus.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("change, name", [
    ({"prompts": [[9]] * len(ONE)}, "prompt_token_ids"), ({"temperature": 1.0}, "settings.temperature")])
def test_other_prompts_or_settings_are_refused_by_name(tmp_path, change, name):
    with pytest.raises(UserError, match=f"differ in {name}; compare"):
        compare([report(tmp_path / "a", ONE), report(tmp_path / "b", BETTER, **change)])


def test_a_report_that_is_missing_or_old_is_an_error_without_a_traceback(tmp_path):
    report(tmp_path / "a", ONE)
    command = [sys.executable, "launch/compare.py", str(tmp_path / "a"), str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "there is no report" in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(UserError, match="has no emitted_per_step"):
        compare([tmp_path / "old.json"])
