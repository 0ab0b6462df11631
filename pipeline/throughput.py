"""How fast a run is: rates, the share of time spent waiting, memory, and model FLOPs utilisation.

FLOPs are those the mathematics needs, a multiply-add counted as two: forward and twice as much backward for the
drafter's matrices and visible attention scores; for the frozen head its logits and the gradient of the hidden states.
"""
import time

import psutil
import torch

from pipeline.batches import MicroBatch
from pipeline.drafter_config import DrafterConfig

# Dense bf16 peak in FLOP/s by a part of the device's name, from the vendors' data sheets (without sparsity).
PEAKS = {"GB200": 2.5e15, "B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "H800": 989e12,
         "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12,
         "RTX 4090": 165e12, "RTX 5090": 210e12, "MI300X": 1307e12}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak; None where it is not known (CPUs, other precisions than bf16)."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def flops(mb: MicroBatch, config: DrafterConfig) -> float:
    """FLOPs of one micro-batch's forward and backward pass, padding left out."""
    D, K = config.hidden_size, config.block_size
    query, key = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    used_BN = mb.mask_BNJ[..., 0]
    blocks = int(used_BN.sum())
    per_context_token = len(config.target_layer_ids) * D * D + config.num_hidden_layers * 2 * D * key
    per_slot = config.num_hidden_layers * (2 * D * query + 2 * D * key + 3 * D * config.intermediate_size)
    scores = K * (int(mb.positions_BN[used_BN].sum()) + blocks * K)
    drafter = mb.real_tokens * per_context_token + blocks * K * per_slot + config.num_hidden_layers * 2 * query * scores
    head = int(mb.mask_BNJ.sum()) * D * config.vocab_size
    return 2.0 * (3 * drafter + 2 * head)


class Speed:
    """Measures one step after another on rank 0; evaluations and saves between them do not count."""

    def __init__(self, device: torch.device, precision: str, world: int):
        self.device, self.world = device, world
        self.peak = peak_flops(device, precision)
        self._began = self._arrived = time.perf_counter()

    def start(self) -> None:
        self._began = time.perf_counter()

    def data_arrived(self) -> None:
        self._arrived = time.perf_counter()

    def values(self, counts: dict[str, float]) -> dict[str, float]:
        """counts: sequences, tokens, anchors and flops of the step, over all ranks. The step's numbers have been read
        from the device by now, so its work is done."""
        seconds = time.perf_counter() - self._began
        rates = {f"{name}_per_second": counts[name] / seconds for name in ("sequences", "tokens", "anchors")}
        if self.peak:
            rates["mfu"] = counts["flops"] / seconds / (self.peak * self.world)
        return {"seconds": seconds, "waiting_share": (self._arrived - self._began) / seconds,
                "memory_gib": self._memory_gib(), **rates}

    def _memory_gib(self) -> float:
        """The device's peak since the start; on a CPU what the process holds now."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        return psutil.Process().memory_info().rss / 2**30
