"""The held-out number of a training run is what the drafting loop reaches on the same prompts (case 102)."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.features import FeatureTaps
from data_prep.files import canonical_json, sha256_hex
from data_prep.generate import generate
from data_prep.manifest import INDEX_NAME, Manifest, Plan, Shard, read_index
from data_prep.shards import ShardWriter, shard_name
from data_prep.target import target_facts
from pipeline import acceptance
from pipeline.config import RunConfig
from pipeline.drafter import DFlashDrafter
from pipeline.heldout import HeldoutSet
from pipeline.loss import block_loss
from pipeline.reader import SampleReader
from pipeline.runtime import Runtime
from pipeline.sources import LocalFolder
from pipeline.speculate import generate_drafted
from pipeline.target_head import TargetHead

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
NEW_TOKENS = 60


def make_dataset(folder, target_folder, target, drafter, prompts):
    """One shard with the target's own greedy responses and their states, as `extract` stores them."""
    folder.mkdir()
    taps = FeatureTaps(target, drafter.config.target_layer_ids)
    writer = ShardWriter(folder, shard_name(0))
    for number, (prompt, response) in enumerate(zip(prompts, generate(target, prompts, NEW_TOKENS, []))):
        ids = torch.tensor(prompt + response, dtype=torch.int32)
        mask = (torch.arange(len(ids)) >= len(prompt)).to(torch.uint8)
        (sample,) = taps.run([ids], [mask])
        assert sample.argmax_matches == NEW_TOKENS
        writer.add(f"{number:06d}", {"id": f"p{number}"}, ids, mask, sample.states)
    taps.close()
    nbytes, digest = writer.finish()
    writer.publish()
    rows = writer.samples
    index = canonical_json({"shard": shard_name(0), "samples": [list(row[1:]) for row in rows]}) + b"\n"
    (folder / INDEX_NAME).write_bytes(index)
    tokens = sum(row.tokens for row in rows)
    shard = Shard(
        name=shard_name(0),
        samples=len(rows),
        tokens=tokens,
        supervised=sum(row.supervised for row in rows),
        anchors=sum(row.anchors for row in rows),
        bytes=nbytes,
        sha256=digest,
        argmax_matches=0,
    )
    nothing = "0" * 64  # a golden target has no tokenizer
    manifest = Manifest(
        target=target_facts(target_folder, "float32"),
        features={"layer_ids": drafter.config.target_layer_ids},
        tokenizer_sha256=nothing,
        template_sha256=nothing,
        template_args={},
        stop_token_ids=[],
        mask_token_id=drafter.config.mask_token_id,
        max_length=256,
        shard_bytes=10**9,
        batch_tokens=512,
        source_sha256=nothing,
        responses={"generator": "transformers", "sampling": None, "from_text": 0},
        plan=Plan(shards=1, samples=len(rows), tokens=tokens),
        shards=[shard],
        argmax_share=1.0,
        dropped={},
        sealed=True,
        index_sha256=sha256_hex(index),
    )
    manifest.write(folder)
    return manifest


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_held_out_walk_agrees_with_the_loop_within_2_percent(family, tmp_path):
    torch.set_num_threads(1)
    folder = GOLDEN / family
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    drafter = DFlashDrafter.from_pretrained(folder / "drafter")
    prompts = [case["prompt"] for case in json.loads((folder / "generate.json").read_text())]
    manifest = make_dataset(tmp_path / "dataset", folder / "target", target, drafter, prompts)
    entries = read_index(tmp_path / "dataset", manifest)
    reader = SampleReader(LocalFolder(tmp_path / "dataset"), manifest, entries)
    K = drafter.config.block_size
    run = RunConfig(out=tmp_path, drafter={"block_size": K}, loss={"max_anchors": 64})
    head = TargetHead.load(folder / "target", manifest, torch.device("cpu"), torch.float32)

    def forward(mb):
        hidden = drafter(head.embed(mb.block_ids_BT), mb.features_BSE, mb.anchors_BN, mb.starts_BN)
        return block_loss(
            hidden.unflatten(1, (-1, K)).flatten(0, 1),
            head.head_VD,
            mb.labels_BNJ.flatten(0, 1),
            mb.mask_BNJ.flatten(0, 1),
            "dpace",
        )

    alone = Runtime(0, 1, 0, torch.device("cpu"), "fp32")
    heldout = HeldoutSet(reader, entries, run, drafter.config.mask_token_id)
    numbers = heldout.evaluate(forward, alone, SimpleNamespace(asked=lambda: False))
    loops = [generate_drafted(target, drafter, prompt, NEW_TOKENS) for prompt in prompts]
    tau = acceptance.tau_pooled([[step.accepted for step in loop.steps] for loop in loops]).value
    assert numbers["heldout/samples"] == len(prompts) and tau > 2.5
    assert numbers["heldout/walk_tau"] == pytest.approx(tau, rel=0.02)
    assert numbers["heldout/all_anchors_tau"] > 1.1 * tau  # the easy anchors that serving jumps over count there
