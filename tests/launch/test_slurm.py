"""The batch scripts on a real SLURM: the whole chain, a run that is disturbed, failures. Skipped where it is not
installed."""

import contextlib
import json
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from data_prep.prompts import prepare_prompts
from data_prep.tiny_target import make_tiny_target
from pipeline.export import drafter_of
from tests.datasets import read_metrics
from tests.distributed import ROOT, SMOKE
from tests.launch import cluster

pytestmark = pytest.mark.skipif(
    bool(cluster.missing()),
    reason=f"no {', '.join(cluster.missing())} on this machine (Debian: apt-get install slurm-wlm munge)",
)
STEPS = 60
RUN = (f"optim.max_steps={STEPS}", "optim.epochs=20")
SITE = f"""\
SITE_OPTIONS=""
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
    """Job ids of the chain by name; options of submit.sh, or overrides of the run file."""
    lines = slurm.ask("bash", "launch/slurm/submit.sh", SMOKE, f"out={out}", *RUN, *options).splitlines()
    return {line.split()[0]: line.split()[2] for line in lines if " job " in line}


def train(slurm, out: Path, *settings: str, nodes: int = 2) -> str:
    """The id of a training job of one rank on each node."""
    slurm.environment["LOGS"] = str(out / "slurm")
    (out / "slurm").mkdir(parents=True)
    return slurm.ask(
        "sbatch",
        "--parsable",
        f"--output={out}/slurm/train-%j.log",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--signal=USR1@120",
        "launch/slurm/train.sbatch",
        SMOKE,
        f"out={out}",
        *RUN,
        *settings,
    ).strip()


def wait(slurm, ready, out: Path, seconds: float = 300):
    """What `ready()` returns once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < deadline, slurm.ask("scontrol", "show", "job") + log_of(out)
        time.sleep(0.05)
    return found


def steps_of(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def stopped(slurm, job: str, out: Path, restarts: int) -> int:
    """The step at which the run stopped. The job has been requeued `restarts` times by now and may start again soon:
    SLURM lets it wait for two minutes, so that no node takes its new credential for the revoked one; seconds do."""
    wait(slurm, lambda: (now := slurm.job(job))["Restarts"] == str(restarts) and now["JobState"] == "PENDING", out)
    done = steps_of(out)
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now+3", "TimeLimit=UNLIMITED")
    return done


def ranks_of(job: str) -> list[psutil.Process]:
    """The training processes of a job."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "launch/train.py" in process.cmdline() and process.environ().get("SLURM_JOB_ID") == job:
                found.append(process)
    return found


def minutes(time_: str) -> int:
    """Whole minutes of SLURM's HH:MM:SS."""
    hours, whole, _ = time_.split(":")
    return 60 * int(hours) + int(whole)


def ended(slurm, number: str, out: Path, seconds: float = 600) -> dict[str, str]:
    """The job's fields after its end."""
    return wait(slurm, lambda: (job := slurm.job(number))["JobState"] in ENDED and job, out, seconds)


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
    """Job ids of the whole chain, from prompts to a report; its training, on one node of two ranks, has ended."""
    jobs = submit(
        slurm,
        inputs,
        "--respond",
        "--max-new-tokens 24 --batch-size 172",
        "--extract",
        "--shard-bytes 500000 --batch-tokens 2048",
        "--evaluate",
        "--max-new-tokens 16",
    )
    assert ended(slurm, jobs["train"], inputs)["JobState"] == "COMPLETED", log_of(inputs)
    return jobs


@pytest.fixture(scope="module")
def disturbed(slurm, chain, inputs):
    """A run on two nodes of one rank each that is signalled, requeued and out of time; the fourth start ends it."""
    out = inputs.parent / "disturbed"
    job = train(slurm, out, f"data.path={inputs}/dataset", f"target.path={inputs}/target")
    stops = []

    def running(step: int) -> int:
        """Waits until the run has logged `step` steps."""
        return wait(slurm, lambda: (done := steps_of(out)) >= step and done, out)

    running(8)
    slurm.ask("scancel", "--signal=USR1", job)
    stops.append(stopped(slurm, job, out, 1))
    running(stops[0] + 8)
    slurm.ask("scontrol", "requeue", job)
    stops.append(stopped(slurm, job, out, 2))
    running(stops[1] + 1)
    ranks = ranks_of(job)
    running(stops[1] + 8)
    for rank in ranks:
        rank.suspend()  # SLURM looks at time limits every 30 s only: steps that take long, until its signal wakes them
    slurm.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes(slurm.job(job)['RunTime']) + 2}")
    stops.append(stopped(slurm, job, out, 3))
    return out, stops, ended(slurm, job, out)


def test_a_run_on_two_nodes_that_is_signalled_requeued_and_out_of_time_ends_as_one_that_nobody_touched(
    disturbed, inputs
):
    out, stops, job = disturbed
    assert job["JobState"] == "COMPLETED" and job["Restarts"] == "3" and job["NodeList"] == "n[1-2]", log_of(out)
    assert 8 <= stops[0] < stops[1] < stops[2] < STEPS  # each of them in the middle of training
    assert [line["loss"] for line in read_metrics(out)] == [line["loss"] for line in read_metrics(inputs)]
    ours, theirs = weights(out), weights(inputs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_whole_chain_with_three_extract_tasks_ends_in_a_report(slurm, chain, inputs):
    jobs = {name: ended(slurm, number, inputs) for name, number in chain.items()}
    assert {name: job["JobState"] for name, job in jobs.items()} == dict.fromkeys(jobs, "COMPLETED"), log_of(inputs)
    names = {path.name for path in (inputs / "slurm").glob("extract-*.log")}
    assert names == {f"extract-{chain['extract']}_{task}.log" for task in range(3)}
    report = json.loads((inputs / "report/report.json").read_text())
    assert report["lossless"] is True and report["prompts"] == 24 and report["tau"] >= 1.0
    assert (inputs / "drafter/model.safetensors").is_file()
    log = (inputs / f"slurm/train-{chain['train']}.0/rank1.log").read_text()
    assert "rank 1 of 2 on node n1: local rank 1, no GPU" in log


def test_a_task_that_fails_ends_its_job_with_its_exit_code_and_nothing_after_it_runs(slurm, inputs, tmp_path):
    (tmp_path / "nothing").mkdir()
    jobs = submit(
        slurm,
        tmp_path / "run",
        f"target.path={tmp_path}/nothing",
        "--prompts",
        f"{inputs}/prompts/train.jsonl",
        "--heldout",
        f"{inputs}/prompts/heldout.jsonl",
    )
    failing = train(slurm, tmp_path / "alone", "optim.lr=-1", nodes=1)
    states = {name: ended(slurm, number, tmp_path / "run") for name, number in jobs.items()}
    assert (states["respond"]["JobState"], states["respond"]["ExitCode"]) == ("FAILED", "2:0")
    assert {states[name]["JobState"] for name in jobs if name != "respond"} == {"CANCELLED"}
    logs = {path.name.split("-")[0] for path in (tmp_path / "run/slurm").glob("*.log")}
    assert logs == {"respond"}, "a job after the failed one has run"
    assert "holds no config.json" in log_of(tmp_path / "run") and "exit code 2 on node n" in log_of(tmp_path / "run")
    job = ended(slurm, failing, tmp_path / "alone")
    text = (tmp_path / f"alone/slurm/train-{failing}.log").read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0"), text
    assert "failed first" in text and "optim.lr: Input should be greater than 0" in text.splitlines()[-1]
