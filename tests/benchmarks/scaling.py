"""How the cost of block attention grows with context and anchors: time against visible scores, log-log.

    python tests/benchmarks/scaling.py --out scaling.png

One layer, forward and backward, one sequence, 8 query and 4 key/value heads of 64, blocks of 16, float32: context 512 to
4096 at 128 anchors, and 64 to 512 anchors at a context of 1024, beside fused attention under a dense mask. Prints the
slopes of log time over log visible scores; a slope of 1 grows as the scores that have to be computed do.
"""
import argparse
import os
import statistics
import time
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from cases import Shape, batch_of  # noqa: E402
from plain_step import dense_mask  # noqa: E402
from pipeline.attention import IMPLEMENTATIONS  # noqa: E402

CONTEXTS, ANCHORS = (512, 1024, 2048, 4096), (64, 128, 256, 512)


def tensors_of(shape: Shape) -> list[torch.Tensor]:
    Q, random = shape.anchors * shape.block, torch.Generator().manual_seed(0)
    lengths = ((shape.heads, Q), *[(shape.kv_heads, n) for n in (shape.context, shape.context, Q, Q)])
    return [torch.randn(1, heads, n, shape.head_dim, generator=random, requires_grad=True) for heads, n in lengths]


def ours(shape: Shape, anchors: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    out = IMPLEMENTATIONS["sdpa"](anchors, None, shape.block, shape.context)(*tensors)
    torch.autograd.grad(out.sum(), tensors)


def dense(shape: Shape, anchors: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    q, context_k, context_v, block_k, block_v = tensors
    repeat = shape.heads // shape.kv_heads
    k = torch.cat([context_k, block_k], 2).repeat_interleave(repeat, 1)
    v = torch.cat([context_v, block_v], 2).repeat_interleave(repeat, 1)
    mask = dense_mask(anchors, shape.context, shape.block)
    torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum(), tensors)


def measure(shape: Shape, rounds: int) -> tuple[float, dict[str, float]]:
    """(visible scores of a head, best seconds by name)."""
    anchors, tensors = batch_of(shape).anchors_BN, tensors_of(shape)
    runs = {"ours": partial(ours, shape, anchors, tensors), "dense mask": partial(dense, shape, anchors, tensors)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - began)
    visible = float(shape.block * (anchors.sum() + anchors.numel() * shape.block))
    return visible, {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="picture to write (PNG)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    series = (("context", [Shape(context=n, anchors=128, batch=1, hidden=8) for n in CONTEXTS]),
              ("anchors", [Shape(context=1024, anchors=n, batch=1, hidden=8) for n in ANCHORS]))
    for axis, (varied, shapes) in zip(axes, series):
        measured = [measure(shape, args.rounds) for shape in shapes]
        scores = np.array([visible for visible, _ in measured])
        for name in ("ours", "dense mask"):
            seconds = np.array([times[name] for _, times in measured])
            slope = np.polyfit(np.log(scores), np.log(seconds), 1)[0]
            print(f"{varied}: {name:<11}" + " ".join(f"{1000 * s:8.1f} ms" for s in seconds) + f"   slope {slope:.2f}", flush=True)
            axis.loglog(scores, 1000 * seconds, "o-", label=f"{name} (slope {slope:.2f})")
        axis.set(xlabel=f"visible scores of a head ({varied} {getattr(shapes[0], varied)} to {getattr(shapes[-1], varied)})",
                 title=f"growing {varied}")
        axis.legend()
    axes[0].set_ylabel("ms, forward and backward of a layer")
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
