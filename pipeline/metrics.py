"""What a run says of itself: metrics.jsonl (one line an optimizer step) and TensorBoard, both once per step.

Reductions stay (numerator, denominator) until `step_metrics` divides them, after all ranks were summed.
"""
import json
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from data_prep.files import write_atomic
from pipeline.loss import BlockLoss


def tally(out: BlockLoss, mask_AJ: Tensor, alpha: float) -> Tensor:
    """float64 [5 + 5 * J]: sums over blocks that ranks and micro-batches add up.

    loss numerator, valid anchors, supervised slots, right slots, surrogate; then per slot: supervised slots, blocks
    accepted up to the slot (the drafter's argmax is the label there and in all slots before), sum of weights, right
    slots, sum of q. The surrogate is D-PACE's S~ = sum_k prod_{i<=k} q~_i with the smoothed q~ = (1 - alpha) q + alpha.
    """
    right_AJ = out.correct & mask_AJ
    q_AJ = torch.exp(-out.nll.double()) * mask_AJ
    smooth_AJ = ((1 - alpha) * q_AJ + alpha) * mask_AJ
    per_slot = [mask_AJ.sum(0), right_AJ.long().cumprod(-1).sum(0), out.weights.sum(0), right_AJ.sum(0), q_AJ.sum(0)]
    scalars = torch.stack([out.numerator.detach().double(), mask_AJ[:, 0].sum().double(), mask_AJ.sum().double(),
                           right_AJ.sum().double(), smooth_AJ.cumprod(-1).sum()])
    return torch.cat([scalars, *(x.double() for x in per_slot)])


def step_metrics(sums: Tensor, denominator: float) -> dict[str, float]:
    """Named values of one optimizer step. `accepted_length` is the teacher-forced tau: 1 + accepted slots per anchor,
    blocks cut at the end of their supervision; serving visits other anchors, so it is a trend and not a promise.
    Per slot, `accuracy` and `q` are means over supervised slots, `accepted_per_slot` asks for all slots before as well."""
    numerator, anchors, slots, right, surrogate = sums[:5].tolist()
    alive, accepted, weights, right_J, q = sums[5:].view(5, -1)
    values = {
        "loss": numerator / denominator,
        "surrogate": surrogate / max(anchors, 1),
        "accuracy": right / max(slots, 1),
        "accepted_length": 1.0 + accepted.sum().item() / max(anchors, 1),
        "weights_per_anchor": weights.sum().item() / max(anchors, 1),
        "anchors": anchors,
    }
    per_slot = {"accepted_per_slot": accepted / alive.clamp(min=1), "accuracy": right_J / alive.clamp(min=1),
                "q": q / alive.clamp(min=1), "weight_share": weights / weights.sum().clamp(min=1e-30)}
    return values | {f"{name}/{j}": value for name, row in per_slot.items() for j, value in enumerate(row.tolist(), start=1)}


class MetricsLog:
    """Writer of rank 0: metrics.jsonl, heldout.jsonl, TensorBoard and the terminal. Opening it for step `start` forgets
    what an earlier, longer attempt wrote from there on; `evaluated`: the held-out line of `start` itself stays."""

    def __init__(self, folder: Path, start: int, evaluated: bool):
        folder.mkdir(parents=True, exist_ok=True)
        self._steps = _reopen(folder / "metrics.jsonl", start)
        self._heldout = _reopen(folder / "heldout.jsonl", start if evaluated else start - 1)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
        self._shown = []

    def write(self, step: int, values: dict[str, float], *, show: bool, total: int) -> None:
        """One step of `total`; `show` prints a line and adds a column to the heat map of weight shares."""
        self._line(self._steps, step, values)
        self._shown.append(values)
        if show:
            self._heat_map(step, [value for name, value in values.items() if name.startswith("weight_share/")])
            mean = {name: sum(v[name] for v in self._shown) / len(self._shown) for name in values}
            self._shown.clear()
            mfu = f"  mfu {mean['mfu']:.1%}" if "mfu" in mean else ""
            print(f"step {step}/{total}  loss {mean['loss']:.4f}  S~ {mean['surrogate']:.3f}  tau {mean['accepted_length']:.3f}"
                  f"  acc {mean['accuracy']:.1%}  lr {values['lr']:.1e}  norm {mean['grad_norm']:.2f}  "
                  f"{mean['sequences_per_second']:.1f} seq/s  {mean['tokens_per_second']:.0f} tok/s  "
                  f"{mean['anchors_per_second']:.0f} anchors/s  waiting {mean['waiting_share']:.0%}  padding "
                  f"{mean['padding_share']:.0%}  {values['memory_gib']:.1f} GiB{mfu}", flush=True)

    def write_heldout(self, step: int, values: dict[str, float]) -> None:
        self._line(self._heldout, step, values)
        print(f"step {step}  held out: walk tau {values['heldout/walk_tau']:.4f}, all anchors tau "
              f"{values['heldout/all_anchors_tau']:.4f}, loss {values['heldout/loss_per_anchor']:.4f} "
              f"({values['heldout/samples']:.0f} samples, {values['heldout/anchors']:.0f} anchors)", flush=True)

    def _line(self, file, step: int, values: dict[str, float]) -> None:
        file.write(json.dumps({"step": step, **values}) + "\n")
        file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def _heat_map(self, step: int, shares: list[float]) -> None:
        """Slot j fills the bin (j - 1/2, j + 1/2]; per mille, because bins hold counts."""
        slots = range(1, len(shares) + 1)
        counts = [1000 * share for share in shares]
        self._board.add_histogram_raw(
            "weight_share_per_slot", min=0.5, max=len(shares) + 0.5, num=1000, sum=sum(s * c for s, c in zip(slots, counts)),
            sum_squares=sum(s * s * c for s, c in zip(slots, counts)), bucket_limits=[s + 0.5 for s in slots],
            bucket_counts=counts, global_step=step)

    def close(self) -> None:
        self._steps.close()
        self._heldout.close()
        self._board.close()


def _reopen(path: Path, last: int):
    """The file opened for appending, with its lines up to step `last`."""
    if path.is_file():
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        write_atomic(path, "".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= last).encode())
    return path.open("a")
