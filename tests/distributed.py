"""Runs the real training command on 1 or 2 ranks, as a user would start it."""
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEEPSPEED = Path(sys.executable).with_name("deepspeed")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def train(out: Path, *arguments: str, ranks: int = 1, run: str = "launch/runs/smoke.yaml",
          ds_config: Path | str = "ds_configs/zero3.json", launcher: bool = True, check: bool = True,
          **environment: str) -> subprocess.CompletedProcess:
    """launch/train.py on OUT/target and OUT/dataset; `check` raises with its output where it fails."""
    start = [str(DEEPSPEED), "--num_accelerators", str(ranks), "--master_port", free_port()] if launcher else [sys.executable]
    command = [*start, "launch/train.py", "--ds_config", str(ds_config), "--run", run, f"out={out}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)} exited {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done
