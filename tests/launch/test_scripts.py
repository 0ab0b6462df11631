"""The training's scripts without a scheduler, on stand-ins (conftest.py). What needs a scheduler's own behaviour is in
test_slurm.py."""

import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from .conftest import ALLOCATION, HOSTNAMES, PAIR, RANK, SCONTROL, SRUN, write


def allocate(shell, **environment):
    return shell(
        "-c",
        f"source launch/slurm/job.sh; source launch/slurm/allocation.sh; allocation {shell.folder}; "
        "echo $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT; echo $HOSTFILE",
        **{**ALLOCATION, **environment},
    )


def test_four_nodes_of_eight_gpus_become_a_hostfile_and_an_environment(shell):
    code, output = allocate(shell)
    assert (code, output) == (0, f"32 8 10.40.0.11 19711\n{shell.folder}/hostfile\n")
    text = (shell.folder / "hostfile").read_text()
    assert text == "".join(f"{name} slots=8\n" for name in HOSTNAMES.split())
    from deepspeed.launcher.runner import fetch_hostfile

    assert dict(fetch_hostfile(str(shell.folder / "hostfile"))) == dict.fromkeys(HOSTNAMES.split(), 8)


@pytest.mark.parametrize(
    "what,message",
    [
        ({"SLURM_JOB_NODELIST": "other[1-4]"}, "scontrol does not name the nodes of other"),
        ({"SLURM_JOB_NODELIST": ""}, "start this with sbatch"),
        ({"SLURM_TASKS_PER_NODE": "8(x3),4"}, "every node has to have as many ranks"),
    ],
)
def test_an_allocation_that_is_not_understood_is_an_error_and_never_localhost(shell, what, message):
    code, output = allocate(shell, **what)
    assert code != 0 and message in output and "localhost" not in output and "127.0.0.1" not in output


def test_without_scontrol_the_script_fails_before_it_starts_a_rank(shell):
    (shell.folder / "bin/scontrol").unlink()
    write(shell.folder, "srun", "touch started")
    nothing = shell.folder / "usr"  # no PATH with a scontrol of the machine's own
    nothing.mkdir()
    for name in ("bash", "mkdir", "realpath", "rm", "grep", "wc", "tr", "id", "hostname"):
        (nothing / name).symlink_to(subprocess.check_output(["bash", "-c", f"command -v {name}"], text=True).strip())
    code, output = shell("launch/slurm/train.sbatch", "run.yaml", **ALLOCATION, PATH=f"{shell.folder}/bin:{nothing}")
    assert code == 2 and "scontrol does not name the nodes" in output and not (shell.folder / "started").exists()


def test_ports_differ_between_jobs_and_one_that_is_taken_is_left_out(shell):
    assert allocate(shell, SLURM_JOB_ID="4712")[1].split()[3] == "19712"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 19711))
        taken.listen()
        assert allocate(shell)[1].split()[3] == "19712"


def rank(shell, python: str, hostfile: str | None = "gpu-a01 slots=2\n", **environment):
    if hostfile is not None:
        (shell.folder / "hostfile").write_text(hostfile)
    write(shell.folder, "python", python)
    return shell(
        "launch/slurm/rank.sh",
        str(shell.folder),
        "--run",
        "r.yaml",
        **RANK,
        HOSTFILE=f"{shell.folder}/hostfile",
        **environment,
    )


SHOW = 'echo "rank $RANK local $LOCAL_RANK devices $CUDA_VISIBLE_DEVICES: $*"'


def test_a_rank_takes_its_gpu_among_those_allocated_and_changes_nothing_in_their_list(shell):
    code, output = rank(shell, SHOW, CUDA_VISIBLE_DEVICES="4,5")
    assert (
        code == 0 and "rank 1 of 2 on node gpu-a01: local rank 1, GPU 5 of 4,5, meeting at 10.40.0.11:19711" in output
    )
    assert "rank 1 local 1 devices 4,5: launch/train.py --run r.yaml" in output
    # bound to one GPU by the site: it is the rank's first and only one
    assert "rank 1 local 0 devices 5:" in rank(shell, SHOW, CUDA_VISIBLE_DEVICES="5")[1]


@pytest.mark.parametrize(
    "what,message",
    [
        ({"hostfile": None}, "hostfile .* is missing or empty"),
        ({"hostfile": ""}, "hostfile .* is missing or empty"),
        ({"SLURM_STEP_NUM_TASKS": "1"}, "srun started 1 ranks on 1 nodes, .* says 2 ranks on 1 nodes"),
        (
            {"hostfile": "gpu-a01 slots=1\ngpu-a02 slots=1\n"},
            "srun started 2 ranks on 1 nodes, .* says 2 ranks on 2 nodes",
        ),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_WORLD_SIZE": "4"}, "give as many GPUs as tasks"),
    ],
)
def test_a_rank_whose_world_is_not_the_allocation_refuses_to_start(shell, what, message):
    known = {**RANK, **{name: value for name, value in what.items() if name != "hostfile"}}
    if what.get("hostfile", "gpu-a01 slots=2\n") is not None:
        (shell.folder / "hostfile").write_text(what.get("hostfile", "gpu-a01 slots=2\n"))
    write(shell.folder, "python", "touch started")
    code, output = shell("launch/slurm/rank.sh", str(shell.folder), **known, HOSTFILE=f"{shell.folder}/hostfile")
    assert code == 2 and re.search(f"error: rank 1 on node gpu-a01: .*{message}", output)
    assert not (shell.folder / "started").exists()
    assert (shell.folder / "outcome").read_text() == "2 1 gpu-a01\n"


@pytest.mark.parametrize(
    "ends,code,outcome",
    [
        ("exit 0", 0, None),
        ("exit 75", 0, "75"),
        ("kill -USR1 $$", 75, "75"),
        ("kill -TERM $$", 75, "75"),
        ("exit 7", 7, "7"),
        ("kill -KILL $$", 137, "137"),
    ],
)
def test_how_a_rank_ended_is_written_down_by_the_first_that_did_not_end_well(shell, ends, code, outcome):
    assert rank(shell, ends)[0] == code
    path = shell.folder / "outcome"
    assert (path.read_text() if path.exists() else None) == (outcome and f"{outcome} 1 gpu-a01\n")
    rank(shell, "exit 9")
    assert path.read_text().split()[0] == outcome or outcome is None


def pair(shell):
    """Two nodes of one rank each, whose names are node0 and node1."""
    write(
        shell.folder,
        "scontrol",
        SCONTROL.replace("gpu-a[01-02,07],gpu-b12", "node[0-1]")
        .replace(HOSTNAMES, "node0\nnode1\n")
        .replace("gpu-a01", "node0"),
    )
    write(shell.folder, "srun", SRUN)


def test_node_ranks_are_told_apart_and_a_failing_rank_ends_the_job_with_its_code_and_its_words_last(shell):
    pair(shell)
    write(
        shell.folder,
        "python",
        'echo "rank $RANK of node $SLURM_NODEID"; [ $RANK = 0 ] || { echo "boom" >&2; exit 42; }',
    )
    code, output = shell("launch/slurm/train.sbatch", "run.yaml", **PAIR)
    assert code == 42 and output.endswith("rank 1 of node 1\nboom\n") and "rank 1 on node node1 failed first" in output
    assert "rank 0 of node 0" in (shell.folder / "train-4711.0/rank0.log").read_text()
    assert "--kill-on-bad-exit=1" in (shell.folder / "srun_options").read_text()
    assert not (shell.folder / "requeued").exists()


def test_srun_that_fails_without_a_rank_is_reported_with_the_ranks_that_never_began(shell):
    pair(shell)
    write(shell.folder, "srun", 'echo begun > "$LOGS/train-4711.0/rank0.log"; exit 42')
    code, output = shell("launch/slurm/train.sbatch", "run.yaml", **PAIR)
    assert code == 42 and "ranks that never began: 1 (node node1)" in output


def test_the_warning_signal_to_the_scripts_shell_reaches_every_rank_and_the_job_requeues_itself(shell):
    pair(shell)
    write(
        shell.folder,
        "python",
        f"""exec {sys.executable} -c '
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
with open("pid" + os.environ["RANK"], "w") as file:
    print(os.getpid(), file=file)
open("ready" + os.environ["RANK"], "w").close()
time.sleep(60)'""",
    )
    script = shell.start("launch/slurm/train.sbatch", "run.yaml", **PAIR)
    deadline = time.monotonic() + 30
    while not all((shell.folder / f"ready{n}").exists() for n in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    script.send_signal(signal.SIGUSR1)
    output, _ = script.communicate(timeout=30)
    assert script.returncode == 75 and "requeueing, restart 1" in output
    assert (shell.folder / "requeued").read_text() == "4711\n"
    assert "(rank " in output and (shell.folder / "train-4711.0/outcome").read_text().startswith("75 ")


def test_a_job_is_not_requeued_for_ever(shell):
    pair(shell)
    write(shell.folder, "python", "exit 75")
    code, output = shell("launch/slurm/train.sbatch", "run.yaml", **PAIR, SLURM_RESTART_COUNT="3")
    assert code == 75 and "has been restarted 3 times" in output and not (shell.folder / "requeued").exists()
