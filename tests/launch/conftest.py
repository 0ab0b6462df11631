"""Stand-ins for SLURM's commands: `srun` and `scontrol` early in PATH that say what SLURM was recorded to say."""

import os
import subprocess

import pytest

from tests.distributed import ROOT

# `scontrol` of SLURM 22.05 on a cluster whose nodes answer under an address of their own network.
HOSTNAMES = "gpu-a01\ngpu-a02\ngpu-a07\ngpu-b12\n"
NODE = (
    "NodeName=gpu-a01 Arch=x86_64 CoresPerSocket=56  CPUAlloc=112 CPUEfctv=224 CPUTot=224 CPULoad=3.11 "
    "AvailableFeatures=h100 ActiveFeatures=h100 Gres=gpu:h100:8(S:0-1) NodeAddr=10.40.0.11 NodeHostName=gpu-a01 "
    "Port=6818 Version=22.05.8 RealMemory=2000000 State=MIXED ThreadsPerCore=2 Partitions=gpu"
)
SCONTROL = f"""\
case "$1 $2" in
    "show hostnames") [ "$3" = "gpu-a[01-02,07],gpu-b12" ] && printf '{HOSTNAMES}' ;;
    "show node") [ "$4" = gpu-a01 ] && echo '{NODE}' ;;
    requeue*) echo "$2" >> requeued ;;
    *) exit 1 ;;
esac
"""
# Runs the command as SLURM would on two nodes of one task each; a signal is passed on to the ranks in pid0 and pid1.
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
RANK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "gpu-a01",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.40.0.11",
    "MASTER_PORT": "19711",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
}


@pytest.fixture
def shell(tmp_path):
    """Runs bash in the repository with the stand-ins of this test's own folder `bin` first in PATH and a site whose
    Python is `bin/python`."""
    (tmp_path / "bin").mkdir()
    site = tmp_path / "site.env"
    site.write_text(
        f'MAX_RESTARTS=3 DS_CONFIG=zero3.json PYTHON={tmp_path}/bin/python CONTAINER=() SERVE="" SCRATCH={tmp_path}\n'
        "setup() { :; }\n"
    )
    write(tmp_path, "scontrol", SCONTROL)

    class Shell:
        folder = tmp_path

        def start(self, *command: str, **environment: str) -> subprocess.Popen:
            clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CUDA_"))}
            return subprocess.Popen(
                ["bash", *command],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={
                    **clean,
                    "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
                    "SITE": str(site),
                    "LOGS": str(tmp_path),
                    **environment,
                },
            )

        def __call__(self, *command: str, **environment: str) -> tuple[int, str]:
            process = self.start(*command, **environment)
            output, _ = process.communicate(timeout=60)
            return process.returncode, output

    return Shell()


def write(folder, name: str, script: str) -> None:
    path = folder / "bin" / name
    path.write_text(f"#!/usr/bin/env bash\ncd '{folder}'\n{script}")
    path.chmod(0o755)
