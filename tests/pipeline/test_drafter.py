"""What the drafter may see, and that training and inference are one function."""
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep.errors import UserError
from pipeline.anchors import block_input_ids, block_labels
from pipeline.drafter import DFlashDrafter
from pipeline.drafter_config import DrafterConfig
from pipeline.loss import block_loss
from tests.paths import GOLDEN

S, K, V = 20, 4, 50


def tiny_config(**changes) -> DrafterConfig:
    values = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                  intermediate_size=24, rms_norm_eps=1e-6, vocab_size=V, max_position_embeddings=128,
                  rope_parameters=json.dumps({"rope_theta": 10000.0, "rope_type": "default"}), initializer_range=0.3,
                  block_size=K, mask_token_id=V - 1, target_layer_ids=(0, 2), num_target_layers=4)
    return DrafterConfig(**{**values, **changes})


@pytest.fixture(scope="module")
def world():
    drafter = DFlashDrafter(tiny_config()).initialise(seed=1).double()
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, V - 1, (1, S), generator=g)
    features = torch.randn(1, S, 32, generator=g, dtype=torch.float64)
    table = torch.randn(V, 16, generator=g, dtype=torch.float64)
    return drafter, ids, features, table


def hidden_of(world, anchors, features=None):
    drafter, ids, stored, table = world
    anchors = torch.as_tensor(anchors)[None]
    return drafter(table[block_input_ids(ids, anchors, K, V - 1)], stored if features is None else features, anchors)


def test_a_block_depends_on_exactly_the_states_before_its_anchor(world):
    anchors = [4, 5, 6, 7]
    features = world[2].clone().requires_grad_()
    hidden = hidden_of(world, anchors, features)
    for n, a in enumerate(anchors):
        (grad,) = torch.autograd.grad(hidden[:, n * K:(n + 1) * K].sum(), features, retain_graph=True)
        seen = grad[0].abs().sum(-1)
        assert (seen[a:] == 0).all(), f"the block at {a} sees states at or behind its anchor"
        assert (seen[:a] > 0).all(), f"the block at {a} misses states before its anchor"


def test_a_block_is_the_same_alone_and_among_fifty_others(world):
    drafter, ids, _, table = world
    anchors = sorted([3, 3, 9] + list(range(2, 19)) * 3)[:50]
    among = hidden_of(world, anchors).unflatten(1, (-1, K))
    labels, mask = block_labels(ids, torch.ones_like(ids), torch.tensor([anchors]), torch.ones(1, 50, dtype=torch.bool), K)
    for n in (0, 7, 23, 49):
        alone = hidden_of(world, [anchors[n]]).unflatten(1, (-1, K))
        assert (alone[0, 0] - among[0, n]).abs().max() < 1e-12
        losses = [block_loss(h, table, labels[0, n:n + 1], mask[0, n:n + 1], "dpace").numerator.item()
                  for h in (alone[0], among[0, n:n + 1])]
        assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_attention_inside_a_block_is_bidirectional(world):
    drafter, ids, features, table = world
    anchors = torch.tensor([[6]])
    noise = table[block_input_ids(ids, anchors, K, V - 1)].clone().requires_grad_()
    out = drafter(noise, features, anchors)
    (grad,) = torch.autograd.grad(out[0, 1].sum(), noise)
    assert grad[0, 3].abs().sum() > 0


@pytest.mark.parametrize("a", [0, 1, 6, 13])
def test_the_masked_training_forward_equals_the_cached_inference_forward(world, a):
    drafter, ids, features, table = world
    trained = hidden_of(world, [2, a, 15]).unflatten(1, (-1, K))[0, 1]
    cache = drafter.new_cache()
    for first, last in ((0, a // 2), (a // 2, a)):
        if last > first:
            drafter.extend(cache, features[:, first:last])
    assert cache.length == a
    noise = table[block_input_ids(ids, torch.tensor([[a]]), K, V - 1)]
    drafted = drafter.draft(cache, noise)
    assert (drafted[0] - trained).abs().max() < 1e-12
    assert torch.equal(drafted, drafter.draft(cache, noise)), "drafting must leave the cache as it was"


def test_slot_k_of_anchor_a_is_labelled_with_token_a_plus_k():
    ids = torch.arange(20)[None]
    labels, mask = block_labels(ids, torch.ones_like(ids), torch.tensor([[6, 17]]), torch.tensor([[True, True]]), 4)
    assert labels[0, 0].tolist() == [7, 8, 9] and mask[0, 0].all()
    assert labels[0, 1].tolist() == [18, 19, 0] and mask[0, 1].tolist() == [True, True, False]


def test_a_block_ends_at_its_first_unsupervised_slot():
    ids = torch.arange(10)[None]
    supervised = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 1, 1]])
    _, mask = block_labels(ids, supervised, torch.tensor([[1, 4]]), torch.tensor([[True, False]]), 5)
    assert mask[0, 0].tolist() == [True, False, False, False] and not mask[0, 1].any()


def test_initial_weights_are_a_function_of_the_seed_with_the_configured_spread():
    config = tiny_config(hidden_size=128, intermediate_size=256, initializer_range=0.02)
    one, two, other = (DFlashDrafter(config).initialise(seed) for seed in (3, 3, 4))
    for (name, a), b, c in zip(one.named_parameters(), two.parameters(), other.parameters()):
        assert torch.equal(a, b), name
        if name.endswith("norm.weight"):
            assert (a == 1).all(), name
        else:
            assert not torch.equal(a, c) and a.std().item() == pytest.approx(0.02, rel=0.1), name


def test_save_and_load_keep_every_tensor_and_the_configuration(tmp_path, world):
    drafter = DFlashDrafter(tiny_config()).initialise(0)
    drafter.save_pretrained(tmp_path / "d")
    again = DFlashDrafter.from_pretrained(tmp_path / "d")
    assert again.config == drafter.config
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters()))
    assert set(load_file(tmp_path / "d/model.safetensors")) == set(load_file(GOLDEN / "qwen3/drafter/model.safetensors"))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_exported_config_has_all_keys_of_a_published_one_and_equal_values(family):
    public = json.loads((GOLDEN / family / "drafter/config.json").read_text())
    ours = DrafterConfig.from_json(GOLDEN / family / "drafter/config.json").to_public(torch.float32)
    same = set(public) - {"transformers_version", "dflash_config", "rope_parameters", "max_window_layers"}
    assert {k: ours[k] for k in same} == {k: public[k] for k in same}
    assert ours["rope_parameters"] == public["rope_parameters"]
    assert ours["dflash_config"] == {**public["dflash_config"], "block_size": public["block_size"]}
    assert ours["is_causal"] is False and ours["sliding_window"] is None and ours["tie_word_embeddings"] is False


def test_rope_tables_of_the_trainer_and_of_the_exported_config_are_bit_equal(tmp_path):
    target = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 8,
              "max_position_embeddings": 8192, "num_hidden_layers": 6, "partial_rotary_factor": 0.25,
              "rope_parameters": {"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 0.25}}
    config = DrafterConfig.for_target(target, num_layers=1, block_size=4, mask_token_id=5, target_layer_ids=[1], vocab_size=9)
    drafter = DFlashDrafter(config).initialise(0)
    drafter.save_pretrained(tmp_path / "d")
    again = DFlashDrafter.from_pretrained(tmp_path / "d")
    x, positions = torch.zeros(1, 3, 16), torch.tensor([[0, 7, 5000]])
    for ours, theirs in zip(drafter.rotary_emb(x, positions), again.rotary_emb(x, positions)):
        assert torch.equal(ours, theirs) and ours.shape[-1] == 16
    written = json.loads((tmp_path / "d/config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 5e6


@pytest.mark.parametrize("damage,message", [
    (lambda c, t: c["dflash_config"].pop("target_layer_ids"), "dflash_config.target_layer_ids"),
    (lambda c, t: c.pop("block_size"), "block_size"),
    (lambda c, t: c["dflash_config"].update(mask_token_id=V), "mask_token_id 50 is no row"),
    (lambda c, t: c["dflash_config"].update(target_layer_ids=[0, 3]), "the last of 4 layers is excluded"),
    (lambda c, t: c.update(rope_theta=1.0), "two values of rope_theta"),
    (lambda c, t: t.pop("fc.weight"), "missing fc.weight"),
    (lambda c, t: t.update({"lm_head.weight": torch.zeros(2)}), "unknown lm_head.weight"),
    (lambda c, t: t.update({"norm.weight": torch.zeros(2)}), r"norm.weight is \(2,\), expected \(16,\)")])
def test_a_damaged_drafter_folder_is_refused_with_its_reason(tmp_path, damage, message):
    DFlashDrafter(tiny_config()).initialise(0).save_pretrained(tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    damage(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        DFlashDrafter.from_pretrained(tmp_path)
