"""The batch scripts on a real SLURM: the whole chain, runs that are disturbed, failures. Skipped where SLURM is not installed."""
import sys
import time
from pathlib import Path

import pytest
import torch

from data_prep.prompts import prepare_prompts
from data_prep.tiny_target import make_tiny_target
from pipeline.export import drafter_of
from tests.datasets import read_metrics
from tests.distributed import ROOT, SMOKE
from tests.launch import cluster

pytestmark = pytest.mark.skipif(bool(cluster.missing()), reason=f"no {', '.join(cluster.missing())} on this machine "
                                "(Debian: apt-get install slurm-wlm munge)")
STEPS = 60
RUN = (f"optim.max_steps={STEPS}", "optim.epochs=20")
SITE = f"""\
SITE_OPTIONS="--export=ALL"
TRAIN_OPTIONS="--nodes=1 --ntasks-per-node=2"
TASK_OPTIONS="" SMALL_OPTIONS=""
RESPOND_TASKS=2 EXTRACT_TASKS=3 EVALUATE_TASKS=2
MAX_RESTARTS=5
DS_CONFIG=ds_configs/zero3.json
PYTHON={sys.executable}
CONTAINER=() SERVE=""
SCRATCH=${{TMPDIR:-/tmp}}
setup() {{ export OMP_NUM_THREADS=1; }}
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "DEADLINE")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    site = tmp_path_factory.mktemp("site") / "site.env"
    site.write_text(SITE)
    slurm = cluster.Cluster()
    slurm.environment |= {"SITE": str(site)}
    yield slurm
    slurm.close()


def submit(slurm, out: Path, *options: str) -> dict[str, str]:
    """Job ids of the chain by name."""
    lines = slurm.ask("bash", "launch/slurm/submit.sh", SMOKE, f"out={out}", *RUN, *options).splitlines()
    return {line.split()[0]: line.split()[2] for line in lines if " job " in line}


def train(slurm, out: Path, *options: str) -> str:
    """The id of a training job on two nodes of one rank each."""
    slurm.environment["LOGS"] = str(out / "slurm")
    (out / "slurm").mkdir(exist_ok=True)
    return slurm.ask("sbatch", "--parsable", f"--output={out}/slurm/train-%j.log", "--nodes=2", "--ntasks-per-node=1", *options,
                     "launch/slurm/train.sbatch", SMOKE, f"out={out}", *RUN).strip()


def wait(slurm, ready, seconds: float = 120):
    """What `ready()` returns once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < deadline, slurm.ask("squeue", "--all") + slurm.ask("scontrol", "show", "job")
        time.sleep(0.2)
    return found


def ended(slurm, number: str) -> dict[str, str]:
    """The job's fields after its end."""
    return wait(slurm, lambda: (job := slurm.job(number))["JobState"] in ENDED and job)


def log_of(out: Path) -> str:
    return "\n".join(f"== {path}\n{path.read_text()}" for path in sorted((out / "slurm").rglob("*.log")))


def weights(out: Path) -> dict[str, torch.Tensor]:
    return drafter_of(out / "checkpoints", f"step{STEPS:06d}").state_dict()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A run's folder with a tiny target and the quickstart's prompts."""
    out = tmp_path_factory.mktemp("chain") / "run"
    make_tiny_target(out / "target")
    prepare_prompts([ROOT / "data_prep/quickstart_prompts.jsonl"], out / "prompts", 0.0645)
    return out


@pytest.fixture(scope="module")
def chain(slurm, inputs):
    """The whole chain, from prompts to a report; training on one node of two ranks. Returns the jobs' last states."""
    jobs = submit(slurm, inputs, "--respond", "--max-new-tokens 24 --batch-size 172", "--extract",
                  "--shard-bytes 500000 --batch-tokens 2048", "--evaluate", "--max-new-tokens 16")
    return {name: ended(slurm, number) for name, number in jobs.items()}


def test_the_whole_chain_ends_in_a_report(chain, inputs):
    assert {name: job["JobState"] for name, job in chain.items()} == dict.fromkeys(chain, "COMPLETED"), log_of(inputs)
    print(log_of(inputs))
