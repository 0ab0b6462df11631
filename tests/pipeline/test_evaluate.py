import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from data_prep.errors import UserError
from data_prep.tiny_target import make_tiny_target
from data_prep.tokens import load_tokenizer, template_sha256
from pipeline import evaluation_target
from pipeline.drafter import DFlashDrafter
from pipeline.drafter_config import DrafterConfig
from pipeline.plots import plot_acceptance, plot_training
from pipeline.report import NOTES
from tests.evaluations import (
    CASES, GOLDEN, ROOT, arguments, golden_prompts, report_of, script, without_times, write_lines)

SCRIPT = ROOT / "launch" / "evaluate.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def evaluate():
    return script("evaluate")


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untrained")
    DFlashDrafter.from_pretrained(GOLDEN / "drafter").initialise(seed=0).save_pretrained(folder)
    return folder


# --- the report ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(evaluate, untrained, tmp_path_factory):
    """One full evaluation of the golden pair with its untrained twin: the folder and what was printed."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("evaluated")
    history = write_lines(folder / "metrics.jsonl", [
        {"step": i, "loss": 3 / i, "lr": 1e-3 / i, "accepted_length": 1 + i / 50, "accuracy": i / 50}
        for i in range(1, 50)
    ])
    prompts, out = golden_prompts(folder / "prompts.jsonl"), folder / "report"
    argv = arguments(prompts, out, "--max-new-tokens", 40, "--baseline", untrained, "--history", history)
    assert evaluate.main(argv) == 0
    return argv, out


def test_report_reproduces_the_golden_generations(evaluated):
    report = report_of(evaluated[1])
    assert report["output_ids"] == [case["output_ids"][len(case["prompt"]) :] for case in CASES]
    assert report["prompt_token_ids"] == [case["prompt"] for case in CASES]
    for emitted, case in zip(report["emitted_per_step"], CASES):
        assert emitted == case["accepted_per_step"][: len(emitted)]
    assert report["lossless"] is True and report["differences"] == []


def test_report_numbers_follow_from_its_steps(evaluated):
    report = report_of(evaluated[1])
    for block in (report, report["baseline"]):
        emitted = [n for run in block["emitted_per_step"] for n in run]
        assert block["tau"] == sum(emitted) / len(emitted) == block["emitted_tokens"] / block["verification_steps"]
        assert block["tau"] == pytest.approx(1 + sum(block["accepted_per_slot"]))
        means = [sum(run) / len(run) for run in block["emitted_per_step"]]
        assert block["tau_mean_of_prompts"] == pytest.approx(sum(means) / len(means))
        assert block["drafted_tokens"] == 7 * len(emitted)
        assert sum(block["accepted_histogram"]) == len(emitted)
        rate = block["tokens_per_second"]
        assert block["speedup"] == pytest.approx(rate["drafted"] / rate["plain"])
        assert set(block["seconds"]["drafted"]) == {"prefill", "draft", "verify", "rest"}
        assert block["seconds"]["plain"]["draft"] < block["seconds"]["drafted"]["draft"]
        for run, ids in zip(block["emitted_per_step"], block["output_ids"]):
            assert 1 + sum(run[:-1]) < len(ids) <= 1 + sum(run)  # only the last step can be cut


def test_the_untrained_twin_is_reported_beside_on_the_same_prompts(evaluated):
    report = report_of(evaluated[1])
    baseline = report["baseline"]
    assert baseline["lossless"] is True and baseline["output_ids"] == report["output_ids"]
    assert baseline["tau"] < 1.2 < 4 < report["tau"]
    assert baseline["seconds"]["plain"] == report["seconds"]["plain"]
    assert baseline["drafter"]["weights_sha256"] != report["drafter"]["weights_sha256"]


def test_report_says_what_was_measured_and_on_what(evaluated):
    report = report_of(evaluated[1])
    assert report["settings"]["max_new_tokens"] == 40 and report["settings"]["dtype"] == "float32"
    assert report["template"] == {"sha256": None, "args": {}}
    assert {"torch", "transformers", "git"} <= set(report["versions"])
    assert "prompt excluded" in report["notes"]["output_ids"] and report["notes"] == NOTES


def test_prompts_are_written_for_engines_and_plots_are_pictures(evaluated):
    out = evaluated[1]
    lines = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert lines == [{"prompt_token_ids": case["prompt"]} for case in CASES]
    for name in ("acceptance.png", "training.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_a_rerun_loads_no_weights_and_gives_the_same_report(evaluate, evaluated, capsys, monkeypatch):
    argv, out = evaluated
    for loader in ("load_model", "DFlashDrafter"):
        monkeypatch.delattr(evaluation_target, loader)
    before, log = report_of(out), (out / "results.jsonl").read_bytes()
    assert evaluate.main(argv) == 0
    assert (out / "results.jsonl").read_bytes() == log
    assert report_of(out) == before
    printed = capsys.readouterr().out
    assert "resuming: 6 of 6 prompts are done" in printed
    assert "output equals the target's own greedy output (trained): yes" in printed
    assert "output equals the target's own greedy output (untrained): yes" in printed
    assert f"{before['tau']:.3f}" in printed and str(out / "report.json") in printed


def test_show_prints_the_finished_table_again(evaluate, evaluated, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        evaluate.main(["--show", str(evaluated[1])])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "speed-up" in printed and str(evaluated[1] / "training.png") in printed
    assert evaluate.main(["--show", str(tmp_path)]) == 2
    assert "holds no report.json" in capsys.readouterr().err


def test_a_changed_configuration_starts_over_and_says_what_changed(evaluate, evaluated, tmp_path, capsys):
    out = tmp_path / "report"
    shutil.copytree(evaluated[1], out)
    prompts = golden_prompts(tmp_path / "prompts.jsonl")
    assert evaluate.main(arguments(prompts, out, "--max-new-tokens", 7)) == 0
    printed = capsys.readouterr().out
    assert "another configuration" in printed and "settings.max_new_tokens was 40, is 7" in printed
    assert "resuming" not in printed
    assert [len(ids) for ids in report_of(out)["output_ids"]] == [7] * 6


def test_killed_half_way_the_next_run_carries_on(evaluate, evaluated, tmp_path):
    """SIGKILL after some prompts, a line torn in the middle besides: the end is the uninterrupted run's report."""
    prompts, out = golden_prompts(tmp_path / "prompts.jsonl"), tmp_path / "report"
    argv = arguments(prompts, out, "--max-new-tokens", 40)
    process = subprocess.Popen([sys.executable, SCRIPT, *argv], env=ENVIRONMENT, cwd=tmp_path,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = out / "results.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_bytes().count(b"\n") >= 3):  # the configuration and two prompts
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "report.json").exists()
    finished = log.read_bytes()
    finished = finished[: finished.rfind(b"\n") + 1]
    log.write_bytes(finished + b'{"key": "torn')
    assert evaluate.main(argv) == 0
    assert log.read_bytes().startswith(finished)
    expected = without_times(report_of(evaluated[1]))
    del expected["baseline"], expected["settings"]
    got = without_times(report_of(out))
    del got["settings"]
    assert got == expected


# --- text prompts -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat_pair(tmp_path_factory):
    """A tiny random target with a tokenizer and a chat template, and a random drafter for it."""
    folder = tmp_path_factory.mktemp("chat")
    target = make_tiny_target(folder / "target")
    config = DrafterConfig.for_target(json.loads((target / "config.json").read_text()), num_layers=1, block_size=4,
                                      mask_token_id=297, target_layer_ids=[1, 3], vocab_size=300)
    DFlashDrafter(config).initialise(seed=0).save_pretrained(folder / "drafter")
    return target, folder / "drafter"


def test_chats_are_rendered_as_served_and_later_turns_follow_the_targets_answers(evaluate, chat_pair, tmp_path):
    target, drafter = chat_pair
    user = {"role": "user", "content": "Sort words."}
    prompts = write_lines(tmp_path / "prompts.jsonl", [
        {"turns": ["Sort words.", "Why?"]},
        {"messages": [user]},
        {"messages": [user, {"role": "assistant", "content": "Somebody else's answer."}]},
        {"messages": [user, {"role": "user", "content": "Why?"}]},  # what `prompts` makes of two turns
    ])
    out = tmp_path / "report"
    argv = arguments(prompts, out, "--max-new-tokens", 8, target=target, drafter=drafter)
    assert evaluate.main(argv) == 0
    report = report_of(out)
    tokenizer = load_tokenizer(target)
    answer = tokenizer.decode(report["output_ids"][0], skip_special_tokens=True)
    first = tokenizer.apply_chat_template([user], add_generation_prompt=True)["input_ids"]
    chat = [user, {"role": "assistant", "content": answer}, {"role": "user", "content": "Why?"}]
    second = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert report["prompt_token_ids"] == [first, second, first, first, first, second]
    assert report["lossless"] is True
    assert report["template"]["sha256"] == template_sha256(tokenizer)
    assert report["settings"]["stop_token_ids"] == [tokenizer.eos_token_id]


def test_sampled_runs_are_repeatable_and_make_no_claim_of_equal_output(evaluate, tmp_path):
    prompts = golden_prompts(tmp_path / "prompts.jsonl", count=2)
    reports = []
    for name in ("a", "b"):
        assert evaluate.main(arguments(prompts, tmp_path / name, "--max-new-tokens", 12, "--temperature", 3)) == 0
        reports.append(without_times(report_of(tmp_path / name)))
    assert reports[0] == reports[1]
    assert reports[0]["lossless"] is None and reports[0]["tau"] >= 1


def test_generation_ends_at_the_targets_stop_token_unless_told_otherwise(evaluate, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(GOLDEN / "target", target)
    response = CASES[1]["output_ids"][len(CASES[1]["prompt"]) :]
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [response[5]]}))
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt_token_ids": CASES[1]["prompt"]}])
    argv = arguments(prompts, tmp_path / "report", "--max-new-tokens", 20, target=target)
    assert evaluate.main(argv) == 0
    assert report_of(tmp_path / "report")["output_ids"] == [response[:6]]
    assert evaluate.main([*argv, "--ignore-eos"]) == 0
    assert report_of(tmp_path / "report")["output_ids"] == [response[:20]]


# --- errors -------------------------------------------------------------------------------------------------------


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def drafter_with(tmp_path, **changes):
    folder = tmp_path / "drafter"
    shutil.copytree(GOLDEN / "drafter", folder)
    edit_json(folder / "config.json", **changes)
    return folder


@pytest.mark.parametrize("lines, message", [
    (['{"prompt_token_ids": [1, 2]'], "is not JSON"),
    (['{"text": "hello"}'], "prompts.jsonl:1: keys ['text']"),
    (['{"turns": ["a"], "prompt_token_ids": [1]}'], "holds prompt_token_ids and turns"),
    (['{"prompt_token_ids": []}'], "at least one int"),
    (['{"prompt_token_ids": [1, 96]}'], r"token id 96 is not a row of the target's embedding table (0..95)"),
    (['{"prompt_token_ids": [' + "1, " * 230 + "1]}"], "231 prompt tokens + 48 new ones exceed the target's 256"),
    (['{"turns": ["hello"]}'], "needs the tokenizer"),
    ([""], "holds 0 prompts"),
])
def test_bad_prompts_are_refused_in_one_line_before_anything_runs(evaluate, tmp_path, capsys, lines, message):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f"{line}\n" for line in lines))
    assert evaluate.main(arguments(prompts, tmp_path / "report")) == 2
    assert_one_error(capsys.readouterr().err, message)
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("changes, message", [
    ({"num_target_layers": 8}, "num_target_layers is 8, the target has 6"),
    ({"vocab_size": 97}, "vocab_size is 97, the target has 96"),
    ({"dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 5]}}, "target_layer_ids [1, 5]"),
    ({"dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 3]}}, "mask_token_id 96"),
    ({"dflash_config": {"mask_token_id": 95}}, "lacks dflash_config.target_layer_ids"),
])
def test_a_drafter_that_does_not_fit_is_refused(evaluate, tmp_path, capsys, changes, message):
    prompts = golden_prompts(tmp_path / "prompts.jsonl")
    drafter = drafter_with(tmp_path, **changes)
    assert evaluate.main(arguments(prompts, tmp_path / "report", drafter=drafter)) == 2
    assert_one_error(capsys.readouterr().err, message)


@pytest.mark.parametrize("more, message", [
    (["--max-new-tokens", "0"], "max_new_tokens is 0"),
    (["--temperature", "-1"], "temperature is -1.0"),
    (["--template-args", "[1]"], "template_args is [1]"),
    (["--history", "missing.jsonl"], "--history missing.jsonl does not exist"),
    (["--prompts", "missing.jsonl"], "missing.jsonl"),
    (["--target", "missing"], "missing holds no config.json"),
    (["--drafter", "missing"], "missing/config.json does not exist"),
])
def test_bad_arguments_are_refused_in_one_line(evaluate, tmp_path, capsys, more, message):
    prompts = golden_prompts(tmp_path / "prompts.jsonl")
    assert evaluate.main([*arguments(prompts, tmp_path / "report"), *more]) == 2
    assert_one_error(capsys.readouterr().err, message)


def assert_one_error(stderr, message):
    lines = [line for line in stderr.replace("\r", "\n").splitlines() if line and "Loading weights" not in line]
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], stderr


def test_a_damaged_result_log_is_refused(evaluate, tmp_path, capsys):
    prompts, out = golden_prompts(tmp_path / "prompts.jsonl"), tmp_path / "report"
    out.mkdir()
    (out / "results.jsonl").write_text("rubbish\n")
    assert evaluate.main(arguments(prompts, out)) == 2
    assert "results.jsonl is damaged" in capsys.readouterr().err


def test_a_training_log_without_curves_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds none of loss"):
        plot_training(write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "other": 2}]), tmp_path / "training.png")


def test_slots_that_were_never_reached_are_drawn_as_gaps(tmp_path):
    block = {"tau": 1.0, "accepted_per_slot": [0.0, 0.0], "accepted_per_slot_conditional": [0.0, None]}
    plot_acceptance(block, tmp_path / "acceptance.png")
    assert (tmp_path / "acceptance.png").stat().st_size > 0
