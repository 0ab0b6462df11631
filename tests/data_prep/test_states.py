"""The states themselves: padded or alone, whole or in chunks, in any dtype and storage, they are the target's."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from data_prep.errors import UserError
from data_prep.extract import extract
from data_prep.features import FeatureTaps
from data_prep.manifest import Manifest, read_index
from data_prep.model import load_model
from data_prep.samples import read_sample
from data_prep.shards import read_meta
from data_prep.verify import TOLERANCE, verify

from .conftest import LAYERS, SETTINGS
from .test_verify import change_sample, findings


def tensors_of(folder):
    """[(tensors, KEY.json)] of a dataset, in order."""
    entries = read_index(folder, Manifest.read(folder))
    return [
        (read_sample(folder / e.shard, e.offset, e.nbytes), read_meta(folder / e.shard, e.key)) for e in entries
    ]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_states_of_a_padded_batch_equal_those_of_single_runs(target, dtype):
    taps = FeatureTaps(load_model(target, getattr(torch, dtype)), LAYERS)
    ids = [torch.arange(3, 3 + n, dtype=torch.int32) * 7 % 290 for n in (40, 23, 11)]
    masks = [(torch.arange(len(row)) > 4).to(torch.uint8) for row in ids]
    together = taps.run(ids, masks)
    for row, mask, batched in zip(ids, masks, together):
        (alone,) = taps.run([row], [mask])
        difference = (batched.states["hidden"].float() - alone.states["hidden"].float()).norm(dim=-1)
        assert float((difference / alone.states["hidden"].float().norm(dim=-1)).max()) < TOLERANCE[dtype][0]
        assert batched.states["hidden"].dtype == torch.bfloat16 and batched.states["hidden"].shape == (len(row), 3, 64)


def test_states_of_a_prefill_in_chunks_equal_the_stored_ones_of_one_pass(target):
    model = load_model(target)
    taps = FeatureTaps(model, LAYERS)
    ids = 3 + torch.arange(64, dtype=torch.int32) * 5 % 280
    (whole,) = taps.run([ids], [torch.ones(64, dtype=torch.uint8)])
    cache, chunks = DynamicCache(config=model.config), []
    for start in range(0, 64, 16):
        output = model(ids[None, start : start + 16].long(), past_key_values=cache, output_hidden_states=True)
        chunks.append(torch.stack([output.hidden_states[layer + 1][0] for layer in LAYERS], 1))
    error = (torch.cat(chunks) - whole.states["hidden"].float()).norm(dim=-1) / torch.cat(chunks).norm(dim=-1)
    assert float(error.max()) < TOLERANCE["float32"][0]


def test_a_device_map_gives_the_same_bytes(target, responses, clean_dataset, tmp_path):
    extract(target, responses, tmp_path / "d", **SETTINGS, device_map="auto")
    assert (tmp_path / "d" / "000001.tar").read_bytes() == (clean_dataset / "000001.tar").read_bytes()


def test_layers_may_lie_on_different_devices(target, responses, clean_dataset, tmp_path):
    places = {f"model.layers.{i}": "cpu" for i in range(3)} | {f"model.layers.{i}": "disk" for i in range(3, 6)}
    places |= {name: "cpu" for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")}
    extract(target, responses, tmp_path / "d", **SETTINGS, device_map=places)
    assert (tmp_path / "d" / "000001.tar").read_bytes() == (clean_dataset / "000001.tar").read_bytes()


def test_the_stored_last_state_is_what_the_head_sees(target, responses, tmp_path):
    extract(target, responses, tmp_path / "d", **SETTINGS, last_hidden=True)
    assert Manifest.read(tmp_path / "d").features.last_state == "post_norm"
    model = load_model(target)
    for tensors, meta in tensors_of(tmp_path / "d"):
        with torch.no_grad():
            logits = model.lm_head(tensors["last_hidden"].float())
            exact = model(tensors["input_ids"][None].long(), output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(tensors["last_hidden"].float(), exact, rtol=2**-7, atol=1e-4)
        for probe in meta["probes"]:
            assert int(logits[probe["position"]].argmax()) == probe["argmax"]
    assert verify(tmp_path / "d", target=target, recompute=100).findings == []


@pytest.mark.parametrize("times", [0, 2])
def test_a_last_state_that_went_through_the_norm_not_once_is_found(target, responses, tmp_path, times):
    extract(target, responses, tmp_path / "d", **SETTINGS, last_hidden=True)
    norm = load_model(target).model.norm

    def change(tensors):
        states = tensors["last_hidden"].float()
        with torch.no_grad():
            changed = norm(states) if times == 2 else states / norm.weight * 3.0
        tensors["last_hidden"] = changed.bfloat16()

    key = change_sample(tmp_path / "d", "000000.tar", 1, change)
    assert findings(tmp_path / "d") == ""
    found = findings(tmp_path / "d", target=target, recompute=100)
    assert f"000000.tar {key}: last_hidden differs" in found and "not this sample's post_norm state" in found


def test_a_missing_last_state_is_found(target, responses, tmp_path):
    extract(target, responses, tmp_path / "d", **SETTINGS, last_hidden=True)
    key = change_sample(tmp_path / "d", "000000.tar", 1, lambda tensors: tensors.pop("last_hidden"))
    assert f"000000.tar {key}: last_hidden is missing" in findings(tmp_path / "d")


def test_fp8_storage_reports_its_error_per_layer_and_is_within_it(target, responses, clean_dataset, tmp_path, capsys):
    manifest = extract(target, responses, tmp_path / "d", **SETTINGS, storage="fp8")
    report = capsys.readouterr().out
    assert all(f"fp8 relative error of layer {layer}: " in report for layer in LAYERS)
    exact = {meta["id"]: tensors["hidden"].float() for tensors, meta in tensors_of(clean_dataset)}
    sums, tokens = torch.zeros(len(LAYERS)), 0
    for tensors, meta in tensors_of(tmp_path / "d"):
        true = exact[meta["id"]]
        assert tensors["hidden"].dtype == torch.bfloat16
        sums += ((tensors["hidden"].float() - true).norm(dim=-1) / true.norm(dim=-1)).sum(0)
        tokens += len(true)
    stated = sum(torch.tensor(shard.fp8_error) * shard.tokens for shard in manifest.shards) / tokens
    torch.testing.assert_close(sums / tokens, stated, rtol=1e-3, atol=1e-5)
    assert 0.01 < float(stated.max()) < 0.05
    assert verify(tmp_path / "d", target=target, recompute=100).findings == []


def test_states_that_a_dtype_cannot_hold_stop_the_run(target, responses, tmp_path):
    large = shutil.copytree(target, tmp_path / "large")
    tensors = load_file(large / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 3e5
    save_file(tensors, large / "model.safetensors", {"format": "pt"})
    assert extract(large, responses, tmp_path / "a", **SETTINGS, dtype="float32").sealed
    for storage in ("bf16", "fp8"):
        with pytest.raises(UserError, match="NaN or infinity.*float16 is a dtype it can run in"):
            extract(large, responses, tmp_path / storage, **SETTINGS, dtype="float16", storage=storage)
        assert not list((tmp_path / storage).glob("*.tar*"))
