"""How many bytes a run takes: computed before it (`--dry-run`), and measured on the engine once it is there."""
from dataclasses import dataclass

import torch

from pipeline.drafter import DFlashDrafter
from pipeline.drafter_config import DrafterConfig
from pipeline.engine import master_weights

MOMENTS = 2  # of AdamW


@dataclass(frozen=True)
class StateBytes:
    """What one rank holds, in bytes: parameters in the compute dtype, gradients, float32 master weights and moments."""

    parameters: int
    gradients: int
    optimizer: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {value / 2**20:.3g} MiB" for name, value in vars(self).items())


def parameter_counts(config: DrafterConfig) -> dict[str, int]:
    """Parameters of `fc`, of one layer, and in all."""
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    return {"fc": drafter.fc.weight.numel(), "layer": sum(p.numel() for p in drafter.layers[0].parameters()),
            "all": sum(p.numel() for p in drafter.parameters())}


def expected(parameters: int, stage: int, world: int, itemsize: int) -> StateBytes:
    """Per rank under a ZeRO stage: 1 shards the optimizer state, 2 the gradients as well, 3 the parameters as well.
    Gradients accumulate in float32 (ds_configs/), whatever the compute dtype of `itemsize` bytes."""
    per_rank = -(-parameters // world)
    return StateBytes(itemsize * (per_rank if stage >= 3 else parameters), 4 * (per_rank if stage >= 2 else parameters),
                      4 * (1 + MOMENTS) * per_rank)


def measured(engine) -> StateBytes:
    """What this rank's engine holds. Moments appear with the first step and are counted as if they were there; small
    parameters that ZeRO-3 keeps whole (stage3_param_persistence_threshold) count whole."""
    masters = master_weights(engine)
    if engine.zero_optimization_stage() == 3:
        parameters = sum(_bytes(p.ds_tensor) + _bytes(p.data) for p in engine.module.parameters())
        gradients = [engine.optimizer.grad_partitions_flat_buffer]
    else:
        parameters = sum(_bytes(p.data) for p in engine.module.parameters())
        gradients = masters  # partitions of the same length and dtype, made anew every step
    return StateBytes(parameters, sum(map(_bytes, gradients)), (1 + MOMENTS) * sum(map(_bytes, masters)))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
