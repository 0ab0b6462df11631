"""Runs the real training command on ranks that are real processes, as a user would start it or several times in a row."""
import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

DEEPSPEED = Path(sys.executable).with_name("deepspeed")
SMOKE = "launch/runs/smoke.yaml"


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def arguments_of(out: Path, arguments: tuple[str, ...], run: str = SMOKE,
                 ds_config: Path | str = "ds_configs/zero3.json") -> list[str]:
    return ["--ds_config", str(ds_config), "--run", run, f"out={out}", *arguments]


def train(out: Path, *arguments: str, ranks: int = 1, launcher: bool = True, check: bool = True,
          **options) -> subprocess.CompletedProcess:
    """launch/train.py on OUT/target and OUT/dataset, started anew; `check` raises with its output where it fails."""
    start = [str(DEEPSPEED), "--num_accelerators", str(ranks), "--master_port", free_port()] if launcher else [sys.executable]
    command = [*start, "launch/train.py", *arguments_of(out, arguments, **options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    return _checked(done) if check else done


def _checked(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    if done.returncode:
        raise AssertionError(f"{' '.join(done.args)} exited {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
    return done


class Ranks:
    """`world` processes of one process group that run the training command as often as asked (tests/rank_server.py)."""

    _server = None  # forks the ranks of all groups

    def __init__(self, world: int, folder: Path):
        self.world, self.logs = world, [folder / f"rank{rank}_of_{world}.log" for rank in range(world)]
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(world)}
        self._pids, self._commands, self._answers = [], [], []
        pipes = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(world):
            names = [str(pipes / f"{kind}{rank}") for kind in ("commands", "answers")]
            for name in names:
                os.mkfifo(name)
            self._pids.append(self._fork({**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, names))
            self._commands.append(open(names[0], "w"))
            self._answers.append(open(names[1]))
        shutil.rmtree(pipes)

    @classmethod
    def _fork(cls, environment: dict[str, str], pipes: list[str]) -> int:
        if cls._server is None or cls._server.poll() is not None:
            cls._server = subprocess.Popen(
                [sys.executable, "-m", "tests.rank_server"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"})
            atexit.register(cls._server.kill)
        cls._server.stdin.write(json.dumps([environment, *pipes]) + "\n")
        cls._server.stdin.flush()
        return int(cls._server.stdout.readline())

    def begin(self, out: Path, *arguments: str, **options) -> None:
        self.arguments = arguments_of(out, arguments, **options)
        for commands, log in zip(self._commands, self.logs):
            print(json.dumps([str(log), *self.arguments]), file=commands, flush=True)

    def end(self, timeout: float = 200) -> list[int]:
        """The exit codes of all ranks."""
        deadline, codes = time.monotonic() + timeout, []
        for answers in self._answers:
            ready, _, _ = select.select([answers], [], [], max(0.0, deadline - time.monotonic()))
            answer = answers.readline() if ready else ""
            if not answer:
                raise AssertionError(f"{self.arguments}: a rank died or hangs\n{self.output()[-8000:]}")
            codes.append(int(answer))
        return codes

    def output(self) -> str:
        return "\n".join(log.read_text() for log in self.logs if log.exists())

    def train(self, out: Path, *arguments: str, check: bool = True, **options) -> subprocess.CompletedProcess:
        """One run; the result's stdout is what all ranks printed."""
        self.begin(out, *arguments, **options)
        codes = self.end()
        done = subprocess.CompletedProcess(self.arguments, codes[0], self.output(), "")
        assert len(set(codes)) == 1, (codes, done.stdout[-8000:])
        return _checked(done) if check else done

    def signal(self, rank: int, number: int = signal.SIGTERM) -> None:
        os.kill(self._pids[rank], number)

    def close(self) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pipe in (*self._commands, *self._answers):
            pipe.close()
