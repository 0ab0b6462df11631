"""The command line: exit statuses, help that teaches, errors without a traceback."""

import json
import shutil
import subprocess
import sys

import pytest

from data_prep.__main__ import main
from data_prep.estimate import estimate
from data_prep.extract import extract
from data_prep.responses import respond
from data_prep.tokens import load_tokenizer

from .conftest import write_lines
from .test_plan import lines_of

STAGES = ["prompts", "respond", "extract", "merge", "verify", "estimate", "inspect"]


def run(capsys, *arguments) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_help_with_an_example(capsys, stage):
    with pytest.raises(SystemExit) as stop:
        main([stage, "--help"])
    assert stop.value.code == 0 and f"python -m data_prep {stage}" in capsys.readouterr().out


def test_the_module_runs_as_a_command_and_lists_its_stages():
    result = subprocess.run([sys.executable, "-m", "data_prep", "--help"], capture_output=True, text=True)
    assert result.returncode == 0 and all(stage in result.stdout for stage in STAGES)


def test_verify_exits_0_on_a_good_and_1_on_a_bad_dataset(capsys, dataset, tmp_path):
    status, out, _ = run(capsys, "verify", dataset)
    assert status == 0 and "good" in out
    (dataset / "000001.tar").write_bytes(b"")
    status, out, _ = run(capsys, "verify", dataset)
    assert status == 1 and "000001.tar" in out
    (dataset / "manifest.json").write_text("{}")
    assert run(capsys, "verify", dataset)[0] == 1
    status, _, err = run(capsys, "verify", tmp_path)
    assert status == 1 and "python -m data_prep extract" in err


def test_an_input_error_exits_2_with_the_remedy_and_no_traceback(capsys, target, tmp_path):
    status, _, err = run(
        capsys, "extract", "--target", target, "--responses", tmp_path / "no.jsonl", "--out", tmp_path / "d"
    )
    assert status == 2 and err.startswith("error: ") and "python -m data_prep respond" in err


def test_a_target_that_is_no_model_folder_is_an_input_error(capsys, prompts, responses, tmp_path):
    arguments = ["--target", tmp_path, "--out", tmp_path / "d"]
    for stage in (
        ["respond", "--prompts", prompts],
        ["extract", "--responses", responses],
        ["estimate", "--tokens", 5],
    ):
        status, _, err = run(capsys, *stage, *(arguments if stage[0] != "estimate" else arguments[:2]))
        assert status == 2 and "holds no config.json" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["extract", "--target", "t", "--responses", "r", "--out", "o", "--layer-ids", "1;2"], "list like 1,8,15"),
        (["respond", "--target", "t", "--prompts", "p", "--out", "o", "--template-args", "[1]"], "JSON object like"),
        (["respond", "--target", "t", "--prompts", "p", "--out", "o", "--batch-size", "0"], "positive number"),
        (["extract", "--target", "t", "--responses", "r", "--out", "o", "--drop", "bad"], "list of empty, cut, looping"),
        (["extract", "--target", "t", "--responses", "r", "--out", "o", "--device-map", "2"], "auto, balanced"),
        (["extract", "--target", "t", "--responses", "r", "--out", "o", "--storage", "fp4"], "'bf16', 'fp8'"),
        (["prompts", "p", "--out", "o", "--heldout", "24"], "share between 0 and 1"),
    ],
)
def test_a_malformed_argument_exits_2_and_says_what_it_should_look_like(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_tasks_and_a_merge_work_from_the_command_line(capsys, target, responses, tmp_path):
    command = ["extract", "--target", target, "--responses", responses, "--out", tmp_path / "d"]
    command += ["--layer-ids", "0,2,4", "--shard-bytes", "150000", "--num-tasks", 2, "--storage", "fp8", "--last-hidden"]
    for task in (0, 1):
        status, out, _ = run(capsys, *command, "--task-id", task)
        assert status == 0 and f"task {task} of 2" in out and "python -m data_prep merge" in out
    status, out, _ = run(capsys, "merge", tmp_path / "d")
    assert status == 0 and "is sealed" in out
    assert run(capsys, "verify", tmp_path / "d", "--target", target, "--recompute", 3)[0] == 0
    status, out, _ = run(capsys, "inspect", tmp_path / "d")
    assert status == 0 and "storage fp8 with last_hidden" in out


def test_inspect_shows_the_turns_of_a_shared_sample(capsys, target, tmp_path):
    tokenizer = load_tokenizer(target)
    write_lines(tmp_path / "r.jsonl", lines_of(tokenizer, "talk", ["one", "two"]))
    respond(target, _prompts_file(tmp_path), tmp_path / "made.jsonl", max_new_tokens=2)
    shutil.copy(tmp_path / "made.jsonl.meta.json", tmp_path / "r.jsonl.meta.json")
    extract(target, tmp_path / "r.jsonl", tmp_path / "d", layer_ids=[0, 2, 4])
    status, out, _ = run(capsys, "inspect", tmp_path / "d", "talk")
    assert status == 0 and out.count("[[") == 2 and "[[one<|im_end|>]]" in out and "turn 2: positions" in out


def _prompts_file(folder):
    write_lines(folder / "p.jsonl", [{"id": "a", "prompt": "x"}])
    return folder / "p.jsonl"


def test_inspect_marks_exactly_the_supervised_text(capsys, clean_dataset, responses):
    line = json.loads(responses.read_text().splitlines()[0])
    status, out, _ = run(capsys, "inspect", clean_dataset, line["id"])
    assert status == 0 and out.count("[[") == out.count("]]") == 1
    assert "<|im_start|>assistant\n[[" in out and "layer 4" in out and "logprob" in out


def test_inspect_falls_back_to_ids_where_the_tokenizer_is_gone(capsys, dataset):
    manifest = json.loads((dataset / "manifest.json").read_text())
    manifest["target"]["name"] = "/nowhere"
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    status, out, _ = run(capsys, "inspect", dataset, "000000")
    assert status == 0 and "[[" in out and "<|im_start|>" not in out


def test_inspect_without_a_key_shows_every_shard_and_with_a_wrong_one_the_range(capsys, clean_dataset, manifest):
    status, out, _ = run(capsys, "inspect", clean_dataset)
    assert status == 0 and all(shard.name in out for shard in manifest.shards)
    status, _, err = run(capsys, "inspect", clean_dataset, "999999")
    assert status == 2 and "000000" in err


def test_estimate_needs_nothing_but_the_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_hidden_layers": 32, "hidden_size": 4096}))
    text = estimate(path, 100_000_000)
    assert "1,8,15,22,29" in text and "40965" in text and "125.8 MB" in text and "4096.50 GB" in text
    half = estimate(path, 100_000_000, storage="fp8", last_hidden=True)
    assert f"{5 * 4100 + 8192 + 5} (5 x (4096 + 4) + 4096 x 2 + 5" in half and "2869.70 GB" in half
