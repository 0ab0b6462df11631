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


def tally(out: BlockLoss, mask_AJ: Tensor) -> Tensor:
    """float64 [4 + 3 * J]: sums over blocks that ranks and micro-batches add up.

    loss numerator, valid anchors, supervised slots, right slots; then per slot: alive blocks, blocks accepted up to the
    slot (the drafter's argmax is the label there and in all slots before), sum of weights.
    """
    accepted_AJ = (out.correct & mask_AJ).long().cumprod(-1)
    per_slot = [mask_AJ.sum(0), accepted_AJ.sum(0), out.weights.sum(0)]
    scalars = torch.stack([out.numerator.detach().double(), mask_AJ[:, 0].sum().double(), mask_AJ.sum().double(),
                           (out.correct & mask_AJ).sum().double()])
    return torch.cat([scalars, *(x.double() for x in per_slot)])


def step_metrics(sums: Tensor, denominator: float) -> dict[str, float]:
    """Named values of one optimizer step. `accepted_length` is the teacher-forced tau: 1 + accepted slots per anchor,
    blocks cut at the end of their supervision; serving visits other anchors, so it is a trend and not a promise."""
    numerator, anchors, slots, right = sums[:4].tolist()
    alive, accepted, weights = sums[4:].view(3, -1)
    values = {
        "loss": numerator / denominator,
        "accuracy": right / max(slots, 1),
        "accepted_length": 1.0 + accepted.sum().item() / max(anchors, 1),
        "anchors": anchors,
    }
    share = weights / weights.sum().clamp(min=1e-30)
    for j, (a, n, w) in enumerate(zip(accepted.tolist(), alive.tolist(), share.tolist()), start=1):
        values[f"accepted_per_slot/{j}"] = a / max(n, 1)
        values[f"weight_share/{j}"] = w
    return values


class MetricsLog:
    """Writer of rank 0. Opening it for step `start` forgets what an earlier, longer attempt wrote from there on."""

    def __init__(self, folder: Path, start: int):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        if path.is_file():
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] <= start]
            write_atomic(path, "".join(f"{line}\n" for line in kept).encode())
        self._file = path.open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()
