"""What an exported folder holds, and what is never exported (a checkpoint's own weights: test_training.py)."""

import json
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file

from data_prep.errors import UserError
from pipeline.checkpoint import MARKER, UNTRAINED, Marker
from pipeline.drafter import DFlashDrafter
from pipeline.drafter_config import DrafterConfig
from pipeline.export import export

TARGET = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 8,
    "max_position_embeddings": 64,
    "num_hidden_layers": 4,
    "rope_theta": 10000.0,
}


def checkpoints(folder, spoil=lambda drafter: None):
    """A folder of checkpoints whose untrained drafter (2 layers, block 4) is `spoil`ed."""
    config = DrafterConfig.for_target(
        TARGET, num_layers=2, block_size=4, mask_token_id=5, target_layer_ids=[1, 2], vocab_size=50
    )
    drafter = DFlashDrafter(config).initialise(0)
    with torch.no_grad():
        spoil(drafter)
    drafter.save_pretrained(folder / UNTRAINED)
    template = {"sha256": "t", "args": {"enable_thinking": False}}
    marker = Marker(1, 1, {}, config.to_public(torch.float32), "m", 1, {}, template=template)
    (folder / "step000001").mkdir()
    (folder / "step000001" / MARKER).write_text(json.dumps(asdict(marker)))
    return folder


def test_an_export_holds_the_drafters_tensors_and_nothing_of_the_target(tmp_path):
    """Cases 90, 93, 95 and 97."""
    export(checkpoints(tmp_path), tmp_path / "drafter", untrained=True)
    tensors = load_file(tmp_path / "drafter/model.safetensors")
    layer = [
        "input_layernorm",
        "post_attention_layernorm",
        "mlp.down_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        *(f"self_attn.{name}" for name in ("k_norm", "k_proj", "o_proj", "q_norm", "q_proj", "v_proj")),
    ]
    names = {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        *(f"layers.{i}.{name}.weight" for i in (0, 1) for name in layer),
    }
    assert set(tensors) == names
    assert all(tensor.numel() and torch.isfinite(tensor).all() for tensor in tensors.values())
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4  # engines draft 3 tokens with it
    assert config["dflash_config"]["target_layer_ids"] == [1, 2] and config["dflash_config"]["mask_token_id"] == 5
    note = json.loads((tmp_path / "drafter/training.json").read_text())
    assert note["template"] == {"sha256": "t", "args": {"enable_thinking": False}} and note["step"] == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_never_exported(tmp_path, value):
    def spoil(drafter):
        drafter.layers[1].mlp.up_proj.weight[0, 0] = value

    with pytest.raises(UserError, match=r"layers.1.mlp.up_proj.weight hold values that are not finite"):
        export(checkpoints(tmp_path, spoil), tmp_path / "drafter", untrained=True)
    assert not (tmp_path / "drafter").exists()
