"""Runs a function on several ranks of a real gloo group: forked from the test, so a rank costs milliseconds."""
import multiprocessing
import os
import tempfile
import traceback

import torch
import torch.distributed as dist

from pipeline.runtime import Runtime


def run_ranks(body, world: int = 2, timeout: float = 30.0) -> list:
    """[body(runtime) of rank 0, of rank 1, ...]; an exception in a rank is returned in its place. AssertionError where a
    rank does not answer within `timeout` seconds: it hangs."""
    context = multiprocessing.get_context("fork")
    with tempfile.NamedTemporaryFile() as store:
        pipes, ranks = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            pipes.append(ours)
            ranks.append(context.Process(target=_rank, args=(body, rank, world, store.name, theirs)))
            ranks[-1].start()
        try:
            answers = []
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(timeout), f"rank {rank} hangs"
                answers.append(pipe.recv())
            return answers
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _rank(body, rank: int, world: int, store: str, pipe) -> None:
    torch.set_num_threads(1)  # a forked process has none of the threads that its parent's OpenMP counts on
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        pipe.send(body(Runtime(rank, world, rank, torch.device("cpu"), "fp32")))
    except Exception as error:
        traceback.print_exc()
        pipe.send(error)
