"""The quickstart's smoke run: every stage for real on a tiny target, reuse of finished stages, carrying on after a kill."""
import json
import os
import subprocess
import time

import pytest

from tests.distributed import ROOT

STAGES = ["target", "prompts", "respond", "extract", "verify", "train", "export", "export-untrained", "evaluate"]


def quickstart(out, **environment):
    return subprocess.run(["bash", "launch/quickstart.sh", "--smoke", "--out", str(out)], cwd=ROOT, capture_output=True,
                          text=True, timeout=600, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A smoke run that is killed in the middle and started again."""
    out = tmp_path_factory.mktemp("quickstart") / "smoke"
    killed = subprocess.Popen(["bash", "launch/quickstart.sh", "--smoke", "--out", str(out)], cwd=ROOT,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while not (out / ".stages/respond.done").is_file():
        assert killed.poll() is None, "the quickstart ended before it could be killed"
        time.sleep(0.05)
    os.killpg(killed.pid, 9)
    killed.wait()
    done = quickstart(out)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out, done


def test_all_stages_run_and_show_their_commands(finished):
    out, done = finished
    for number, name in enumerate(STAGES, start=1):
        assert f"== [{number}/9] {name}" in done.stdout
    assert "deepspeed --num_accelerators" in done.stdout
    assert done.stdout.count("already done") >= 3, "finished stages were repeated"


def test_the_results_lie_where_they_are_promised(finished):
    out, _ = finished
    for name in ("target/config.json", "dataset/manifest.json", "checkpoints/latest", "drafter/model.safetensors",
                 "report/report.json", "report/acceptance.png", "report/training.png", "tensorboard"):
        assert (out / name).exists(), name


def test_the_report_is_lossless_and_compares_with_the_untrained_drafter(finished):
    out, done = finished
    report = json.loads((out / "report/report.json").read_text())
    assert report["lossless"] is True and report["baseline"]["lossless"] is True
    assert report["prompts"] == 24 and report["tau"] >= 1.0 and len(report["accepted_per_slot"]) == 7
    emitted = [n for prompt in report["emitted_per_step"] for n in prompt]
    assert report["tau"] == pytest.approx(sum(emitted) / len(emitted))
    assert "yes" in done.stdout and str(out / "report/report.json") in done.stdout


def test_run_again_it_repeats_nothing(finished):
    out, _ = finished
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    again = quickstart(out)
    assert again.returncode == 0 and again.stdout.count("already done") == 9
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}


def test_unknown_arguments_are_refused():
    done = subprocess.run(["bash", "launch/quickstart.sh", "--fast"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "unknown argument --fast" in done.stderr
