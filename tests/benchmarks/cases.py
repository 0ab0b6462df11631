"""Drafters and batches of given dimensions, filled at random, for the benchmarks of the training step."""
import json
from dataclasses import dataclass

import torch

from pipeline.anchors import block_input_ids, block_labels
from pipeline.batches import MicroBatch
from pipeline.drafter import DFlashDrafter
from pipeline.drafter_config import DrafterConfig


@dataclass(frozen=True)
class Shape:
    """Dimensions of a step; `anchors` per sequence, `context` tokens per sequence."""

    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    intermediate: int = 1536
    vocabulary: int = 32768
    layers: int = 3
    features: int = 5
    block: int = 16
    context: int = 1024
    anchors: int = 128
    batch: int = 2


QWEN3_8B = Shape(hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocabulary=151936, layers=5,
                 context=3072, anchors=512, batch=1)


def config_of(shape: Shape) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, intermediate_size=shape.intermediate,
        rms_norm_eps=1e-6, vocab_size=shape.vocabulary, max_position_embeddings=2 * shape.context,
        rope_parameters=json.dumps({"rope_theta": 1e6, "rope_type": "default"}), initializer_range=0.02,
        block_size=shape.block, mask_token_id=shape.vocabulary - 1, target_layer_ids=tuple(range(shape.features)),
        num_target_layers=shape.features + 4)


def drafter_of(shape: Shape, device: torch.device = torch.device("cpu")) -> DFlashDrafter:
    """Random weights, drawn on the device: other numbers on a GPU than on a CPU, the same every time."""
    with device:
        drafter, random = DFlashDrafter(config_of(shape)), torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.fill_(1.0) if name.endswith("norm.weight") else parameter.normal_(0.0, 0.02, generator=random)
    return drafter


def batch_of(shape: Shape, seed: int = 0) -> MicroBatch:
    """Every token supervised; anchors uniform without replacement, ascending, as training draws them."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, shape.vocabulary - 1, (shape.batch, shape.context), generator=random)
    supervised = torch.ones_like(ids, dtype=torch.bool)
    anchors = torch.stack([torch.randperm(shape.context - 1, generator=random)[:shape.anchors].sort().values
                           for _ in range(shape.batch)])
    labels, mask = block_labels(ids, supervised, anchors, torch.ones_like(anchors, dtype=torch.bool), shape.block)
    features = torch.randn(shape.batch, shape.context, shape.features * shape.hidden, generator=random)
    return MicroBatch([f"random/{b}" for b in range(shape.batch)], features.bfloat16(),
                      block_input_ids(ids, anchors, shape.block, shape.vocabulary - 1), anchors, labels, mask,
                      shape.batch * shape.context)


def table_of(shape: Shape, device: torch.device = torch.device("cpu")) -> torch.Tensor:
    """A frozen embedding table, used as the head as well; float32 [V, D]."""
    random = torch.Generator(device).manual_seed(1)
    return torch.randn(shape.vocabulary, shape.hidden, generator=random, device=device) * 0.02
