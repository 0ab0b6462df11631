"""The training loop: one optimizer step at a time, each a function of its number.

Before the first backward pass of a step the loss's denominator is summed over its micro-batches and all ranks, so the
gradient is that of the global batch however it was cut. A termination signal on any rank becomes a checkpoint at the
same step on all.
"""
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from data_prep.errors import UserError
from pipeline import checkpoint
from pipeline.batches import MicroBatch, StepDataset
from pipeline.config import RunConfig
from pipeline.engine import set_learning_rate
from pipeline.loss import block_loss
from pipeline.metrics import MetricsLog, step_metrics, tally
from pipeline.normalisation import denominator
from pipeline.runtime import Runtime
from pipeline.schedule import learning_rate
from pipeline.target_head import TargetHead

PREEMPTED = 75  # exit code: stopped by a signal, checkpoint written, start again with --resume auto (EX_TEMPFAIL)


class StopSignal:
    """Remembers SIGTERM and SIGUSR1; the loop asks once a step, together with all other ranks."""

    def __init__(self):
        self.seen = False

    def _remember(self, *_):
        self.seen = True

    @contextmanager
    def installed(self):
        before = {number: signal.signal(number, self._remember) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass
class Trainer:
    run: RunConfig
    runtime: Runtime
    engine: object  # deepspeed.DeepSpeedEngine
    head: TargetHead
    data: StepDataset
    total_steps: int

    def step(self, step: int, micro_batches: list[MicroBatch], stop: bool = False) -> tuple[dict[str, float], bool]:
        """One optimizer step (0-based). Returns its metrics and whether any rank was asked to stop."""
        loss, runtime = self.run.loss, self.runtime
        micro_batches = [mb.to(runtime.device, runtime.dtype) for mb in micro_batches]
        shares = [denominator(loss.normalisation, loss.credit, mb.mask_BNJ.flatten(0, 1), sequences=len(mb.keys),
                              gamma=loss.gamma) for mb in micro_batches]
        stop_flag = torch.tensor(float(stop), dtype=torch.float64, device=runtime.device)
        total, stops = runtime.sum(torch.stack([torch.stack(shares).sum(), stop_flag])).tolist()
        if total <= 0:
            raise UserError(f"step {step}: no supervised slot in samples {[k for mb in micro_batches for k in mb.keys]}; "
                            "run `python -m data_prep verify` on the dataset")
        lr = learning_rate(step, self.total_steps, peak=self.run.optim.lr, minimum=self.run.optim.min_lr,
                           warmup_ratio=self.run.optim.warmup_ratio)
        set_learning_rate(self.engine, lr)
        sums = sum(self._backward(mb, total) for mb in micro_batches)
        values = step_metrics(runtime.sum(sums), total)
        values |= {"lr": lr, "grad_norm": float(self.engine.get_global_grad_norm())}
        if not all(torch.isfinite(torch.tensor([values["loss"], values["grad_norm"]]))):
            raise UserError(f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']} from samples "
                            f"{[k for mb in micro_batches for k in mb.keys]}; the last checkpoint is intact. Verify the "
                            "dataset, lower optim.lr, and resume")
        return values, stops > 0

    def _backward(self, mb: MicroBatch, total: float) -> torch.Tensor:
        loss, K = self.run.loss, self.run.drafter.block_size
        hidden_BTD = self.engine(self.head.embed(mb.block_ids_BT), mb.features_BSE, mb.anchors_BN)
        labels, mask = mb.labels_BNJ.flatten(0, 1), mb.mask_BNJ.flatten(0, 1)
        out = block_loss(hidden_BTD.unflatten(1, (-1, K)).flatten(0, 1), self.head.head_VD, labels, mask, loss.credit,
                         alpha=loss.alpha, gamma=loss.gamma)
        # ZeRO averages gradients over ranks; the denominator is already global, so the average is undone here.
        self.engine.backward(out.numerator * (self.runtime.world / total), scale_wrt_gas=False)
        self.engine.step()
        return tally(out, mask)

    def train(self, start: int, marker_of, stop: StopSignal) -> int:
        """Runs steps start..total_steps-1; returns the exit code: 0, or PREEMPTED after a signal.

        marker_of: done steps -> checkpoint.Marker.
        """
        run, runtime = self.run, self.runtime
        folder = run.out / "checkpoints"
        loader = DataLoader(self.data, batch_size=None, sampler=range(start, self.total_steps),
                            num_workers=run.data.workers, pin_memory=runtime.device.type == "cuda",
                            worker_init_fn=_ignore_signals)
        log = MetricsLog(run.out, start) if runtime.rank == 0 else None
        bar = tqdm(total=self.total_steps, initial=start, unit="step", desc="train", disable=runtime.rank != 0,
                   mininterval=1.0, dynamic_ncols=True)
        preempted = False
        began = time.perf_counter()
        for step, micro_batches in enumerate(loader, start=start):
            values, preempted = self.step(step, micro_batches, stop.seen)
            done = step + 1
            now = time.perf_counter()
            values["seconds"], began = now - began, now
            if log:
                log.write(done, values)
            bar.set_postfix(loss=f"{values['loss']:.3f}", tau=f"{values['accepted_length']:.3f}", lr=f"{values['lr']:.1e}")
            bar.update()
            if preempted or done % run.checkpoint.every == 0 or done == self.total_steps:
                checkpoint.save(self.engine, folder, marker_of(done), run.checkpoint.keep, runtime)
            if preempted:
                break
        bar.close()
        if log:
            log.close()
        if preempted and done < self.total_steps:
            runtime.say(f"stopped by a signal after step {done}; {folder / checkpoint.tag_of(done)} is complete, continue "
                        "with --resume auto")
            return PREEMPTED
        return 0


def _ignore_signals(_worker: int) -> None:
    """Workers die with their rank; a signal meant for the rank must not make them do anything."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
