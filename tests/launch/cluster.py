"""A real SLURM on this machine for the tests: munged, slurmctld and one slurmd per node, all of them this user's own.

Everything lies in one temporary folder and listens on free ports, so several clusters, and one of the machine's own, do
not meet. The daemons stay in the foreground, as children of the tests. The nodes
differ in name only: all of them are this machine, with more CPUs than it has, so that jobs never wait for each other.
Debian: apt-get install slurm-wlm munge
"""

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from tests.distributed import ROOT, free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
CPUS = 16  # of a node, as SLURM believes
CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SwitchType=switch/none
MpiDefault=none
JobRequeue=1
KillWait=30
MinJobAge=3600
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
{nodes}
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _daemon(name: str) -> str | None:
    """Debian keeps daemons where only root's PATH looks."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")


def missing() -> list[str]:
    """The programs of SLURM that this machine lacks."""
    return [name for name in DAEMONS if not _daemon(name)] + [
        name for name in ("sbatch", "srun") if not shutil.which(name)
    ]


class Cluster:
    """environment: what a shell needs to speak to it."""

    def __init__(self, nodes: tuple[str, ...] = ("n1", "n2")):
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.nodes, self._children = nodes, []
        self._ports = {name: free_port() for name in ("controller", *nodes)}
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        host = socket.gethostname().split(".")[0]
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={self._ports[node]} CPUs={CPUS} "
            "RealMemory=4000 State=UNKNOWN"
            for node in self.nodes
        ]
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=host,
                controller=self._ports["controller"],
                user=getpass.getuser(),
                folder=self.folder,
                nodes="\n".join(lines),
            )
        )
        munge = [
            f"--{name}={self.folder}/munge.{name.split('-')[0]}"
            for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")
        ]
        self._run("munged", "--foreground", "--force", *munge)
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged does not answer")
        self._run("slurmctld", "-D")
        for node in self.nodes:
            self._run("slurmd", "-D", "-N", node)
        self._wait(
            lambda: self.ask("sinfo", "-h", "-o", "%T", check=False).split() == ["idle"], "the nodes are not idle"
        )

    def _run(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}{len(self._children)}.out").open("w") as log:
            self._children.append(
                subprocess.Popen(
                    [_daemon(name), *arguments],
                    stdout=log,
                    stderr=log,
                    env=self.environment,
                    cwd=self.folder,
                    start_new_session=True,
                )
            )

    def _wait(self, ready, what: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline or any(child.poll() is not None for child in self._children):
                logs = "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.out")))
                raise AssertionError(f"{what}:\n{logs}")
            time.sleep(0.1)

    def ask(self, *command: str, check: bool = True) -> str:
        """What a command of SLURM prints."""
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=60)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)} exited {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        return dict(
            field.split("=", 1) for field in self.ask("scontrol", "show", "job", "-o", number).split() if "=" in field
        )

    def _processes(self) -> list[psutil.Process]:
        """The daemons and whatever jobs are left, known by their SLURM_CONF. psutil itself does not find it in the
        environment of slurmstepd, which writes its title over the first part."""
        ours, found = b"SLURM_CONF=" + self.environment["SLURM_CONF"].encode(), []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if ours in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found.append(process)
        return found

    def close(self) -> None:
        """Ends everything that the cluster has started and removes its folder."""
        while left := self._processes():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=10)
        for child in self._children:
            child.wait(timeout=10)
        shutil.rmtree(self.folder)
