"""Every kind of damage is found, with the shard's name and the sample's key."""

import io
import json
import re
import shutil
import tarfile
import zlib

import pytest
import torch

from data_prep.errors import UserError
from data_prep.files import canonical_json, sha256_hex
from data_prep.manifest import INDEX_NAME, Manifest, read_index
from data_prep.samples import decode_sample, encode_sample
from data_prep.shards import padded
from data_prep.tiny_target import make_tiny_target
from data_prep.verify import format_report, verify


def members(path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]


def rebuild(folder, name: str, content: list[tuple[str, bytes]]) -> None:
    """Write the shard anew and let index and manifest agree with it: a damage that no hash betrays."""
    rows = []
    with tarfile.open(folder / name, "w", format=tarfile.USTAR_FORMAT) as tar:
        for member, data in content:
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
            if member.endswith(".safetensors"):
                rows.append((member.split(".")[0], tar.offset - padded(len(data)), len(data)))
    manifest = Manifest.read(folder)
    lines = [json.loads(line) for line in (folder / INDEX_NAME).read_text().splitlines()]
    for line in lines:
        if line["shard"] == name:
            line["samples"] = [[*row, *old[3:]] for row, old in zip(rows, line["samples"])]
    (folder / INDEX_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest.index_sha256 = sha256_hex((folder / INDEX_NAME).read_bytes())
    for shard in manifest.shards:
        if shard.name == name:
            shard.bytes, shard.sha256 = (folder / name).stat().st_size, sha256_hex((folder / name).read_bytes())
    manifest.write(folder)


def change_sample(folder, name: str, number: int, change) -> str:
    """Apply `change` to the tensors of a sample, keeping every checksum right; returns its key."""
    content = members(folder / name)
    (json_name, meta), (tensor_name, payload) = content[2 * number : 2 * number + 2]
    tensors = {key: tensor.clone() for key, tensor in decode_sample(bytearray(payload)).items()}
    change(tensors)
    payload = encode_sample(tensors.pop("input_ids"), tensors.pop("loss_mask"), tensors)
    meta = canonical_json(json.loads(meta) | {"crc32": zlib.crc32(payload)})
    content[2 * number : 2 * number + 2] = [(json_name, meta), (tensor_name, payload)]
    rebuild(folder, name, content)
    return json_name.split(".")[0]


def findings(folder, **arguments) -> str:
    return "\n".join(verify(folder, **arguments).findings)


def test_a_good_dataset_has_no_findings_also_when_samples_are_recomputed(clean_dataset, target):
    report = verify(clean_dataset, target=target, recompute=100)
    assert report.findings == [] and report.recomputed == report.samples == Manifest.read(clean_dataset).plan.samples
    assert "equal to argmax  100.00%" in format_report(clean_dataset, report)


def zero_most(tensors):
    tensors["hidden"][: int(0.7 * len(tensors["hidden"]))] = 0


def one_nan(tensors):
    tensors["hidden"][3, 1, 5] = float("nan")


def last_row_missing(tensors):
    tensors["hidden"] = tensors["hidden"][:-1]


def one_feature_less(tensors):
    tensors["hidden"] = tensors["hidden"][:, :2]


def foreign_token(tensors):
    tensors["input_ids"][2] = 300


def mask_of_twos(tensors):
    tensors["loss_mask"] *= 2


def mask_all_zero(tensors):
    tensors["loss_mask"].zero_()


def mask_all_one(tensors):
    tensors["loss_mask"].fill_(1)


DAMAGE = {
    zero_most: "rows are all zero",
    one_nan: "position 3, feature 1 is NaN",
    last_row_missing: r"shapes .*expected \[S\]",
    one_feature_less: r"hidden is .*, 3, 64\]",
    foreign_token: "token id 300",
    mask_of_twos: "loss mask holds 2",
    mask_all_zero: "loss mask has 0 ones",
    mask_all_one: "but not all",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_that_no_hash_betrays_is_named_by_shard_and_key(dataset, damage):
    key = change_sample(dataset, "000001.tar", 2, damage)
    assert re.search(f"000001.tar {key}: .*{DAMAGE[damage]}", findings(dataset))
    assert not re.search("sha256|CRC", findings(dataset))


def test_swapped_states_are_found_by_the_hash_and_by_recomputing(clean_dataset, dataset, target):
    content = members(clean_dataset / "000001.tar")
    payloads = [decode_sample(bytearray(payload)) for _, payload in content[1::2]]
    pairs = [
        (i, j)
        for i in range(len(payloads))
        for j in range(i)
        if len(payloads[i]["input_ids"]) == len(payloads[j]["input_ids"])
    ]
    one, other = pairs[0]
    keys = [
        change_sample(dataset, "000001.tar", a, lambda tensors, b=b: tensors.update(hidden=payloads[b]["hidden"]))
        for a, b in ((one, other), (other, one))
    ]
    assert findings(dataset) == ""  # all hashes were made to fit
    found = findings(dataset, target=target, recompute=100)
    assert all(f"000001.tar {key}: states differ" in found for key in keys)
    shutil.copy(clean_dataset / "manifest.json", dataset)
    assert "000001.tar: sha256" in findings(dataset)


def test_a_flipped_byte_names_shard_and_key(dataset, manifest):
    entry = read_index(dataset, manifest)[4]
    content = bytearray((dataset / entry.shard).read_bytes())
    content[entry.offset + entry.nbytes - 7] ^= 1
    (dataset / entry.shard).write_bytes(content)
    found = findings(dataset)
    assert (
        f"{entry.shard}: sha256" in found and f"{entry.shard} {entry.key}: its tensors do not have the CRC-32" in found
    )


def test_every_flipped_byte_is_found_wherever_it_lies(dataset):
    path = dataset / "000000.tar"
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 25):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        assert "000000.tar: sha256" in findings(dataset), place


def test_a_shard_cut_in_half_is_found_with_what_could_be_read(dataset, manifest):
    path = dataset / "000000.tar"
    path.write_bytes(path.read_bytes()[: manifest.shards[0].bytes // 2])
    found = findings(dataset)
    assert "000000.tar: " in found and f"expected {manifest.shards[0].samples}" in found and "read " in found


def test_a_shard_cut_on_a_member_boundary_is_found(dataset, manifest):
    path = dataset / "000000.tar"
    with tarfile.open(path) as tar:
        header = list(tar)[6].offset
    path.write_bytes(path.read_bytes()[:header])
    assert f"000000.tar read 3 samples, expected {manifest.shards[0].samples}, first missing 000003" in findings(
        dataset
    )
    path.write_bytes(b"")
    assert "read 0 samples" in findings(dataset)


def test_a_key_in_two_shards_is_reported_with_both(clean_dataset, dataset):
    content = members(clean_dataset / "000001.tar")
    rebuild(
        dataset,
        "000001.tar",
        [("000000" + name[6:] if i < 2 else name, data) for i, (name, data) in enumerate(content)],
    )
    assert "000001.tar 000000: key already used in 000000.tar" in findings(dataset)


def test_members_in_another_order_are_found(clean_dataset, dataset):
    content = members(clean_dataset / "000001.tar")
    content[0:2] = content[1::-1]
    rebuild(dataset, "000001.tar", content)
    assert "out of order" in findings(dataset)


def test_missing_and_foreign_shards_are_named_before_anything_is_read(dataset):
    shutil.move(dataset / "000001.tar", dataset / "000009.tar")
    assert verify(dataset).findings[:2] == ["000009.tar: foreign shard, not in the manifest", "000001.tar: missing"]


def test_the_shards_to_read_come_from_the_manifest_and_not_from_a_pattern(clean_dataset, dataset, manifest):
    shutil.copy(dataset / "000000.tar", dataset / "000000-copy.tar")
    assert {entry.shard for entry in read_index(dataset, manifest)} == {shard.name for shard in manifest.shards}
    assert len(read_index(dataset, manifest)) == manifest.plan.samples


def test_a_changed_index_is_found(dataset, manifest):
    path = dataset / INDEX_NAME
    path.write_text(path.read_text().replace("000000.tar", "000003.tar", 1))
    assert "sha256" in findings(dataset)
    with pytest.raises(UserError, match="sha256"):
        read_index(dataset, manifest)


def test_another_target_is_found(clean_dataset, tmp_path):
    other = make_tiny_target(tmp_path, family="qwen3", seed=3)
    found = findings(clean_dataset, target=other, recompute=2)
    assert "embedding_sha256" in found and "head_sha256" in found


def test_an_unfinished_file_beside_a_finished_dataset_is_found(dataset):
    (dataset / "000007.tar.tmp-host-1").write_bytes(b"x")
    assert "000007.tar.tmp-host-1" in findings(dataset)


def test_swapping_two_shards_files_is_found(dataset):
    one, other, spare = dataset / "000000.tar", dataset / "000001.tar", dataset / "spare"
    one.rename(spare), other.rename(one), spare.rename(other)
    found = findings(dataset)
    assert "000000.tar: sha256" in found and "000001.tar: sha256" in found


def test_states_are_compared_with_the_tolerance_of_their_dtype(dataset, target):
    def slightly(tensors):
        tensors["hidden"][1, 0] *= 1.25

    key = change_sample(dataset, "000002.tar", 0, slightly)
    assert findings(dataset) == ""
    assert f"000002.tar {key}: states differ" in findings(dataset, target=target, recompute=100)
    assert torch.finfo(torch.bfloat16).eps < 0.02
