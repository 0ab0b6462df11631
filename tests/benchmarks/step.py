"""One training step of ours beside that of a plain trainer: time, extra memory, and their ratios. The plain one twice:
with the score matrix written out, and with PyTorch's fused attention under the same dense mask.

    python tests/benchmarks/step.py                       the shape of the README's table, five minutes on two cores
    python tests/benchmarks/step.py --context 512 --anchors 64

A step is forward, loss, backward and optimizer, in float32, on the same weights and the same batch, after both have
shown the same loss and gradients (1e-5 relative). Times are taken in turn, in one process; the extra peak memory (over
model, optimizer and batch) is that of a process of its own. Then D-PACE's cost over fixed decay, taken in turn too.
"""
import argparse
import gc
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch

import cases
import plain_step
from cases import Shape
from pipeline.loss import block_loss

ALPHA = 0.5


class Step:
    """A drafter, a batch and an optimizer; `ours` and `plain` run one optimizer step each."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.drafter, self.table, self.mb = cases.drafter_of(shape), cases.table_of(shape), cases.batch_of(shape)
        self.mb.features_BSE = self.mb.features_BSE.float()
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-4, weight_decay=0.0)

    def _noise(self) -> torch.Tensor:
        return torch.nn.functional.embedding(self.mb.block_ids_BT, self.table)

    def loss_ours(self, kind: str = "dpace") -> torch.Tensor:
        mb, K = self.mb, self.shape.block
        hidden = self.drafter(self._noise(), mb.features_BSE, mb.anchors_BN, mb.starts_BN)
        out = block_loss(hidden.unflatten(1, (-1, K)).flatten(0, 1), self.table, mb.labels_BNJ.flatten(0, 1),
                         mb.mask_BNJ.flatten(0, 1), kind, alpha=ALPHA, gamma=7.0)
        return out.numerator / mb.mask_BNJ[..., 0].sum()

    def loss_plain(self, attend=plain_step.written_out) -> torch.Tensor:
        hidden = plain_step.plain_hidden(self.drafter, self._noise(), self.mb.features_BSE, self.mb.anchors_BN, attend)
        return plain_step.plain_loss(hidden, self.table, self.mb, self.shape.block, ALPHA)

    def loss_fused(self) -> torch.Tensor:
        return self.loss_plain(torch.nn.functional.scaled_dot_product_attention)

    def run(self, loss: Callable[[], torch.Tensor]) -> None:
        loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def gradients(self, loss: Callable[[], torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
        value = loss()
        value.backward()
        gradients = [p.grad.clone() for p in self.drafter.parameters()]
        self.optimizer.zero_grad(set_to_none=False)
        return value.item(), gradients


def check(step: Step) -> None:
    """Both losses and all gradients agree, or nothing is measured."""
    (ours, our_grads), (plain, plain_grads) = step.gradients(step.loss_ours), step.gradients(step.loss_plain)
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(our_grads, plain_grads))
    print(f"loss {ours:.7f} ours, {plain:.7f} plain; largest relative difference of a gradient {worst:.1e}")
    if abs(ours - plain) > 1e-5 * abs(plain) or worst > 1e-5:
        raise SystemExit("the two steps do not compute the same: no measurement")


def seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def in_turn(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run, round by round, after one round that does not count."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in sorted(runs, reverse=number % 2 == 1):
            times[name].append(seconds(runs[name]))
    return times


def extra_memory(shape: Shape, name: str, threads: int) -> int:
    """Bytes above what the process holds between steps, at the peak of the third step."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_extra_memory, (shape, name, threads))


def _extra_memory(shape: Shape, name: str, threads: int) -> int:
    torch.set_num_threads(threads)
    step = Step(shape)
    for _ in range(2):  # the optimizer's state and the gradients exist from now on
        step.run(getattr(step, name))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak starts again from what is held now
    held = _status("VmRSS")
    step.run(getattr(step, name))
    return _status("VmHWM") - held


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = replace(Shape(), **{field.name: getattr(args, field.name) for field in fields(Shape)})
    print(f"{shape}, {args.threads} threads, float32")
    step = Step(shape)
    check(step)
    runs = {name: partial(step.run, getattr(step, f"loss_{name}")) for name in ("ours", "plain", "fused")}
    times = in_turn(runs, args.rounds)
    memory = {name: extra_memory(shape, f"loss_{name}", args.threads) for name in runs}
    for name in runs:
        print(f"{name:<6}{statistics.median(times[name]):>8.2f} s a step (median; best {min(times[name]):.2f}), "
              f"extra peak {memory[name] / 2**30:.2f} GiB")
    ratios = {}
    for name, words in (("plain", "scores written out"), ("fused", "fused attention under a dense mask")):
        time_ratio = statistics.median(a / b for a, b in zip(times["ours"], times[name]))
        ratios[name] = {"time": time_ratio, "extra_memory": memory["ours"] / memory[name]}
        print(f"ours / {name} ({words}): time {time_ratio:.3f}, extra memory {ratios[name]['extra_memory']:.3f}")
    kinds = {kind: partial(step.run, partial(step.loss_ours, kind)) for kind in ("decay", "dpace")}
    by_kind = in_turn(kinds, 3 * args.rounds)
    overhead = statistics.median(a / b for a, b in zip(by_kind["dpace"], by_kind["decay"])) - 1
    print(f"D-PACE over fixed decay: {overhead:+.2%} of a step (median of {3 * args.rounds} pairs)")
    if args.json:
        args.json.write_text(json.dumps({"shape": vars(shape), "threads": args.threads, "seconds": times, "extra_bytes": memory,
                                         "ratios": ratios, "dpace_overhead": overhead}, indent=2) + "\n")


if __name__ == "__main__":
    main()
