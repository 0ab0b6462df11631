"""Single samples out of shards, local and remote; damage is found and named before anything is trained on it."""
import os
import shutil
import zlib

import pytest
import torch

from data_prep.errors import UserError
from data_prep.fp8 import quantise
from data_prep.manifest import Manifest, read_index
from data_prep.samples import read_sample
from data_prep.shards import ShardWriter
from pipeline.config import RunConfig
from pipeline.dataset import open_dataset
from pipeline.reader import DamagedSample, SampleReader
from pipeline.sources import CachedSource, LocalFolder, RemoteFolder, open_source
from tests.datasets import HIDDEN, damage, make_run_folder, sample
from tests.server import serving


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run_folder(tmp_path_factory.mktemp("reader") / "run")


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made / "dataset", tmp_path / "dataset")
    return tmp_path / "dataset"


@pytest.fixture
def server(folder):
    pytest.importorskip("aiohttp", reason="reading https:// needs aiohttp: pip install '.[remote]'")
    with serving(folder) as running:
        yield running


def reader(folder, source=None):
    manifest = Manifest.read(folder)
    entries = read_index(folder, manifest)
    return SampleReader(source or LocalFolder(folder), manifest, entries), entries


def equal(tensors, key):
    ids, mask, hidden = sample(int(key))
    expected = {"input_ids": ids, "loss_mask": mask, "hidden": hidden}
    return all(torch.equal(tensors[name], value) for name, value in expected.items())


def test_every_sample_reads_as_it_was_written(folder):
    ours, entries = reader(folder)
    assert all(equal(ours.read(entry), entry.key) for entry in entries)


def test_a_remote_sample_costs_its_own_bytes_and_no_other_ones(folder, server):
    ours, entries = reader(folder, open_source(server.url))
    assert equal(ours.read(entries[8]), entries[8].key)
    ((name, begin, end),) = server.requests
    assert name == entries[8].shard and end == entries[8].offset + entries[8].nbytes
    assert end - begin < entries[8].nbytes + 4096
    assert all(equal(ours.read(entry), entry.key) for entry in entries)


def cut(folder, shard, at):
    os.truncate(folder / shard, at)


@pytest.mark.parametrize("name,spoil,words", [
    ("a flipped bit", lambda f, e: damage(f, e.key), "CRC-32"),
    ("a shard cut inside the sample", lambda f, e: cut(f, e.shard, e.offset + 100), "the shard ends"),
    ("a shard cut on the member's boundary", lambda f, e: cut(f, e.shard, e.offset - 512), "the shard ends"),
    ("an empty shard", lambda f, e: cut(f, e.shard, 0), "the shard ends"),
    ("another sample there", lambda f, e: shutil.copyfile(f / "000000.tar", f / e.shard), "the index says '000011'")])
def test_a_damaged_sample_is_named_with_its_shard_and_the_remedy(folder, name, spoil, words):
    ours, entries = reader(folder)
    entry = entries[11]
    spoil(folder, entry)
    with pytest.raises(DamagedSample) as caught:
        ours.read(entry)
    expected = (entry.shard, f"sample {entry.key}", words, "restore the shard", "data.on_error: skip")
    assert all(word in str(caught.value) for word in expected), caught.value


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 16]))


@pytest.fixture(params=["one thread", "two threads", "Python's zlib"])
def summed(request, monkeypatch):
    """How the CRC-32 of the tests' small samples is taken."""
    if request.param == "Python's zlib":
        monkeypatch.setattr("pipeline.checksum.crc32", zlib.crc32)
        monkeypatch.setattr("pipeline.checksum.crc32_combine", None)
    elif request.param == "two threads":
        pytest.importorskip("zlib_ng", reason="without zlib-ng sums are not combined: pip install zlib-ng")
        monkeypatch.setattr("pipeline.checksum.HALVED", 64)
        monkeypatch.setattr("pipeline.checksum.PIECE", 100)


def test_every_damaged_byte_of_a_sample_is_found(folder, summed):
    ours, entries = reader(folder)
    entry = min(entries, key=lambda entry: entry.nbytes)
    for at in range(entry.offset, entry.offset + entry.nbytes):
        flip(folder / entry.shard, at)
        with pytest.raises(DamagedSample):
            ours.read(entry)
        flip(folder / entry.shard, at)
    assert equal(ours.read(entry), entry.key)


@pytest.mark.parametrize("last_hidden", [False, True])
@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_any_storage_reads_into_the_given_memory_what_decoding_gives(folder, tmp_path, storage, last_hidden):
    writer = ShardWriter(tmp_path, "000000.tar")
    for key in (30, 2, 17):  # a longer one first
        ids, mask, hidden = sample(key)
        states = {"hidden": hidden} if storage == "bf16" else dict(zip(("hidden", "hidden_scale"), quantise(hidden)))
        writer.add(f"{key:06d}", {}, ids, mask, states | ({"last_hidden": hidden[:, 1].clone()} if last_hidden else {}))
    writer.finish()
    writer.publish()
    ours = SampleReader(LocalFolder(tmp_path), Manifest.read(folder), writer.samples)
    for entry in writer.samples:
        memory = torch.full((entry.tokens + 2, 2 * HIDDEN), 7.0, dtype=torch.bfloat16)
        ids, mask = ours.fill(entry, memory[1:-1])
        expected = read_sample(tmp_path / entry.shard, entry.offset, entry.nbytes)
        assert torch.equal(ids, expected["input_ids"]) and torch.equal(mask, expected["loss_mask"])
        assert torch.equal(memory[1:-1], expected["hidden"].flatten(1)) and (memory[[0, -1]] == 7).all()


def test_a_sample_of_other_counts_or_shapes_than_index_and_manifest_say_is_damaged(folder):
    ours, entries = reader(folder)
    with pytest.raises(DamagedSample, match="anchors"):
        ours.read(entries[3]._replace(anchors=entries[3].anchors + 1))
    ours.features = (3, 32)
    with pytest.raises(DamagedSample, match=r"\(3|, 3, 32\)"):
        ours.read(entries[3])


@pytest.mark.parametrize("spoil,words", [
    (lambda f, e: (f / e.shard).unlink(), "000002.tar is missing"),
    (lambda f, e: cut(f, e.shard, e.offset - 1024), r"000002.tar has \d+ bytes, the manifest says \d+ bytes with 5 samples"),
    (lambda f, e: cut(f, e.shard, 0), "000002.tar has 0 bytes")])
def test_a_missing_or_shortened_shard_stops_the_start_and_not_the_step_that_reaches_it(made, folder, spoil, words):
    spoil(folder, reader(folder)[1][11])
    run = RunConfig(out=made, data={"path": str(folder)}, drafter={"block_size": 8})
    with pytest.raises(UserError, match=words):
        open_dataset(run)


def test_a_url_serves_a_run_like_the_folder_does(made, folder, server, tmp_path):
    run = RunConfig(out=tmp_path / "out", data={"path": server.url}, target={"path": made / "target"},
                    drafter={"block_size": 8})
    data = open_dataset(run)
    assert data.entries == reader(folder)[1] and equal(data.reader.read(data.entries[5]), data.entries[5].key)
    ((name, begin, end),) = server.requests
    assert [path.name for path in (tmp_path / "out/cache/byte_ranges").glob("*/*")] == [f"{name}.{begin}.{end - begin}"]
    (folder / "000003.tar").unlink()
    with pytest.raises(UserError, match="000003.tar is missing"):
        open_dataset(run)
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=f"no dataset in {server.url}"):
        open_dataset(run)


def test_the_cache_serves_what_it_holds_and_never_grows_over_its_limit(folder, server, tmp_path):
    limit = 20_000
    ours, entries = reader(folder, CachedSource(RemoteFolder(server.url), tmp_path, "content", limit))
    for _ in range(2):
        for entry in entries:
            assert equal(ours.read(entry), entry.key)
            assert 0 < sum(path.stat().st_size for path in tmp_path.glob("byte_ranges/*/*")) <= limit
    sent = server.sent
    assert equal(ours.read(entries[-1]), entries[-1].key) and server.sent == sent, "the last sample is not in the cache"


def test_a_damaged_piece_of_the_cache_is_read_again(folder, server, tmp_path):
    ours, entries = reader(folder, CachedSource(RemoteFolder(server.url), tmp_path, "content", 10**6))
    ours.read(entries[0])
    (piece,) = (tmp_path / "byte_ranges/content").iterdir()
    piece.write_bytes(bytes(piece.stat().st_size))
    assert equal(ours.read(entries[0]), entries[0].key) and piece.read_bytes().strip(b"\0")


def test_a_server_that_fails_for_a_moment_is_asked_again_and_one_without_ranges_is_refused(folder, server, monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    ours, entries = reader(folder, RemoteFolder(server.url))
    server.failures = 2
    assert equal(ours.read(entries[0]), entries[0].key) and waits[:2] == [1, 2]
    server.failures = 2  # HEAD and GET of one attempt
    assert ours.source.sizes(["000000.tar"]) == [(folder / "000000.tar").stat().st_size]
    server.ranges = False
    with pytest.raises(UserError, match="knows no byte ranges; use one that does"):
        ours.read(entries[1])
    server.ranges, server.failures = True, 99
    with pytest.raises(UserError, match="after 4 attempts: .*503.*continue with --resume auto"):
        ours.read(entries[1])


def test_an_unknown_protocol_or_a_missing_library_is_named_with_the_remedy():
    with pytest.raises(UserError, match=r"nonsense.*pip install '.\[remote\]'"):
        open_source("nonsense://bucket/dataset").read("manifest.json")


def test_other_protocols_of_fsspec_work_alike(folder):
    import fsspec

    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe(f"/reader/{path.name}", path.read_bytes())
    ours, entries = reader(folder, open_source("memory://reader"))
    assert equal(ours.read(entries[20]), entries[20].key)
    sizes = open_source("memory://reader").sizes(["000000.tar", "none.tar"])
    assert sizes == [(folder / "000000.tar").stat().st_size, None]
