"""The sample's bytes and the shard's: exact, plain webdataset, read without copies."""

import json

import pytest
import torch
import webdataset
from safetensors.torch import load

from data_prep.errors import UserError
from data_prep.manifest import read_index
from data_prep.shards import ShardWriter, anchor_positions, decode_sample, encode_sample, read_sample, sample_bytes


def sample(tokens: int = 9):
    hidden = torch.randn(tokens, 3, 8).to(torch.bfloat16)
    return torch.arange(tokens, dtype=torch.int32), (torch.arange(tokens) > 3).to(torch.uint8), hidden


def test_bfloat16_states_survive_bit_for_bit_also_beyond_the_range_of_float16():
    ids, mask, hidden = sample()
    hidden[0, 0] = torch.tensor([7e4, -7e4, 3e38, 1e-38, 0.0, -0.0, 1e-3, 65504.0])
    tensors = decode_sample(bytearray(encode_sample(ids, mask, hidden)))
    assert torch.equal(tensors["hidden"].view(torch.int16), hidden.view(torch.int16))
    assert torch.equal(tensors["input_ids"], ids) and torch.equal(tensors["loss_mask"], mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_states_of_another_dtype_are_refused(dtype):
    ids, mask, hidden = sample()
    with pytest.raises(UserError, match="bfloat16"):
        encode_sample(ids, mask, hidden.to(dtype))


def test_decoding_shares_the_buffer_and_agrees_with_safetensors():
    buffer = bytearray(encode_sample(*sample()))
    tensors = decode_sample(buffer)
    expected = load(bytes(buffer))
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)
    start, size = tensors["hidden"].data_ptr(), len(buffer)
    base = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    assert base < start < base + size


@pytest.mark.parametrize(
    "damage", [lambda b: b[:5], lambda b: b[:-1], lambda b: b"\xff" * 8 + b[8:], lambda b: b[:8] + b"{}" + b[10:]]
)
def test_a_damaged_payload_is_an_error_and_never_a_tensor(damage):
    with pytest.raises(UserError, match="verify"):
        decode_sample(bytearray(damage(encode_sample(*sample()))))


def test_rows_that_disagree_are_an_error():
    ids, mask, hidden = sample()
    with pytest.raises(UserError, match="shapes"):
        decode_sample(bytearray(encode_sample(ids, mask, hidden[:-1])))


def test_valid_anchors_are_positions_whose_token_and_next_token_are_supervised():
    mask = torch.tensor([1, 1, 1, 0, 1, 0, 1, 1], dtype=torch.uint8)
    assert anchor_positions(mask).tolist() == [0, 1, 6]
    assert anchor_positions(torch.ones(1, dtype=torch.uint8)).tolist() == []


def test_the_same_samples_give_the_same_bytes(tmp_path):
    hashes = set()
    content = sample()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        writer = ShardWriter(tmp_path / name, "000000.tar")
        writer.add("000000", {"id": "x"}, *content)
        hashes.add(writer.finish())
        writer.publish()
    assert len(hashes) == 1


def test_plain_webdataset_reads_every_sample_of_every_shard(clean_dataset, manifest):
    shards = [str(clean_dataset / shard.name) for shard in manifest.shards]
    entries = read_index(clean_dataset, manifest)
    found = list(webdataset.WebDataset(shards, shardshuffle=False))
    assert [item["__key__"] for item in found] == [entry.key for entry in entries] and len(
        found
    ) == manifest.plan.samples
    for item, entry in zip(found, entries):
        tensors = read_sample(clean_dataset / entry.shard, entry.offset, entry.nbytes)
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in load(item["safetensors"]).items())
        mask = tensors["loss_mask"]
        counts = (len(mask), int(mask.sum()), len(anchor_positions(mask)))
        assert counts == (entry.tokens, entry.supervised, entry.anchors)
        assert {"id", "source", "turns", "probes"} <= json.loads(item["json"]).keys()


def test_reading_past_the_end_of_a_cut_shard_names_the_shard(dataset, manifest):
    entry = read_index(dataset, manifest)[-1]
    path = dataset / entry.shard
    path.write_bytes(path.read_bytes()[: entry.offset + 10])
    with pytest.raises(UserError, match=f"{entry.shard} ends after 10"):
        read_sample(path, entry.offset, entry.nbytes)


def test_the_size_estimate_is_never_below_what_a_sample_takes(clean_dataset, manifest):
    for shard in manifest.shards:
        entries = [entry for entry in read_index(clean_dataset, manifest) if entry.shard == shard.name]
        bound = sum(sample_bytes(entry.tokens, 3, manifest.target.hidden_size) for entry in entries)
        assert shard.bytes <= bound + 10240  # tar's closing blocks
