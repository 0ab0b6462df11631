"""How fast a training step is on this device, at Qwen3-8B's shape, with the real DeepSpeed engine under ZeRO-3.

    python tests/gpu/measure.py --json OUT.json
    python tests/gpu/measure.py --device cpu                rehearsal: the same code, a small shape, float32

Hidden 4096, 5 layers, block 16, 512 anchors, context 3072, vocabulary 151936, bf16, one sequence a step. Reports each
attention implementation alone (forward and backward of one layer) and in the whole step, the head and loss alone, tokens
per second, MFU (FLOPs that the mathematics needs over the device's dense bf16 peak), peak memory, and what D-PACE costs
over fixed decay (steps in turn). Times are medians of single steps between synchronised clocks.
"""
import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/benchmarks")]

from cases import QWEN3_8B, Shape, batch_of, config_of, drafter_of, table_of  # noqa: E402
from pipeline import runtime as runtime_module  # noqa: E402
from pipeline.attention import IMPLEMENTATIONS, why_not  # noqa: E402
from pipeline.config import RunConfig  # noqa: E402
from pipeline.engine import build_engine, resolve_ds_config  # noqa: E402
from pipeline.loss import block_loss  # noqa: E402
from pipeline.throughput import flops, peak_flops  # noqa: E402

REHEARSAL = Shape(hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=256, vocabulary=1000, layers=2, context=256,
                  anchors=24, batch=1)


class Clock:
    def __init__(self, device: torch.device):
        self.device = device

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def milliseconds(self, run: Callable[[], None], rounds: int, warm: int = 3) -> float:
        """Median of `rounds` calls after `warm` that do not count."""
        return self.in_turn({"": run}, rounds, warm)[""]

    def in_turn(self, runs: dict[str, Callable[[], None]], rounds: int, warm: int = 3) -> dict[str, float]:
        """Medians of runs that take turns."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(warm + rounds):
            for name, run in runs.items():
                began = self.now()
                run()
                if number >= warm:
                    times[name].append(1000 * (self.now() - began))
        return {name: statistics.median(values) for name, values in times.items()}


class Measurement:
    def __init__(self, shape: Shape, runtime):
        self.shape, self.runtime, self.clock = shape, runtime, Clock(runtime.device)
        self.table = table_of(shape, runtime.device).to(runtime.dtype)
        self.mb = batch_of(shape).to(runtime.device, runtime.dtype)
        self.results: dict = {"shape": asdict(shape), "torch": torch.__version__, "precision": runtime.precision}

    def attention_alone(self, names: list[str], rounds: int) -> None:
        """One layer's attention, forward and backward."""
        shape, Q = self.shape, self.shape.anchors * self.shape.block
        lengths = ((shape.heads, Q), *[(shape.kv_heads, n) for n in (shape.context, shape.context, Q, Q)])
        tensors = [torch.randn(shape.batch, length, heads, shape.head_dim, device=self.runtime.device,
                               dtype=self.runtime.dtype).transpose(1, 2).requires_grad_() for heads, length in lengths]
        weight = torch.randn_like(tensors[0])

        def once(attend) -> None:
            torch.autograd.grad(attend(*tensors), tensors, weight)

        def plan(implementation) -> None:
            implementation(self.mb.anchors_BN, None, shape.block, shape.context)

        found = {}
        for name in names:
            attend = IMPLEMENTATIONS[name](self.mb.anchors_BN, None, shape.block, shape.context)
            found[name] = {"layer_ms": self.clock.milliseconds(partial(once, attend), rounds),
                           "plan_ms": self.clock.milliseconds(partial(plan, IMPLEMENTATIONS[name]), rounds)}
            print(f"attention {name:<7}{found[name]['layer_ms']:>9.2f} ms forward and backward of a layer, "
                  f"{found[name]['plan_ms']:.2f} ms its masks, once a pass", flush=True)
        self.results["attention"] = found

    def loss_alone(self, rounds: int, budgets: list[int | None]) -> None:
        hidden = torch.randn(self.shape.batch * self.shape.anchors, self.shape.block, self.shape.hidden,
                             device=self.runtime.device, dtype=self.runtime.dtype, requires_grad=True)

        def once(budget) -> None:
            torch.autograd.grad(self.loss(hidden, "dpace", budget), hidden)

        self.results["loss_ms"] = {str(budget or "default"): self.clock.milliseconds(partial(once, budget), rounds)
                                   for budget in budgets}
        print("head and loss, forward and backward:",
              ", ".join(f"{ms:.2f} ms ({budget} bytes of logits)" for budget, ms in self.results["loss_ms"].items()), flush=True)

    def loss(self, hidden_AKD, kind: str, budget: int | None = None) -> torch.Tensor:
        mb = self.mb
        out = block_loss(hidden_AKD, self.table, mb.labels_BNJ.flatten(0, 1), mb.mask_BNJ.flatten(0, 1), kind, gamma=7.0,
                         chunk_bytes=budget)
        return out.numerator / mb.mask_BNJ[..., 0].sum()

    def engine(self):
        drafter = drafter_of(self.shape, self.runtime.device)
        with tempfile.TemporaryDirectory() as folder:
            run = RunConfig(out=Path(folder), optim={"global_batch": self.shape.batch, "micro_batch": self.shape.batch})
        ds_config = resolve_ds_config(ROOT / "ds_configs/zero3.json", run, self.runtime, 1)
        return build_engine(drafter, ds_config, self.runtime)

    def steps(self, names: list[str], rounds: int) -> None:
        engine, mb = self.engine(), self.mb

        def step(kind: str = "dpace") -> None:
            noise = torch.nn.functional.embedding(mb.block_ids_BT, self.table)
            hidden = engine(noise, mb.features_BSE, mb.anchors_BN, mb.starts_BN)
            engine.backward(self.loss(hidden.unflatten(1, (-1, self.shape.block)).flatten(0, 1), kind))
            engine.step()

        needed, peak = flops(mb, config_of(self.shape)), peak_flops(self.runtime.device, self.runtime.precision)
        found = {}
        for name in names:
            engine.module.attention = name
            if self.runtime.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            ms = self.clock.milliseconds(step, rounds)
            found[name] = {"step_ms": ms, "tokens_per_second": mb.real_tokens / ms * 1000, "tflops": needed / ms / 1e9,
                           "mfu": needed / ms * 1000 / peak if peak else None,
                           "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if self.runtime.device.type == "cuda" else None}
            print(f"step with {name:<7}{ms:>9.2f} ms, {found[name]['tokens_per_second']:.0f} tokens/s, "
                  f"{found[name]['tflops']:.1f} TFLOP/s" + (f", MFU {found[name]['mfu']:.1%}, peak {found[name]['peak_gib']:.1f} "
                                                            "GiB" if peak else ""), flush=True)
        self.results["step"] = found
        engine.module.attention = best = min(found, key=lambda name: found[name]["step_ms"])
        self.results["phases_ms"] = self.phases(engine, rounds)
        by_kind = self.clock.in_turn({kind: partial(step, kind) for kind in ("decay", "dpace")}, 2 * rounds)
        self.results["best"] = best
        self.results["dpace_overhead"] = by_kind["dpace"] / by_kind["decay"] - 1
        print(f"D-PACE over fixed decay with {best}: {by_kind['dpace']:.2f} against {by_kind['decay']:.2f} ms, "
              f"{self.results['dpace_overhead']:+.2%}", flush=True)

    def phases(self, engine, rounds: int) -> dict[str, float]:
        """Where a step's time goes: drafter forward, head and loss, backward through the drafter, optimizer."""
        mb, times = self.mb, {}
        for _ in range(rounds):
            marks = [self.clock.now()]
            noise = torch.nn.functional.embedding(mb.block_ids_BT, self.table)
            hidden = engine(noise, mb.features_BSE, mb.anchors_BN, mb.starts_BN)
            marks.append(self.clock.now())
            loss = self.loss(hidden.unflatten(1, (-1, self.shape.block)).flatten(0, 1), "dpace")
            marks.append(self.clock.now())
            engine.backward(loss)
            marks.append(self.clock.now())
            engine.step()
            marks.append(self.clock.now())
            for name, begin, end in zip(("forward", "head and loss", "backward", "optimizer"), marks, marks[1:]):
                times.setdefault(name, []).append(1000 * (end - begin))
        medians = {name: statistics.median(values) for name, values in times.items()}
        print("phases, each waited for:", ", ".join(f"{name} {ms:.1f} ms" for name, ms in medians.items()), flush=True)
        return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS, help="these attention implementations alone")
    parser.add_argument("--batch", type=int, default=1, help="sequences a step")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here; rehearse with --device cpu")
    runtime = runtime_module.start("auto" if args.device == "cuda" else "fp32")
    shape = replace(QWEN3_8B if args.device == "cuda" else REHEARSAL, batch=args.batch)
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    reasons = {name: None if name == "sdpa" else why_not(name, runtime.device, runtime.dtype, heads)
               for name in args.only or IMPLEMENTATIONS}
    names = [name for name, reason in reasons.items() if reason is None]
    print("\n".join(f"attention {name} not measured: {reason}" for name, reason in reasons.items() if reason), flush=True)
    measurement = Measurement(shape, runtime)
    measurement.results |= {"device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu", "not_measured":
                            {name: reason for name, reason in reasons.items() if reason}}
    try:
        measurement.attention_alone(names, args.rounds)
        measurement.loss_alone(args.rounds, [None, 2**28, 2**29, 2**30] if args.device == "cuda" else [None])
        measurement.steps(names, args.rounds)
    finally:
        if args.json:
            args.json.write_text(json.dumps(measurement.results, indent=2) + "\n")


if __name__ == "__main__":
    main()
