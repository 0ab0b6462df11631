"""On a GPU: the smoke data from prompts to an evaluated drafter, in bf16, with a stop in the middle of training."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def run(*command, code=0):
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=400,
                          env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"})
    assert done.returncode == code, f"{command} exited {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def train(out, *arguments, code=0):
    return run("-m", "deepspeed.launcher.runner", "--num_gpus", 1, "launch/train.py", "--ds_config", "ds_configs/zero3.json",
               "--run", "launch/runs/smoke.yaml", "--resume", "auto", f"out={out}", *arguments, code=code)


def test_prompts_to_an_evaluated_drafter(tmp_path):
    target, out = tmp_path / "target", tmp_path
    run("launch/quickstart_target.py", target, "--tiny")
    run("-m", "data_prep", "prompts", "data_prep/quickstart_prompts.jsonl", "--out", out / "prompts", "--heldout", 0.0645)
    run("-m", "data_prep", "respond", "--target", target, "--prompts", out / "prompts/train.jsonl", "--out",
        out / "responses.jsonl", "--max-new-tokens", 24, "--batch-size", 172)
    run("-m", "data_prep", "extract", "--target", target, "--responses", out / "responses.jsonl", "--out", out / "dataset",
        "--shard-bytes", 500000, "--batch-tokens", 2048)
    run("-m", "data_prep", "verify", out / "dataset", "--target", target, "--recompute", 4)
    said = train(out)
    assert "compute  bf16 on cuda" in said
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in rows) and rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["skipped_steps"] == 0
    run("launch/export.py", out / "checkpoints", out / "drafter")
    run("launch/evaluate.py", "--target", target, "--drafter", out / "drafter", "--prompts", out / "prompts/heldout.jsonl",
        "--out", out / "report", "--max-new-tokens", 8, "--dtype", "float32")
    print(said[-1500:], json.dumps(rows[-1]))
