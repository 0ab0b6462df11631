"""Shards: the same bytes for the same samples, read by plain webdataset, published once."""

import json

import torch
import webdataset
from safetensors.torch import load

from data_prep.manifest import read_index
from data_prep.samples import anchor_positions, read_sample
from data_prep.shards import ShardWriter, sample_bytes

from .test_samples import sample


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


def test_the_size_estimate_is_never_below_what_a_sample_takes(clean_dataset, manifest):
    for shard in manifest.shards:
        entries = [entry for entry in read_index(clean_dataset, manifest) if entry.shard == shard.name]
        bound = sum(sample_bytes(entry.tokens, 3, manifest.target.hidden_size) for entry in entries)
        assert shard.bytes <= bound + 10240  # tar's closing blocks


def test_a_published_shard_is_never_replaced(tmp_path):
    writers = [ShardWriter(tmp_path, "000000.tar") for _ in range(2)]
    writers[1].temporary = writers[1].temporary.rename(tmp_path / "000000.tar.tmp-other-process")
    for key, writer in zip(("000000", "000001"), writers):
        writer.add(key, {"id": key}, *sample())
        writer.finish()
    assert [writer.publish() for writer in writers] == [True, False]
    assert [item["__key__"] for item in webdataset.WebDataset(str(tmp_path / "000000.tar"))] == ["000000"]
    assert [path.name for path in tmp_path.iterdir()] == ["000000.tar"]
