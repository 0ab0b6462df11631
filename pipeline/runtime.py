"""The process a run lives in: ranks, device, precision, versions, and the words it prints."""
import contextlib
import importlib.metadata
import logging
import os
import platform
import socket
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from data_prep.errors import UserError

STALE = 600  # s after which nobody compiles any more: it takes one to two minutes

PRECISION_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Runtime:
    rank: int
    world: int
    local_rank: int
    device: torch.device
    precision: str  # bf16 or fp32

    @property
    def dtype(self) -> torch.dtype:
        return PRECISION_DTYPES[self.precision]

    def say(self, text: str) -> None:
        """One line, from rank 0 only."""
        if self.rank == 0:
            print(text, flush=True)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values


def start(precision: str) -> Runtime:
    """Joins the process group described by the environment (RANK, WORLD_SIZE, LOCAL_RANK: the `deepspeed` launcher,
    torchrun and SLURM scripts set them); without these variables the process is a world of its own."""
    alone = "RANK" not in os.environ
    if alone:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    missing = [name for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(f"RANK is set but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not: all ranks need "
                        "the whole environment; start with `deepspeed`, torchrun or launch/slurm")
    rank, world, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        here = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or world)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    _quiet_libraries()
    keep_compiled_operations()
    import deepspeed  # after the device is set: importing it probes the accelerator

    deepspeed.init_distributed("nccl" if gpu else "gloo", verbose=False)
    return Runtime(rank, world, local_rank, device, resolve_precision(precision, device))


def keep_compiled_operations() -> None:
    """What DeepSpeed compiles stays in the virtual environment: environments that share a folder would compile in turn.
    A lock that a killed compiler left goes, since every later start would wait for it without a word."""
    if "TORCH_EXTENSIONS_DIR" not in os.environ and sys.prefix != sys.base_prefix:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix) / "torch_extensions")
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    for lock in Path(folder).glob("*/lock") if folder else ():
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            if time.time() - lock.stat().st_mtime > STALE:
                lock.unlink()
                print(f"removed {lock}, left by a process that was killed while compiling", flush=True)


def _quiet_libraries() -> None:
    """Their progress chatter and renamings hide this project's own words; warnings of substance stay."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")


def resolve_precision(precision: str, device: torch.device) -> str:
    """`auto` is bf16 where the device computes in it; CPUs without such units are 100 times slower in bf16."""
    if precision != "auto":
        return precision
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def versions() -> dict[str, str]:
    """Python, the packages that decide the numbers, and the git commit of the code."""
    packages = ("torch", "deepspeed", "transformers", "webdataset", "safetensors")
    found = {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}}
    return {**found, "git": _git_sha()}


def _git_sha() -> str:
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return "not a git checkout"
    done = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"],
                          capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else f"unknown ({done.stderr.strip()})"


def fail(error: UserError) -> int:
    """Prints a user's error the same way everywhere; returns the exit code."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    return 2
