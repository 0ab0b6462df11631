"""Starting from the target's last layers: at step 0 the context's keys and values are the target's own."""
import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.errors import UserError
from data_prep.target import read_config
from data_prep.tiny_target import make_tiny_target
from pipeline.drafter import DFlashDrafter
from pipeline.drafter_config import DrafterConfig
from pipeline.start import start_from_drafter, start_from_target


def drafter_for(folder, **changes):
    config = read_config(folder) | changes
    return DFlashDrafter(DrafterConfig.for_target(config, num_layers=2, block_size=4, mask_token_id=299,
                                                  target_layer_ids=[1, 3], vocab_size=300)).initialise(0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_context_keys_and_values_of_step_0_are_those_of_the_targets_next_layer(tmp_path, family):
    make_tiny_target(tmp_path, family=family)
    drafter = start_from_target(drafter_for(tmp_path), tmp_path)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        states = target(torch.randint(3, 290, (1, 12)), output_hidden_states=True).hidden_states
        features = torch.cat([states[2], states[4]], -1)
        layer = target.model.layers[4]
        x = layer.input_layernorm(states[4])
        # the norm's epsilon weighs a little more on the scaled-down feature
        torch.testing.assert_close(drafter.context(features), x, rtol=1e-3, atol=1e-4)
        values = layer.self_attn.v_proj(x).unflatten(-1, (-1, drafter.config.head_dim)).transpose(1, 2)
        rope = drafter.rotary_emb(x, torch.arange(12)[None])
        _, ours = drafter.layers[0].self_attn.keys_values(drafter.context(features), rope)
    torch.testing.assert_close(ours, values, rtol=1e-3, atol=1e-3)
    for copied, source in zip(drafter.layers, target.model.layers[4:]):
        assert torch.equal(copied.mlp.down_proj.weight, source.mlp.down_proj.weight)


def test_a_target_whose_layers_do_not_fit_is_refused_with_the_remedy(tmp_path):
    make_tiny_target(tmp_path)
    with pytest.raises(UserError, match="mlp.down_proj.weight is .* Its layers do not fit .* set drafter.init to random"):
        start_from_target(drafter_for(tmp_path, intermediate_size=40), tmp_path)


def test_a_drafter_starts_from_another_ones_weights_and_refuses_one_that_reads_other_layers(tmp_path):
    make_tiny_target(tmp_path / "target")
    source = drafter_for(tmp_path / "target").initialise(7)
    source.save_pretrained(tmp_path / "drafter")
    drafter = start_from_drafter(drafter_for(tmp_path / "target"), tmp_path / "drafter")
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), source.parameters(), strict=True))
    config = read_config(tmp_path / "target")
    other = DFlashDrafter(DrafterConfig.for_target(config, num_layers=2, block_size=4, mask_token_id=299,
                                                   target_layer_ids=[0, 2], vocab_size=300))
    with pytest.raises(UserError, match=r"target_layer_ids is \(1, 3\) there and \(0, 2\) here"):
        start_from_drafter(other, tmp_path / "drafter")
    with pytest.raises(UserError, match="drafter.init_from .* does not hold exactly the tensors"):
        start_from_drafter(drafter_for(tmp_path / "target", intermediate_size=40), tmp_path / "drafter")
