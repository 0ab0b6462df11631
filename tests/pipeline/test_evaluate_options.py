"""What one evaluation can cover: benchmarks by name, several temperatures, several processes, steps without times."""

import json

import pytest
import torch

from data_prep.target import read_config
from data_prep.tiny_target import make_tiny_target
from data_prep.tokens import load_tokenizer, template_sha256
from pipeline.drafter import DFlashDrafter
from pipeline.drafter_config import DrafterConfig
from pipeline.report_text import markdown
from pipeline.results import ResultLog
from pipeline.speculate import generate_plain
from pipeline.trace import logit_gaps
from tests.evaluations import CASES, GOLDEN, arguments, golden_prompts, report_of, script, without_times, write_lines


@pytest.fixture(scope="module")
def evaluate():
    torch.set_num_threads(1)
    return script("evaluate")


@pytest.fixture(scope="module")
def chat_pair(tmp_path_factory):
    """A tiny random target with a chat template, a random drafter, and the export's record of its training template."""
    folder = tmp_path_factory.mktemp("chat")
    target, drafter = make_tiny_target(folder / "target"), folder / "drafter"
    config = DrafterConfig.for_target(
        read_config(target), num_layers=1, block_size=4, mask_token_id=297, target_layer_ids=[1, 3], vocab_size=300
    )
    DFlashDrafter(config).initialise(seed=0).save_pretrained(drafter)
    template = {"sha256": template_sha256(load_tokenizer(target)), "args": {}}
    (drafter / "training.json").write_text(json.dumps({"template": template}))
    return target, drafter


def test_the_walk_reports_what_the_loop_reports_without_times(evaluate, tmp_path):
    prompts, reports = golden_prompts(tmp_path / "prompts.jsonl"), {}
    for method, more in (("loop", []), ("walk", ["--walk"])):
        argv = arguments(prompts, tmp_path / method, "--max-new-tokens", 20, "--baseline", GOLDEN / "drafter", *more)
        assert evaluate.main(argv) == 0
        reports[method] = report_of(tmp_path / method)
    walk, loop = reports["walk"], reports["loop"]
    for block, other in ((walk, loop), (walk["baseline"], loop["baseline"])):
        for name in (
            "emitted_per_step",
            "output_ids",
            "tau",
            "tau_interval",
            "accepted_histogram",
            "accepted_per_slot",
        ):
            assert block[name] == other[name]
        assert block["lossless"] is None and block["speedup"] is None and other["speedup_over_generate"] > 0
    assert (
        walk["settings"]["method"] == "walk"
        and "the steps were read off it" in (tmp_path / "walk/report.md").read_text()
    )


def test_benchmarks_are_named_limited_and_reported_one_by_one_and_together(evaluate, chat_pair, tmp_path, capsys):
    target, drafter = chat_pair
    bench = tmp_path / "benchmarks"
    bench.mkdir()
    write_lines(bench / "gsm8k.jsonl", [{"turns": [f"Add {i}."]} for i in range(5)])
    write_lines(bench / "mt-bench.jsonl", [{"turns": [f"Tell {i}.", "More."]} for i in range(5)])
    argv = [
        "--target",
        str(target),
        "--drafter",
        str(drafter),
        "--benchmarks",
        str(bench),
        "--benchmark",
        "gsm8k",
        "mt-bench",
        "--limit",
        "2",
        "--max-new-tokens",
        "6",
        "--out",
        str(tmp_path / "report"),
    ]
    assert evaluate.main(argv) == 0
    report, text = report_of(tmp_path / "report"), (tmp_path / "report/report.md").read_text()
    assert report["sources"] == ["gsm8k"] * 2 + ["mt-bench"] * 4
    assert {name: block["prompts"] for name, block in report["by_source"].items()} == {"gsm8k": 2, "mt-bench": 4}
    steps = [run for run, source in zip(report["emitted_per_step"], report["sources"]) if source == "gsm8k"]
    assert report["by_source"]["gsm8k"]["tau"] == sum(map(sum, steps)) / sum(map(len, steps))
    assert "| mt-bench | 4 |" in text and text == markdown(report)
    assert report["training_template"] == report["template"] and "warning" not in capsys.readouterr().err
    argv[argv.index("mt-bench")] = "mmlu"
    assert evaluate.main(argv) == 2
    assert "has no mmlu.jsonl (it has gsm8k, mt-bench)" in capsys.readouterr().err


def test_several_temperatures_give_a_report_each(evaluate, tmp_path, capsys):
    prompts = golden_prompts(tmp_path / "prompts.jsonl", count=2)
    assert evaluate.main(arguments(prompts, tmp_path / "out", "--max-new-tokens", 8, "--temperature", 0, 4)) == 0
    greedy, sampled = (report_of(tmp_path / f"out/temperature-{t}") for t in ("0", "4"))
    assert (greedy["lossless"], sampled["lossless"]) == (True, None)
    assert [r["settings"]["temperature"] for r in (greedy, sampled)] == [0, 4]
    assert greedy["output_ids"] != sampled["output_ids"]
    assert evaluate.main(arguments(prompts, tmp_path / "out", "--temperature", 0, 4, "--walk")) == 2
    assert "walk reads the steps off greedy text, temperature is 4" in capsys.readouterr().err


def logged(path) -> list[tuple[int, int]]:
    return [(line["prompt"], line["turn"]) for line in map(json.loads, path.read_text().splitlines()) if "prompt" in line]


def test_tasks_share_the_prompts_and_the_report_is_that_of_one_process(evaluate, tmp_path, capsys, monkeypatch):
    prompts = golden_prompts(tmp_path / "prompts.jsonl")
    argv = arguments(prompts, tmp_path / "shared", "--max-new-tokens", 12)
    first, second = tmp_path / "shared/results-0.jsonl", tmp_path / "shared/results-1.jsonl"
    append = ResultLog.append

    def the_other_task_starts_when_one_prompt_is_done(log, *record):
        append(log, *record)
        if log.path == first and not second.exists():
            assert evaluate.main([*argv, "--task", "1", "--num-tasks", "2"]) == 0

    monkeypatch.setattr(ResultLog, "append", the_other_task_starts_when_one_prompt_is_done)
    assert evaluate.main([*argv, "--task", "0", "--num-tasks", "2"]) == 0
    # Its own prompts, then those that the first task would come to last; nothing is left when that one goes on.
    assert logged(second) == [(1, 0), (3, 0), (5, 0), (4, 0), (2, 0)] and logged(first) == [(0, 0)]
    assert not (tmp_path / "shared/report.json").exists()
    assert evaluate.main(argv) == 0
    assert "resuming: 6 of 6 prompts are done" in capsys.readouterr().out
    assert evaluate.main(arguments(prompts, tmp_path / "alone", "--max-new-tokens", 12)) == 0
    shared, alone = (without_times(report_of(tmp_path / name)) for name in ("shared", "alone"))
    assert shared == alone
    assert evaluate.main([*argv, "--task", "2", "--num-tasks", "2"]) == 2


@pytest.mark.parametrize(
    "trained, message",
    [
        (
            {"sha256": None, "args": {"enable_thinking": False}},
            "args is {} here and {'enable_thinking': False} in its training",
        ),
        (None, "does not say which chat template"),
    ],
)
def test_prompts_rendered_otherwise_than_the_training_data_are_warned_of(
    evaluate, chat_pair, tmp_path, capsys, trained, message
):
    """Case 103: the switch of a thinking template decides the accepted length."""
    target, drafter = chat_pair
    other = tmp_path / "drafter"
    DFlashDrafter.from_pretrained(drafter).save_pretrained(other)
    if trained:
        (other / "training.json").write_text(json.dumps({"template": trained}))
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "Hi"}])
    assert (
        evaluate.main(arguments(prompts, tmp_path / "report", "--max-new-tokens", 3, target=target, drafter=other)) == 0
    )
    assert (
        f"warning: the {'chat template' if trained else 'drafter'}" in (err := capsys.readouterr().err)
        and message in err
    )
    report = report_of(tmp_path / "report")
    assert report["training_template"] == trained and report["template"]["sha256"]


def test_a_bfloat16_output_is_judged_by_the_target_run_again_over_it(evaluate, tmp_path):
    """Case 105: near-ties turn with rounding, so only float32 is compared token by token with another text."""
    prompts = golden_prompts(tmp_path / "prompts.jsonl", count=3)
    argv = arguments(prompts, tmp_path / "report", "--max-new-tokens", 24)
    argv[argv.index("float32")] = "bfloat16"
    assert evaluate.main(argv) == 0
    assert 0 <= report_of(tmp_path / "report")["largest_logit_gap"] < 0.2
    target = evaluate.EvaluationTarget(GOLDEN / "target", evaluate.Settings(dtype="float32")).model
    prompt = CASES[0]["prompt"]
    own = generate_plain(target, prompt, 12).output_ids
    assert max(logit_gaps(target, prompt, own)) < 1e-4
    wrong = [*own[:6], (own[6] + 1) % 90, *own[7:]]
    assert logit_gaps(target, prompt, wrong)[6] > 0.2


def test_the_time_of_transformers_generate_is_taken_on_the_same_text(evaluate, tmp_path):
    prompts = golden_prompts(tmp_path / "prompts.jsonl", count=5)
    assert evaluate.main(arguments(prompts, tmp_path / "report", "--max-new-tokens", 10)) == 0
    records = [json.loads(line) for line in (tmp_path / "report/results.jsonl").read_text().splitlines()[1:]]
    timed = [record for record in records if "generate" in record]
    assert [record["prompt"] for record in timed] == [0, 1, 2]
    for record in timed:
        assert (
            record["generate"]["output_ids"] == record["plain"]["output_ids"]
            and record["generate"]["seconds"]["verify"] > 0
        )
    rates = report_of(tmp_path / "report")
    tokens = sum(len(record["drafter"]["output_ids"]) - 1 for record in timed)
    drafted = tokens / sum(
        record["drafter"]["seconds"][part] for record in timed for part in ("draft", "verify", "rest")
    )
    assert rates["speedup_over_generate"] == pytest.approx(drafted / rates["tokens_per_second"]["generate"])
