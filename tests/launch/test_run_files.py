"""The ready runs: `--dry-run` on targets of the public dimensions (no weights are needed), and their headers."""

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from data_prep.files import canonical_json, sha256_hex
from data_prep.manifest import INDEX_NAME, Features, Manifest, Plan, Responses, Shard, Target
from data_prep.samples import token_bytes
from data_prep.target import config_sha256, tokenizer_sha256
from data_prep.tiny_target import make_tiny_tokenizer
from data_prep.tokens import load_tokenizer, template_sha256
from pipeline.config import RunConfig
from pipeline.sizes import expected
from tests.distributed import ROOT, Ranks, arguments_of, free_port

RUNS = sorted(path.stem for path in (ROOT / "launch/runs").glob("*.yaml"))
QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
}
# From the public config.json files.
TARGETS = {
    "qwen3-4b": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
    },
}
READY = [name for name in RUNS if name not in ("quickstart", "smoke")]
SAMPLES, TOKENS = 3000, 1000
RANKS = 8


def stand_in(folder: Path, config: dict, layer_ids: list[int], mask: int) -> Path:
    """OUT/target and OUT/dataset with everything that a dry run reads: the target's config and a tokenizer, and a
    sealed dataset whose shard has its size but takes no room."""
    target, dataset = folder / "target", folder / "dataset"
    for path in (target, dataset):
        path.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(config))
    make_tiny_tokenizer(262).save_pretrained(target)
    per_sample = TOKENS * token_bytes(len(layer_ids), config["hidden_size"], "bf16", False)
    rows = [[f"{i:06d}", i * per_sample, per_sample, TOKENS, 700, 690] for i in range(SAMPLES)]
    index = (json.dumps({"shard": "000000.tar", "samples": rows}) + "\n").encode()
    (dataset / INDEX_NAME).write_bytes(index)
    (dataset / "000000.tar").touch()
    os.truncate(dataset / "000000.tar", SAMPLES * per_sample)
    shard = Shard(
        name="000000.tar",
        samples=SAMPLES,
        tokens=SAMPLES * TOKENS,
        supervised=SAMPLES * 700,
        anchors=SAMPLES * 690,
        bytes=SAMPLES * per_sample,
        sha256="0" * 64,
        argmax_matches=SAMPLES * 700,
    )
    facts = Target(
        name=str(target),
        revision=None,
        config_sha256=config_sha256(target),
        dtype="bfloat16",
        num_hidden_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        tied=config["tie_word_embeddings"],
        embedding_sha256="0",
        head_sha256="0",
    )
    Manifest(
        target=facts,
        features=Features(layer_ids=layer_ids),
        tokenizer_sha256=tokenizer_sha256(target),
        template_sha256=template_sha256(load_tokenizer(target)),
        template_args={},
        stop_token_ids=[2],
        mask_token_id=mask,
        max_length=3072,
        shard_bytes=10**12,
        batch_tokens=8192,
        source_sha256=sha256_hex(canonical_json(rows)),
        responses=Responses(generator="server", sampling=None, from_text=0),
        plan=Plan(shards=1, samples=SAMPLES, tokens=SAMPLES * TOKENS),
        shards=[shard],
        argmax_share=1.0,
        dropped={},
        sealed=True,
        index_sha256=sha256_hex(index),
    ).write(dataset)
    return folder


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    group = Ranks(1, tmp_path_factory.mktemp("ranks"))
    yield group
    group.close()


def header_of(name: str) -> str:
    lines = (ROOT / f"launch/runs/{name}.yaml").read_text().splitlines()
    words = " ".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
    return " ".join(words.replace("#", " ").split())


def number(pattern: str, text: str) -> float:
    return float(re.search(pattern, text)[1].replace(",", ""))


@pytest.mark.parametrize("name", READY)
def test_a_dry_run_of_every_ready_run_agrees_with_its_header(name, rank, tmp_path):
    tree = yaml.safe_load((ROOT / f"launch/runs/{name}.yaml").read_text())
    config = TARGETS[name.rsplit("-", 1)[0]]
    out = stand_in(tmp_path / "run", config, tree["drafter"]["target_layer_ids"], tree["drafter"]["mask_token_id"])
    output = rank.train(
        out, "--dry-run", f"target.path={out}/target", "precision=bf16", run=f"launch/runs/{name}.yaml"
    ).stdout
    text = header_of(name)
    parameters = number(r"([\d.]+) M parameters \(", output)
    assert parameters == pytest.approx(number(r"Drafter (\d+) M parameters", text), abs=0.6)
    assert f"{tree['drafter']['num_layers']} layers, block {tree['drafter']['block_size']}, mask token" in output
    assert "of 64 sequences = 1 ranks x 64 micro-batches x 1 sequences" in output
    checkpoint = number(r"a checkpoint (\d+) MiB", output) * 2**20 / 1e9
    assert checkpoint == pytest.approx(number(r"a checkpoint of ([\d.]+) GB", text), abs=0.06)
    tables = number(r"frozen embedding and head (\d+) MiB", output) * 2**20 / 1e9
    assert tables == pytest.approx(number(r"frozen embedding and head ([\d.]+) GB", text), abs=0.06)
    for ranks, pattern in ((RANKS, r"State ([\d.]+) GB each"), (1, r"it too: state ([\d.]+) GB")):
        state = sum(dataclasses.astuple(expected(round(parameters * 1e6), 3, ranks, 2))) / 1e9
        assert state == pytest.approx(number(pattern, text), abs=0.06)
    stored = number(r"storage  dataset (\d+) MiB", output) * 2**20 * (100_000 / SAMPLES) / 1e12
    assert stored == pytest.approx(number(r"tokens, ([\d.]+) TB", text), abs=0.01)
    assert number(r"Steps (\d+):", text) == 99_000 * 6 // tree["optim"]["global_batch"]


def test_torchrun_starts_the_same_command(tmp_path):  # behind `--`: torchrun would take --run for its own --run-path
    out = stand_in(tmp_path / "run", TARGETS["qwen3-8b"], [1, 9, 17, 25, 33], 151669)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=1",
        f"--master-port={free_port()}",
        "--",
        "launch/train.py",
        *arguments_of(out, ("--dry-run", f"target.path={out}/target"), "launch/runs/qwen3-8b-5layers.yaml"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0 and "of 64 sequences = 1 ranks x 64 micro-batches x 1 sequences" in done.stdout, (
        done.stderr[-3000:]
    )


@pytest.mark.parametrize("name", RUNS)
def test_a_run_file_names_every_key(name):
    tree = yaml.safe_load((ROOT / f"launch/runs/{name}.yaml").read_text())
    for section, info in RunConfig.model_fields.items():
        assert section in tree, section
        if hasattr(info.annotation, "model_fields"):
            assert set(tree[section]) == set(info.annotation.model_fields), section


@pytest.mark.parametrize("name", [name for name in RUNS if name != "smoke"])
def test_a_run_file_comments_every_key(name):
    for line in (ROOT / f"launch/runs/{name}.yaml").read_text().splitlines():
        assert re.fullmatch(r"(  )?\w+: .*  # .+|\w+:|#.*||  +# .*", line), line
