"""One small dataset for the whole folder: a tiny target, 26 prompts, its own greedy responses, three shards."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from data_prep.extract import extract
from data_prep.manifest import Manifest
from data_prep.responses import respond
from data_prep.tiny_target import make_tiny_target

LAYERS = [0, 2, 4]
SETTINGS = {"layer_ids": LAYERS, "shard_bytes": 150_000, "batch_tokens": 200}
TALK = {
    "id": "talk/with.dots",
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "this answer is not the target's"},
        {"role": "user", "content": "And then?"},
    ],
}


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """A tiny model is fastest on one thread, and the forked children of the kill tests need it."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    """A 6-layer target whose stop tokens include one that it often says, so that some responses end early."""
    folder = make_tiny_target(tmp_path_factory.mktemp("target") / "tiny", family="qwen3")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 247]}))
    return folder


@pytest.fixture(scope="session")
def prompts(tmp_path_factory) -> Path:
    """26 prompts of different lengths, one of them a conversation of two turns."""
    lines = [
        {"id": f"p{i}", "messages": [{"role": "user", "content": f"Say {i}" + " again" * (i % 5)}]} for i in range(25)
    ]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, TALK]))
    return path


@pytest.fixture(scope="session")
def responses(target, prompts, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("responses") / "responses.jsonl"
    respond(target, prompts, path, max_new_tokens=12, batch_size=8)
    return path


@pytest.fixture(scope="session")
def clean_dataset(target, responses, tmp_path_factory) -> Path:
    """An uninterrupted run's dataset. Read only: tests that change one take `dataset`."""
    folder = tmp_path_factory.mktemp("dataset") / "clean"
    assert len(extract(target, responses, folder, **SETTINGS).shards) >= 3
    return folder


@pytest.fixture
def dataset(clean_dataset, tmp_path) -> Path:
    """A copy of the clean dataset that a test may damage."""
    return Path(shutil.copytree(clean_dataset, tmp_path / "dataset"))


@pytest.fixture
def manifest(clean_dataset) -> Manifest:
    return Manifest.read(clean_dataset)


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def copy_responses(responses: Path, folder: Path) -> Path:
    """The responses file and its settings in `folder`."""
    folder.mkdir(exist_ok=True)
    for path in (responses, responses.with_name(responses.name + ".meta.json")):
        shutil.copy(path, folder / path.name)
    return folder / responses.name


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Name -> (mtime, content) of every file: equal snapshots mean that nothing was touched."""
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.iterdir())}
