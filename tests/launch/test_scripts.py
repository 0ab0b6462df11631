"""The batch scripts without a scheduler: `srun` and `scontrol` are stand-ins early in PATH that say what SLURM was recorded
to say. What needs a scheduler's own behaviour is in test_slurm.py."""
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.distributed import ROOT, free_port

# `scontrol` of SLURM 22.05 on a cluster whose nodes answer under an address of their own network.
HOSTNAMES = "gpu-a01\ngpu-a02\ngpu-a07\ngpu-b12\n"
NODE = ("NodeName=gpu-a01 Arch=x86_64 CoresPerSocket=56  CPUAlloc=112 CPUEfctv=224 CPUTot=224 CPULoad=3.11 "
        "AvailableFeatures=h100 ActiveFeatures=h100 Gres=gpu:h100:8(S:0-1) NodeAddr=10.40.0.11 NodeHostName=gpu-a01 Port=6818 "
        "Version=22.05.8 RealMemory=2000000 State=MIXED ThreadsPerCore=2 Partitions=gpu")
SCONTROL = f"""\
case "$1 $2" in
    "show hostnames") [ "$3" = "gpu-a[01-02,07],gpu-b12" ] && printf '{HOSTNAMES}' ;;
    "show node") [ "$4" = gpu-a01 ] && echo '{NODE}' ;;
    requeue*) echo "$2" >> requeued ;;
    *) exit 1 ;;
esac
"""
# Runs the command as SLURM would on two nodes of one task each; a signal is passed on to the ranks, which are in pid0, pid1.
SRUN = """\
trap 'kill -USR1 $(cat pid0 pid1)' USR1
while [[ $1 == --* ]]; do
    echo "$1" >> srun_options
    [[ $1 != --output=* ]] || log=${1#--output=}
    shift
done
for n in 0 1; do
    (cd "$OLDPWD"; SLURM_PROCID=$n SLURM_LOCALID=0 SLURM_NODEID=$n SLURMD_NODENAME=node$n SLURM_STEP_NUM_TASKS=2 \
        SLURM_STEP_NUM_NODES=2 exec "$@" > "${log/\\%t/$n}" 2>&1) &
    pids[n]=$!
done
code=0
for pid in ${pids[*]}; do
    while kill -0 $pid 2>/dev/null; do wait $pid; done
    wait $pid || code=$?
done
exit $code
"""
ALLOCATION = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "gpu-a[01-02,07],gpu-b12", "SLURM_TASKS_PER_NODE": "8(x4)"}
PAIR = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_TASKS_PER_NODE": "1(x2)"}
RANK = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "gpu-a01", "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.40.0.11", "MASTER_PORT": "19711", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1"}


@pytest.fixture
def shell(tmp_path):
    """Runs bash in the repository with the stand-ins of this test's own folder `bin` first in PATH and a site whose Python is
    `bin/python`."""
    (tmp_path / "bin").mkdir()
    site = tmp_path / "site.env"
    site.write_text(f"MAX_RESTARTS=3 DS_CONFIG=zero3.json PYTHON={tmp_path}/bin/python CONTAINER=() SERVE=\"\" SCRATCH={tmp_path}\n"
                    "setup() { :; }\n")
    write(tmp_path, "scontrol", SCONTROL)

    class Shell:
        folder = tmp_path

        def start(self, *command: str, **environment: str) -> subprocess.Popen:
            clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CUDA_"))}
            return subprocess.Popen(
                ["bash", *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env={**clean, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SITE": str(site), "LOGS": str(tmp_path), **environment})

        def __call__(self, *command: str, **environment: str) -> tuple[int, str]:
            process = self.start(*command, **environment)
            output, _ = process.communicate(timeout=60)
            return process.returncode, output

    return Shell()


def write(folder, name: str, script: str) -> None:
    path = folder / "bin" / name
    path.write_text(f"#!/usr/bin/env bash\ncd '{folder}'\n{script}")
    path.chmod(0o755)


def allocate(shell, **environment):
    return shell("-c", f"source launch/slurm/job.sh; source launch/slurm/allocation.sh; allocation {shell.folder}; "
                 "echo $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT; echo $HOSTFILE", **{**ALLOCATION, **environment})


def test_four_nodes_of_eight_gpus_become_a_hostfile_and_an_environment(shell):
    code, output = allocate(shell)
    assert (code, output) == (0, f"32 8 10.40.0.11 19711\n{shell.folder}/hostfile\n")
    text = (shell.folder / "hostfile").read_text()
    assert text == "".join(f"{name} slots=8\n" for name in HOSTNAMES.split())
    from deepspeed.launcher.runner import fetch_hostfile

    assert dict(fetch_hostfile(str(shell.folder / "hostfile"))) == dict.fromkeys(HOSTNAMES.split(), 8)


@pytest.mark.parametrize("what,message", [
    ({"SLURM_JOB_NODELIST": "other[1-4]"}, "scontrol does not name the nodes of other"),
    ({"SLURM_JOB_NODELIST": ""}, "start this with sbatch"),
    ({"SLURM_TASKS_PER_NODE": "8(x3),4"}, "every node has to have as many ranks")])
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
    return shell("launch/slurm/rank.sh", str(shell.folder), "--run", "r.yaml", **RANK, HOSTFILE=f"{shell.folder}/hostfile", **environment)


SHOW = 'echo "rank $RANK local $LOCAL_RANK devices $CUDA_VISIBLE_DEVICES: $*"'


def test_a_rank_takes_its_gpu_among_those_allocated_and_changes_nothing_in_their_list(shell):
    code, output = rank(shell, SHOW, CUDA_VISIBLE_DEVICES="4,5")
    assert code == 0 and "rank 1 of 2 on node gpu-a01: local rank 1, GPU 5 of 4,5, meeting at 10.40.0.11:19711" in output
    assert "rank 1 local 1 devices 4,5: launch/train.py --run r.yaml" in output
    # bound to one GPU by the site: it is the rank's first and only one
    assert "rank 1 local 0 devices 5:" in rank(shell, SHOW, CUDA_VISIBLE_DEVICES="5")[1]


@pytest.mark.parametrize("what,message", [
    ({"hostfile": None}, "hostfile .* is missing or empty"),
    ({"hostfile": ""}, "hostfile .* is missing or empty"),
    ({"SLURM_STEP_NUM_TASKS": "1"}, "srun started 1 ranks on 1 nodes, .* says 2 ranks on 1 nodes"),
    ({"hostfile": "gpu-a01 slots=1\ngpu-a02 slots=1\n"}, "srun started 2 ranks on 1 nodes, .* says 2 ranks on 2 nodes"),
    ({"CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_WORLD_SIZE": "4"}, "give as many GPUs as tasks")])
def test_a_rank_whose_world_is_not_the_allocation_refuses_to_start(shell, what, message):
    import re

    known = {**RANK, **{name: value for name, value in what.items() if name != "hostfile"}}
    if what.get("hostfile", "gpu-a01 slots=2\n") is not None:
        (shell.folder / "hostfile").write_text(what.get("hostfile", "gpu-a01 slots=2\n"))
    write(shell.folder, "python", "touch started")
    code, output = shell("launch/slurm/rank.sh", str(shell.folder), **known, HOSTFILE=f"{shell.folder}/hostfile")
    assert code == 2 and re.search(f"error: rank 1 on node gpu-a01: .*{message}", output)
    assert not (shell.folder / "started").exists()
    assert (shell.folder / "outcome").read_text() == "2 1 gpu-a01\n"


@pytest.mark.parametrize("ends,code,outcome", [
    ("exit 0", 0, None), ("exit 75", 0, "75"), ("kill -USR1 $$", 75, "75"), ("kill -TERM $$", 75, "75"), ("exit 7", 7, "7"),
    ("kill -KILL $$", 137, "137")])
def test_how_a_rank_ended_is_written_down_by_the_first_that_did_not_end_well(shell, ends, code, outcome):
    assert rank(shell, ends)[0] == code
    path = shell.folder / "outcome"
    assert (path.read_text() if path.exists() else None) == (outcome and f"{outcome} 1 gpu-a01\n")
    rank(shell, "exit 9")
    assert path.read_text().split()[0] == outcome or outcome is None


def pair(shell):
    """Two nodes of one rank each, whose names are node0 and node1."""
    write(shell.folder, "scontrol", SCONTROL.replace("gpu-a[01-02,07],gpu-b12", "node[0-1]").replace(HOSTNAMES, "node0\nnode1\n")
          .replace("gpu-a01", "node0"))
    write(shell.folder, "srun", SRUN)


def test_node_ranks_are_told_apart_and_a_failing_rank_ends_the_job_with_its_code_and_its_words_last(shell):
    pair(shell)
    write(shell.folder, "python", 'echo "rank $RANK of node $SLURM_NODEID"; [ $RANK = 0 ] || { echo "boom" >&2; exit 42; }')
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
    write(shell.folder, "python", f"""exec {sys.executable} -c '
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
with open("pid" + os.environ["RANK"], "w") as file:
    print(os.getpid(), file=file)
open("ready" + os.environ["RANK"], "w").close()
time.sleep(60)'""")
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


def test_a_task_that_fails_names_its_node_and_keeps_its_exit_code(shell):
    write(shell.folder, "python", "exit 3")
    code, output = shell("launch/slurm/extract.sbatch", "--num-tasks", "4", SLURM_JOB_ID="12", SLURM_ARRAY_JOB_ID="9",
                         SLURM_ARRAY_TASK_ID="3", SLURMD_NODENAME="gpu-a02")
    assert code == 3 and "exit code 3 on node gpu-a02" in output and "--num-tasks 4 --task-id 3" in output


def test_a_task_out_of_time_ends_its_command_and_requeues_itself(shell):
    write(shell.folder, "python", "trap 'touch ended; exit 143' TERM; touch ready; sleep 60 > /dev/null 2>&1 & wait")
    script = shell.start("launch/slurm/respond.sbatch", "--num-tasks", "4", SLURM_JOB_ID="12", SLURM_ARRAY_TASK_ID="3")
    while not (shell.folder / "ready").exists():
        time.sleep(0.05)
    script.send_signal(signal.SIGUSR1)
    output, _ = script.communicate(timeout=30)
    assert script.returncode == 75 and "the time limit is near: requeueing" in output
    assert (shell.folder / "requeued").read_text() == "12\n" and (shell.folder / "ended").exists()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_respond_starts_a_server_waits_for_it_and_ends_it(shell):
    port = int(free_port())
    (shell.folder / "site.env").write_text((shell.folder / "site.env").read_text().replace('SERVE=""', 'SERVE="serve"'))
    write(shell.folder, "serve", f"""echo "$*" > served; exec {sys.executable} -c '
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()' "${{@: -1}}" """)
    write(shell.folder, "python", 'echo "$*"; curl --fail --silent "${@: -3:1}" > reached && touch answered')
    code, output = shell("launch/slurm/respond.sbatch", "--target", "/models/T", "--out", "r.jsonl",
                         SLURM_JOB_ID=str(port - 15000), SLURM_ARRAY_TASK_ID="0", SLURMD_NODENAME="a")
    served = (shell.folder / "served").read_text().split()
    assert code == 0 and served[:2] == ["/models/T", "--port"] and (shell.folder / "answered").exists(), output
    assert f"--server http://127.0.0.1:{served[2]}/v1 --task-id 0" in output
    deadline = time.monotonic() + 10
    while listens(int(served[2])):
        assert time.monotonic() < deadline, "the server is still there"
    write(shell.folder, "serve", "echo no GPU; exit 4")
    code, output = shell("launch/slurm/respond.sbatch", "--target", "T", SLURM_JOB_ID="12", SLURM_ARRAY_TASK_ID="0",
                         SLURMD_NODENAME="a")
    assert code == 1 and "the server on node a ended:\nno GPU" in output


def test_scripts_refuse_to_run_from_another_folder(shell):
    process = subprocess.run(["bash", ROOT / "launch/slurm/merge.sbatch", "x"], cwd=shell.folder, capture_output=True, text=True)
    assert process.returncode != 0


def test_submit_prints_every_command_of_the_chain_with_its_dependency_and_submits_nothing(shell):
    write(shell.folder, "sbatch", "touch submitted")
    site = shell.folder / "site.env"
    site.write_text(site.read_text().replace(f"PYTHON={shell.folder}/bin/python", f"PYTHON={sys.executable}") +
                    'SITE_OPTIONS="--account=a" TRAIN_OPTIONS="--nodes=4" TASK_OPTIONS="--time=1" SMALL_OPTIONS="--mem=1G"\n'
                    "RESPOND_TASKS=2 EXTRACT_TASKS=3 EVALUATE_TASKS=4\n")
    code, output = shell("launch/slurm/submit.sh", "launch/runs/smoke.yaml", f"out={shell.folder}", "optim.lr=1e-4", "--dry-run",
                         "--template-args", '{"enable_thinking": false}', "--extract", "--storage fp8")
    commands = dict((line.split("--job-name=")[1].split()[0], line) for line in output.splitlines())
    assert code == 0 and not (shell.folder / "submitted").exists(), output
    assert list(commands) == ["respond", "merge-responses", "extract", "merge-dataset", "train", "export", "evaluate", "collect"]
    for name, before in zip(list(commands)[1:], commands):
        assert f"--dependency=afterok:\\<{before}\\> --kill-on-invalid-dep=yes" in commands[name]
    assert all("--account=a" in command for command in commands.values())
    assert "--array=0-2" in commands["extract"] and "--num-tasks 3" in commands["extract"] and "--storage fp8" in commands["extract"]
    assert "--nodes=4" in commands["train"] and commands["train"].endswith(f"out={shell.folder} optim.lr=1e-4")
    assert "enable_thinking" in commands["respond"] and "enable_thinking" in commands["evaluate"]


def test_submit_refuses_what_it_does_not_know_and_prompts_that_are_not_there(shell):
    assert shell("launch/slurm/submit.sh")[0] == 2
    code, output = shell("launch/slurm/submit.sh", "launch/runs/smoke.yaml", "--prompt", "x")
    assert code == 2 and "unknown option --prompt" in output
    site = shell.folder / "site.env"
    site.write_text(site.read_text().replace(f"PYTHON={shell.folder}/bin/python", f"PYTHON={sys.executable}"))
    code, output = shell("launch/slurm/submit.sh", "launch/runs/smoke.yaml", f"out={shell.folder}")
    assert code == 2 and "no prompts in" in output
