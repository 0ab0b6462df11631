"""The training loop: one optimizer step at a time, each a function of its number.

Before the first backward pass of a step the loss's denominator is summed over its micro-batches and all ranks, so the
gradient is that of the global batch however it was cut. A step whose loss or gradient is not finite changes nothing, on
all ranks together. A stop asked of any rank becomes a checkpoint at the same step on all.
"""
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from data_prep.errors import UserError
from pipeline import checkpoint
from pipeline.batches import MicroBatch, StepDataset
from pipeline.config import RunConfig
from pipeline.engine import set_learning_rate, step_was_skipped
from pipeline.heldout import HeldoutSet
from pipeline.loader import StepBatch, StepLoader, agree
from pipeline.loss import BlockLoss, block_loss
from pipeline.metrics import MetricsLog, step_metrics, tally
from pipeline.normalisation import denominator
from pipeline.runtime import Runtime
from pipeline.schedule import learning_rate
from pipeline.stop import PREEMPTED, StopRequest
from pipeline.target_head import TargetHead
from pipeline.throughput import Speed, flops


@dataclass
class Progress:
    """Where a run stands: `done` steps, of which `skipped` were not finite, the last `skipped_in_row` of them in a row;
    `evaluated`: the held-out evaluation that was due at `done` has been made."""

    done: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    evaluated: bool = True


@dataclass
class Trainer:
    run: RunConfig
    runtime: Runtime
    engine: object  # deepspeed.DeepSpeedEngine
    head: TargetHead
    data: StepDataset
    heldout: HeldoutSet | None
    total_steps: int
    stop: StopRequest
    marker_of: Callable[[Progress, float | None], checkpoint.Marker]  # from progress and held-out number
    progress: Progress = field(default_factory=Progress)

    def step(self, step: int, batch: StepBatch) -> tuple[dict[str, float], bool]:
        """One optimizer step (0-based). Returns its metrics and whether any rank was asked to stop."""
        loss, runtime = self.run.loss, self.runtime
        micro_batches = batch.micro_batches
        share = sum((denominator(loss.normalisation, loss.credit, mb.mask_BNJ.flatten(0, 1), sequences=len(mb.keys),
                                 gamma=loss.gamma) for mb in micro_batches), torch.zeros((), dtype=torch.float64))
        total, damaged = agree(step, batch, share.to(runtime.device), self.run.data.on_error, runtime)
        total = total or 1.0  # where nothing is supervised the loss is 0, and so is its gradient
        lr = learning_rate(step, self.total_steps, peak=self.run.optim.lr, minimum=self.run.optim.min_lr,
                           warmup_ratio=self.run.optim.warmup_ratio)
        set_learning_rate(self.engine, lr)
        sums = sum(self._backward(mb.to(runtime.device, runtime.dtype), total) for mb in micro_batches)
        counts = [self.stop.seen, sum(len(mb.keys) for mb in micro_batches), sum(mb.real_tokens for mb in micro_batches),
                  sum(mb.features_BSE.shape[:2].numel() for mb in micro_batches),
                  sum(flops(mb, self.engine.module.config) for mb in micro_batches)]
        summed = runtime.sum(torch.cat([sums, torch.tensor(counts, dtype=torch.float64, device=runtime.device)]))
        stops, sequences, tokens, places, operations = summed[-len(counts):].tolist()
        values = step_metrics(summed[:-len(counts)], total) | {
            "lr": lr, "grad_norm": float(self.engine.get_global_grad_norm()), "sequences": sequences, "tokens": tokens,
            "padding_share": 1 - tokens / places, "flops": operations, "damaged_samples": damaged}
        return values, stops > 0

    def _forward(self, mb: MicroBatch) -> BlockLoss:
        loss, K = self.run.loss, self.run.drafter.block_size
        hidden_BTD = self.engine(self.head.embed(mb.block_ids_BT), mb.features_BSE, mb.anchors_BN, mb.starts_BN)
        return block_loss(hidden_BTD.unflatten(1, (-1, K)).flatten(0, 1), self.head.head_VD, mb.labels_BNJ.flatten(0, 1),
                          mb.mask_BNJ.flatten(0, 1), loss.credit, alpha=loss.alpha, gamma=loss.gamma)

    def _backward(self, mb: MicroBatch, total: float) -> torch.Tensor:
        out = self._forward(mb)
        # ZeRO averages gradients over ranks; the denominator is already global, so the average is undone here. A loss that
        # is not finite makes every gradient so, and DeepSpeed then skips the step on all ranks.
        scale = torch.where(out.numerator.detach().isfinite(), self.runtime.world / total, torch.nan)
        self.engine.backward(out.numerator * scale, scale_wrt_gas=False)
        self.engine.step()
        return tally(out, mb.mask_BNJ.flatten(0, 1), self.run.loss.alpha)

    def _count_skips(self, step: int, values: dict[str, float]) -> None:
        """Marks a step that was not finite; UserError after optim.max_nonfinite of them in a row."""
        progress = self.progress
        finite = not step_was_skipped(self.engine)
        progress.skipped_in_row = 0 if finite else progress.skipped_in_row + 1
        progress.skipped += not finite
        values["skipped_steps"] = progress.skipped
        if finite:
            return
        keys = [item.entry.key for item in self.data.plan.items(step)]
        self.runtime.say(f"step {step + 1} skipped: loss {values['loss']}, gradient norm {values['grad_norm']} from samples "
                         f"{', '.join(keys)}")
        if progress.skipped_in_row >= self.run.optim.max_nonfinite:
            raise UserError(
                f"step {step + 1}: loss or gradient was not finite for {progress.skipped_in_row} steps in a row (optim."
                f"max_nonfinite), this one from samples {', '.join(keys)}; the weights and the last checkpoint are intact. "
                "Run `python -m data_prep verify` on the dataset or lower optim.lr, then continue with --resume auto")

    def train(self) -> int:
        """Runs the steps that `progress` says are left; returns the exit code: 0, or PREEMPTED after a stop."""
        run, runtime, progress = self.run, self.runtime, self.progress
        log = MetricsLog(run.out, progress.done, progress.evaluated) if runtime.rank == 0 else None
        speed = Speed(runtime.device, runtime.precision, runtime.world)
        stopping = False if progress.evaluated else self._evaluate(log, again=True)
        with StepLoader(self.data, progress.done, self.total_steps, workers=run.data.workers, budget=run.data.prefetch_bytes,
                        pin_memory=runtime.device.type == "cuda") as batches:
            while progress.done < self.total_steps and not stopping:
                speed.start()
                batch = next(batches)
                speed.data_arrived()
                values, stopping = self.step(progress.done, batch)
                del batch  # its memory is what the next one is read into
                self._count_skips(progress.done, values)
                values |= speed.values(values)
                progress.done += 1
                last = progress.done == self.total_steps
                if log:
                    log.write(progress.done, values, show=progress.done % run.log.every == 0 or last, total=self.total_steps)
                every = run.evaluation.every if self.heldout else None
                progress.evaluated = not (every and (progress.done % every == 0 or last))
                due = progress.done % run.checkpoint.every == 0 or last
                if not progress.evaluated and not stopping:
                    stopping = self._evaluate(log, due)
                elif due or stopping:
                    self._save(None)
                    stopping = stopping or self.stop.asked()
        if log:
            log.close()
        if stopping and runtime.rank == 0:
            self.stop.clear()
        if not stopping or (progress.done == self.total_steps and progress.evaluated):
            return 0
        tag = run.out / "checkpoints" / checkpoint.tag_of(progress.done)
        runtime.say(f"stopped on request after step {progress.done}; {tag} is complete, continue with --resume auto")
        return PREEMPTED

    def _evaluate(self, log: MetricsLog | None, due: bool = False, again: bool = False) -> bool:
        """The evaluation of step `progress.done`, and its checkpoint where one is due or this is the best so far.

        again: it was cut short before, and the checkpoint is there but for the number. Returns whether a stop was asked
        for; then the checkpoint is there, and the resume repeats an evaluation that was cut short.
        """
        self.engine.eval()
        values = self.heldout.evaluate(self._forward, self.runtime, self.stop)
        self.engine.train()
        if values is None:
            if not again:
                self._save(None)
            return True
        self.progress.evaluated = True
        number = values["heldout/walk_tau"]
        if log:
            log.write_heldout(self.progress.done, values)
        folder = self.run.out / "checkpoints"
        if again:
            checkpoint.amend(folder, self.marker_of(self.progress, number), self.runtime)
            return self.stop.asked()
        stopping = self.stop.asked()
        if stopping or due or checkpoint.is_best(folder, number, self.runtime):
            self._save(number)
            stopping = stopping or self.stop.asked()
        return stopping

    def _save(self, number: float | None) -> None:
        checkpoint.save(self.engine, self.run.out / "checkpoints", self.marker_of(self.progress, number),
                        self.run.checkpoint, self.runtime)
