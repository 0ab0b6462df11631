"""What tests/soak.sh runs: a 2-rank run killed at random moments against one that nobody touched."""
import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from pipeline import checkpoint
from pipeline.export import drafter_of
from tests.datasets import make_run_folder, read_metrics
from tests.distributed import ROOT, arguments_of, free_port

STEPS = 150
SETTINGS = (f"optim.max_steps={STEPS}", "optim.epochs=40", "checkpoint.every=5", "checkpoint.keep=2", "optim.micro_batch=1",
            "evaluation.every=8", "--resume", "auto")
PREEMPTED = 75


def begin(out: Path, log) -> list[subprocess.Popen]:
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    command = [sys.executable, "launch/train.py", *arguments_of(out, SETTINGS)]
    return [subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log,
                             env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in (0, 1)]


def steps_of(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def kill(ranks: list[subprocess.Popen], out: Path, dice: random.Random) -> str:
    """Waits for a random moment behind the next steps, kills, and says how. SIGKILL to one rank leaves the other waiting for
    it; a launcher ends that one, and so does this. A quarter of the kills comes while the run is still starting."""
    if dice.random() < 0.25:
        time.sleep(dice.uniform(0, 15))
    else:
        seen, wanted = steps_of(out), dice.randint(1, 8)
        while steps_of(out) < min(seen + wanted, STEPS - 1) and all(rank.poll() is None for rank in ranks):
            time.sleep(0.001)
        time.sleep(dice.uniform(0, 0.5))
    victim, how = dice.randrange(2), dice.choice((signal.SIGKILL, signal.SIGTERM))
    ranks[victim].send_signal(how)
    if how == signal.SIGKILL:
        ranks[1 - victim].kill()
    codes = []
    for rank in ranks:
        try:
            codes.append(rank.wait(timeout=60))
        except subprocess.TimeoutExpired:  # SIGTERM before the handler was there ended one rank and left the other
            rank.kill()
            codes.append(rank.wait())
    tags = checkpoint.complete_tags(out / "checkpoints")
    newest = tags[-1] if tags else "none"
    return f"{how.name} to rank {victim}: exit codes {codes}, {steps_of(out)} steps logged, newest checkpoint {newest}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    root = args.out or Path(tempfile.mkdtemp(prefix="soak-"))
    dice, began = random.Random(args.seed), time.monotonic()
    calm, killed = make_run_folder(root / "calm"), root / "killed"
    shutil.copytree(calm, killed)
    with (root / "log").open("w") as log:
        assert [rank.wait(timeout=600) for rank in begin(calm, log)] == [0, 0], (root / "log").read_text()[-4000:]
        print(f"the calm run: {STEPS} steps, {time.monotonic() - began:.0f} s", flush=True)
        for number in range(1, args.kills + 1):
            print(f"{number:3d}  {kill(begin(killed, log), killed, dice)}", flush=True)
        while (codes := [rank.wait(timeout=600) for rank in begin(killed, log)]) != [0, 0]:
            assert codes == [PREEMPTED, PREEMPTED], (codes, (root / "log").read_text()[-4000:])
    for name in ("metrics.jsonl", "heldout.jsonl"):
        ours, theirs = ([{k: v for k, v in line.items() if not k.startswith(("seconds", "waiting", "memory"))
                          and not k.endswith("_per_second")} for line in read_metrics(out, name)] for out in (killed, calm))
        assert ours == theirs, f"{name} differs"
    tag = checkpoint.tag_of(STEPS)
    ours, theirs = (drafter_of(out / "checkpoints", tag).state_dict() for out in (killed, calm))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "final weights differ"
    print(f"{args.kills} kills: losses, held-out numbers and all {len(theirs)} final tensors equal the calm run's bit for bit "
          f"({time.monotonic() - began:.0f} s)")
    if not args.out:
        shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
