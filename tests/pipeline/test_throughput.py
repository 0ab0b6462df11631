"""Rates and FLOPs: what is counted is what the operations do."""
import time

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeline.batches import MicroBatch
from pipeline.drafter import DFlashDrafter
from pipeline.drafter_config import DrafterConfig
from pipeline.loss import block_loss
from pipeline.throughput import Speed, flops

TARGET = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
          "max_position_embeddings": 64, "num_hidden_layers": 6, "rope_theta": 1e4}


def test_flops_of_a_micro_batch_are_those_that_torch_counts_forward_and_backward():
    config = DrafterConfig.for_target(TARGET, num_layers=2, block_size=4, mask_token_id=99, target_layer_ids=[1, 3],
                                      vocab_size=100)
    drafter = DFlashDrafter(config).initialise(0)
    features, anchors = torch.randn(1, 20, 64), torch.tensor([[13]])
    mask = torch.tensor([[[True, True, False]]])
    mb = MicroBatch(["a"], features, torch.zeros(1, 4, dtype=torch.int64), anchors, torch.zeros(1, 1, 3, dtype=torch.int64),
                    mask, real_tokens=20)
    noise, head = torch.randn(1, 4, 32, requires_grad=True), torch.randn(100, 32)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        hidden = drafter(noise, features, anchors)
        block_loss(hidden.unflatten(1, (1, 4)).flatten(0, 1), head, mb.labels_BNJ[0], mask[0], "dpace").numerator.backward()
    first_inputs = 2 * 20 * 64 * 32  # the stored states need no gradient, which the 3 x forward rule counts
    assert flops(mb, config) == counter.get_total_flops() + first_inputs


def test_rates_count_the_step_and_waiting_is_its_share():
    speed = Speed(torch.device("cpu"), "fp32", 2)
    speed.start()
    time.sleep(0.03)
    speed.data_arrived()
    time.sleep(0.01)
    values = speed.values({"sequences": 4.0, "tokens": 100.0, "anchors": 10.0, "flops": 1e9})
    assert values["tokens_per_second"] == pytest.approx(100 / values["seconds"]) and 0.5 < values["waiting_share"] < 0.9
    assert "mfu" not in values and values["memory_gib"] > 0  # a CPU's peak is not known
