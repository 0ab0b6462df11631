"""States, masks and counts of the dataset, resuming, and everything that is refused."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from data_prep.errors import UserError
from data_prep.extract import extract
from data_prep.files import write_atomic
from data_prep.manifest import Manifest, read_index
from data_prep.responses import meta_path
from data_prep.samples import read_sample
from data_prep.shards import read_meta
from data_prep.tiny_target import make_tiny_target
from data_prep.tokens import load_tokenizer
from data_prep.verify import verify

from .children import start
from .conftest import LAYERS, SETTINGS, copy_responses, read_lines, snapshot, write_lines


@pytest.fixture(scope="module")
def samples(clean_dataset):
    """[(tensors, KEY.json)] of the clean dataset, by source id."""
    found = {}
    for entry in read_index(clean_dataset, Manifest.read(clean_dataset)):
        tensors = read_sample(clean_dataset / entry.shard, entry.offset, entry.nbytes)
        meta = read_meta(clean_dataset / entry.shard, entry.key)
        found[meta["id"]] = (tensors, meta)
    return found


def test_ids_are_prompt_plus_response_and_exactly_the_response_is_supervised(samples, responses, target):
    tokenizer = load_tokenizer(target)
    lines = [line for line in read_lines(responses) if line["id"] in samples]
    assert len(lines) == len(samples)
    for line in lines:
        tensors, meta = samples[line["id"]]
        ids, mask = tensors["input_ids"], tensors["loss_mask"]
        assert ids.tolist() == line["prompt_token_ids"] + line["response_token_ids"]
        assert ids[mask.bool()].tolist() == line["response_token_ids"]
        assert len(ids) == len(mask) == len(tensors["hidden"]) and 0 < mask.sum() < len(mask)
        assert meta["turns"] == [
            {
                "turn": line["turn"],
                "start": len(line["prompt_token_ids"]),
                "end": len(ids),
                "finish_reason": line["finish_reason"],
                "supervised": True,
            }
        ]
        served = tokenizer.apply_chat_template(line["messages"], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        assert ids[: len(served)].tolist() == served


def test_features_are_the_tapped_layers_outputs_and_not_their_neighbours(samples, target):
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    outputs = {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda module, args, output, number=number: outputs.update({number: output}))
    for tensors, _ in list(samples.values())[:6]:
        with torch.no_grad():
            states = model(tensors["input_ids"][None].long(), output_hidden_states=True).hidden_states
        for feature, layer in enumerate(LAYERS):
            stored = tensors["hidden"][:, feature].float()
            assert torch.equal(outputs[layer], states[layer + 1])  # the convention, in float32, to the bit
            torch.testing.assert_close(stored, outputs[layer][0], rtol=2**-7, atol=1e-4)
            for neighbour in (layer - 1, layer + 1):
                other = outputs[neighbour][0] if neighbour >= 0 else states[0][0]
                assert (stored - other).norm() > 0.1 * other.norm()


def test_probes_hold_the_targets_argmax_and_its_log_probability(samples, target):
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    for tensors, meta in samples.values():
        ids, mask = tensors["input_ids"].long(), tensors["loss_mask"]
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        positions = [probe["position"] for probe in meta["probes"]]
        assert positions == sorted(set(positions)) and len(positions) == min(8, int(mask.sum()))
        for probe in meta["probes"]:
            assert mask[probe["position"] + 1] == 1
            assert probe["argmax"] == int(logprobs[probe["position"]].argmax())
            assert probe["logprob"] == pytest.approx(float(logprobs[probe["position"]].max()), abs=1e-3)


def test_the_targets_own_greedy_responses_agree_with_its_argmax(manifest):
    assert manifest.argmax_share == 1.0 and all(shard.argmax_matches == shard.supervised for shard in manifest.shards)


def test_the_manifest_names_what_has_to_agree_later(manifest, target):
    assert manifest.sealed and manifest.features.layer_ids == LAYERS and manifest.mask_token_id == 297
    assert (
        manifest.target.num_hidden_layers == 6
        and manifest.target.vocab_size == 300
        and manifest.stop_token_ids == [2, 247]
    )
    assert manifest.plan.samples == sum(shard.samples for shard in manifest.shards)
    assert manifest.plan.tokens == sum(shard.tokens for shard in manifest.shards)
    assert manifest.differences({"target": {"hidden_size": 64}, "mask_token_id": 5}) == [
        "mask_token_id: have 297, expected 5"
    ]


def test_responses_that_are_not_the_targets_are_warned_about(target, responses, tmp_path, capsys):
    path = copy_responses(responses, tmp_path)
    draw = random.Random(0)
    lines = read_lines(path)
    write_lines(path, [{**line, "response_token_ids": [draw.randrange(3, 297) for _ in range(8)]} for line in lines])
    manifest = extract(target, path, tmp_path / "d", **SETTINGS)
    assert manifest.argmax_share < 0.2
    assert "warning: only" in capsys.readouterr().err


def test_a_sample_without_two_supervised_tokens_is_dropped_and_counted(target, responses, tmp_path, capsys):
    path = copy_responses(responses, tmp_path)
    lines = read_lines(path)
    one = {**lines[0], "response_token_ids": lines[0]["response_token_ids"][:1]}
    write_lines(path, [one, *lines[1:]])
    assert extract(target, path, tmp_path / "d", **SETTINGS).dropped["no two consecutive supervised tokens"] >= 1
    longest = max(len(line["prompt_token_ids"]) for line in lines)
    manifest = extract(target, path, tmp_path / "e", **SETTINGS, max_length=longest)
    assert manifest.dropped["no two consecutive supervised tokens after cutting to " + str(longest)] >= 1
    assert "dropped 1: no two consecutive supervised tokens after" in capsys.readouterr().out
    with pytest.raises(UserError, match="no sample is left .*larger --max-length"):
        extract(target, path, tmp_path / "f", **SETTINGS, max_length=10)
    assert not (tmp_path / "f").exists()


def test_prompt_ids_that_serving_would_not_render_are_refused_with_both_renderings(target, responses, tmp_path):
    path = copy_responses(responses, tmp_path)
    lines = read_lines(path)
    lines[3]["messages"][-1]["content"] = "Say something else"
    write_lines(path, lines)
    with pytest.raises(UserError, match=f"sample {lines[3]['id']}: .*the file has .*serving renders"):
        extract(target, path, tmp_path / "d")


def test_responses_of_another_target_or_template_are_refused(target, responses, tmp_path):
    other = make_tiny_target(tmp_path / "other", seed=1, family="qwen3")
    with pytest.raises(UserError, match="was not written by the target.*target.embedding_sha256"):
        extract(other, responses, tmp_path / "d")
    template = shutil.copytree(target, tmp_path / "template")
    (template / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(UserError, match="template_sha256"):
        extract(template, responses, tmp_path / "d")
    path = copy_responses(responses, tmp_path / "alone")
    meta_path(path).unlink()
    with pytest.raises(UserError, match="nothing says which target"):
        extract(target, path, tmp_path / "d")


@pytest.mark.parametrize(
    "bad, message", [([5], "last layer"), ([6], "does not exist"), ([-1], "does not exist"), ([2, 2], "twice")]
)
def test_layer_ids_that_cannot_be_features_are_refused(target, responses, tmp_path, bad, message):
    with pytest.raises(UserError, match=message):
        extract(target, responses, tmp_path / "d", layer_ids=bad)


def test_a_mask_token_that_occurs_in_the_text_is_refused(target, responses, tmp_path):
    used = read_lines(responses)[0]["prompt_token_ids"][5]
    with pytest.raises(UserError, match=f"contains the mask token {used}"):
        extract(target, responses, tmp_path / "d", mask_token_id=used)


def test_states_that_are_not_finite_stop_the_run_and_finish_no_shard(target, responses, tmp_path):
    broken = shutil.copytree(target, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="NaN or infinity"):
        extract(broken, responses, tmp_path / "d", **SETTINGS)
    assert not list((tmp_path / "d").glob("*.tar")) and Manifest.read(tmp_path / "d").shards == []


def test_a_finished_dataset_is_left_untouched(target, responses, dataset, capsys):
    before = snapshot(dataset)
    extract(target, responses, dataset, **SETTINGS)
    assert snapshot(dataset) == before and "0 samples computed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, field",
    [
        ({"layer_ids": [1, 2, 4]}, "features.layer_ids"),
        ({"max_length": 1000}, "max_length"),
        ({"shard_bytes": 100_000}, "shard_bytes"),
        ({"batch_tokens": 150}, "batch_tokens"),
        ({"mask_token_id": 299}, "mask_token_id: have 297, expected 299"),
        ({"storage": "fp8"}, "storage: have bf16, expected fp8"),
        ({"last_hidden": True}, "features.last_state: have None, expected post_norm"),
        ({"drop": ["cut"]}, "drop"),
        ({"dtype": "bfloat16"}, "target.dtype: have float32, expected bfloat16"),
    ],
)
def test_a_dataset_made_with_other_settings_is_refused_with_the_fields(target, responses, dataset, change, field):
    before = snapshot(dataset)
    with pytest.raises(UserError, match=field.replace("[", r"\[")):
        extract(target, responses, dataset, **(SETTINGS | change))
    assert snapshot(dataset) == before


def test_other_responses_or_another_template_argument_are_refused(target, responses, dataset, tmp_path):
    path = copy_responses(responses, tmp_path / "r")
    lines = read_lines(path)
    lines[0]["response_token_ids"][0] ^= 1
    write_lines(path, lines)
    with pytest.raises(UserError, match="source_sha256"):
        extract(target, path, dataset, **SETTINGS)


def test_foreign_shards_are_refused_and_never_mixed_in(target, responses, clean_dataset, dataset, tmp_path):
    (tmp_path / "old").mkdir()
    shutil.copy(clean_dataset / "000000.tar", tmp_path / "old")
    with pytest.raises(UserError, match="foreign"):
        extract(target, responses, tmp_path / "old", **SETTINGS)
    shutil.copy(clean_dataset / "000000.tar", dataset / "000077.tar")
    with pytest.raises(UserError, match="000077.tar"):
        extract(target, responses, dataset, **SETTINGS)


def test_the_manifest_exists_before_the_first_shard_and_nothing_else_does(target, responses, tmp_path):
    manifest = _killed(target, responses, tmp_path / "d", ("data_prep.shards", "ShardWriter", "__init__", 1))
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["manifest.json"]
    assert not manifest.sealed and manifest.plan.samples > 0


def _killed(target, responses, out, point: tuple[str, str, str, int]) -> Manifest:
    child = start(target, responses, out, deadly=point, **SETTINGS)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    return Manifest.read(out)


POINTS = {
    "before any sample": ("data_prep.shards", "ShardWriter", "add", 1),
    "in the middle of a shard": ("data_prep.shards", "ShardWriter", "add", 12),
    "with all samples written": ("data_prep.shards", "ShardWriter", "finish", 2),
    "before the shard has its name": ("data_prep.shards", "ShardWriter", "publish", 2),
    "between shard and record": ("data_prep.compute", "", "write_record", 2),
    "before the index": ("data_prep.merge", "", "write_atomic", 1),
    "between index and manifest": ("data_prep.manifest", "Manifest", "write", 1),
    "between sealing and tidying up": ("data_prep.merge", "", "remove_unfinished", 1),
}


@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere_the_rerun_ends_in_the_clean_runs_content(target, responses, clean_dataset, tmp_path, point):
    out = tmp_path / "d"
    partial = _killed(target, responses, out, POINTS[point])
    findings = verify(out).findings  # every shard under its final name is good
    assert findings == [] if partial.sealed else len(findings) == 1 and findings[0].startswith("unfinished")
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    again = extract(target, responses, out, **SETTINGS)
    assert again.sha256() == Manifest.read(clean_dataset).sha256()
    assert kept == {shard: (out / shard).stat().st_mtime_ns for shard in kept}
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in clean_dataset.iterdir())
    assert all((out / path.name).read_bytes() == path.read_bytes() for path in clean_dataset.iterdir())
    assert verify(out).findings == []


def test_killed_from_outside_the_command_carries_on_and_quiet_shows_no_bar(target, responses, clean_dataset, tmp_path):
    out = tmp_path / "d"
    layers = ",".join(map(str, LAYERS))
    command = [sys.executable, "-m", "data_prep", "extract", "--target", target, "--responses", responses, "--out", out]
    command += ["--layer-ids", layers, "--shard-bytes", "150000", "--batch-tokens", "200"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while child.poll() is None and not list(out.glob("000000.tar.tmp-*")):
        time.sleep(0.001)
    child.kill()
    child.wait()
    again = subprocess.run([*command, "--quiet"], env=environment, check=True, capture_output=True, text=True)
    assert "equal to the target's argmax" in again.stdout and "it/s" not in again.stderr and "tok/s" not in again.stderr
    assert Manifest.read(out).sha256() == Manifest.read(clean_dataset).sha256()


def test_half_a_responses_file_is_refused(target, responses, tmp_path):
    path = copy_responses(responses, tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="half a line"):
        extract(target, path, tmp_path / "d")


def test_without_room_on_the_disk_nothing_starts_unless_forced(target, responses, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))
    with pytest.raises(UserError, match=r"0.00 GB left.*--force"):
        extract(target, responses, tmp_path / "d", **SETTINGS)
    assert not list((tmp_path / "d").glob("*.tar*"))
    assert extract(target, responses, tmp_path / "d", **SETTINGS, force=True).sealed
    assert "warning: the shards still to be made take" in capsys.readouterr().err


def test_an_atomic_write_leaves_no_temporary_file(tmp_path):
    write_atomic(tmp_path / "a.json", b"1")
    write_atomic(tmp_path / "a.json", json.dumps([2]).encode())
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "[2]")]
