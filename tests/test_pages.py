"""The commands of the pages are run, in their order, on a tiny target with the template of a thinking model.

What is changed is listed here and nothing else is: paths, sizes (`SMALL`) and what needs another machine (`ELSEWHERE`).
A command that is neither run nor listed fails its page's test, and so does a link to a file that does not exist.
"""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from data_prep.__main__ import main as data_prep
from data_prep.tiny_target import make_tiny_target
from data_prep.tokens import load_tokenizer
from tests.distributed import ROOT, Ranks
from tests.paths import TEMPLATES

PAGES = [
    Path(name)
    for name in (
        "README.md",
        "NOTES.md",
        "data_prep/README.md",
        "ds_configs/README.md",
        "launch/README.md",
        "launch/TROUBLESHOOTING.md",
        "launch/runs/README.md",
        "launch/slurm/README.md",
        "pipeline/EVALUATION.md",
        "pipeline/README.md",
    )
]
# Where a command cannot run here, and what shows instead that it is right.
ELSEWHERE = {
    "bash launch/quickstart.sh": "tests/pipeline/test_quickstart.py runs it with --smoke",
    "bash tests/run.sh": "runs this test",
    "pip install": "installs packages",
    "python -m venv": "installs packages",
    "python3 -m venv": "installs packages",
    "zlab/bin/dflash": "an environment of its own, checked by hand",
    "vllm serve": "needs vLLM; tests/data_prep/test_vllm.py and checks by hand",
    "python -m sglang.launch_server": "needs SGLang and a GPU",
    "$EDITOR": "a person edits",
    "sbatch": "tests/launch/test_slurm.py submits the scripts to a real SLURM",
    "bash tests/soak.sh": "takes 20 minutes",
    "--engine vllm": "asks a server; tests/pipeline has one of its own",
    "$R/vllm": "compares with what a server's evaluation wrote",
    "launch/ablate.py": "tests/pipeline/test_ablate.py runs it",
}
SMALL = (
    "drafter.num_layers=1",
    "drafter.block_size=4",
    "loss.max_anchors=8",
    "optim.global_batch=4",
    "optim.max_steps=2",
    "evaluation.share=0",
    "data.workers=0",
    "drafter.target_layer_ids=null",
    "drafter.mask_token_id=null",
)
PROMPTS = [
    f"Say {number} words about the {thing}." for number in range(4, 12) for thing in ("sea", "sun", "old town", "rain")
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """One string per command of the page's bash blocks, continued lines joined."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


class Machine:
    """The person who types the commands: target, inputs, a folder for each page's results."""

    def __init__(self, folder: Path):
        self.folder, self.target = folder, make_tiny_target(folder / "target", family="qwen3", layers=12)
        tokenizer = load_tokenizer(self.target)
        tokenizer.chat_template = (TEMPLATES / "thinking_switch.jinja").read_text()
        tokenizer.save_pretrained(self.target)
        rows = [{"prompt": text} for text in PROMPTS]
        for name in ("my_prompts.jsonl", "my_chats.jsonl"):
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name in ("gsm8k", "math500", "mt-bench"):
            (folder / f"{name}.jsonl").write_text(json.dumps({"turns": PROMPTS[:2]}) + "\n")
        Dataset.from_list(rows).to_parquet(folder / "ultrachat.parquet")
        Dataset.from_list(rows).save_to_disk(folder / "saved_dataset")
        site = (ROOT / "launch/slurm/site.env").read_text()
        (folder / "site.env").write_text(site.replace("PYTHON=.venv/bin/python", f"PYTHON={sys.executable}"))
        self.rank = Ranks(1, folder)

    def adapt(self, command: str, out: Path) -> list[str]:
        """The words of a command with this machine's paths and sizes."""
        for name, value in {
            "$T": self.target,
            "$R": out,
            "other_run": out,
            "saved_dataset/": self.folder / "saved_dataset",
        }.items():
            command = command.replace(name, str(value))
        words = shlex.split(command, comments=True)
        for i, word in enumerate(words):
            if word == "DIR":
                words[i] = str(self.folder)
            elif word in ("my_prompts.jsonl", "my_chats.jsonl", "ultrachat.parquet"):
                words[i] = str(self.folder / word)
            elif word == "--max-new-tokens":
                words[i + 1] = "8"
            elif word == "--heldout":
                words[i + 1] = "0.2"
        while "--server" in words:  # the target answers here
            del words[words.index("--server") : words.index("--server") + 2]
        return words

    def run(self, command: str, out: Path) -> None:
        words = self.adapt(command, out)
        if words[:3] == ["python", "-m", "data_prep"]:
            assert data_prep(words[3:]) == 0, command
        elif words[0] == "python":
            before, sys.argv = sys.argv, words[1:]
            try:
                script = runpy.run_path(str(ROOT / words[1]), run_name="script")
                assert script["main"]() == 0, command
            except SystemExit as end:
                assert not end.code, command
            finally:
                sys.argv = before
        elif words[:2] == ["deepspeed", "launch/train.py"]:
            self.train(words[2:], out)
        elif words[:2] == ["bash", "launch/slurm/submit.sh"]:
            done = subprocess.run(
                [*words, "--dry-run"],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=60,
                env={**os.environ, "SITE": str(self.folder / "site.env")},
            )
            assert done.returncode == 0 and done.stdout.count("sbatch --parsable ") == 8, done.stderr
        else:
            raise AssertionError(f"this test neither runs nor lists: {command}")

    def train(self, words: list[str], out: Path) -> None:
        assert words[0] == "--ds_config" and words[2] == "--run"
        run = words[3]
        if run == "my_run.yaml":  # the one on the page
            run = str(self.folder / run)
            Path(run).write_text(
                blocks(Path("pipeline/README.md"), "yaml")[0].replace("/models/Qwen3-8B", str(self.target))
            )
        rest = [word for word in words[4:] if not word.startswith("out=")]
        self.rank.train(out, *rest, *SMALL, run=run, ds_config=words[1])


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    machine = Machine(tmp_path_factory.mktemp("pages"))
    yield machine
    machine.rank.close()


@pytest.fixture(scope="module")
def dataset(machine):
    """A run's folder as it is after the README's commands, up to and including the dataset."""
    out = machine.folder / "prepared"
    for command in commands(Path("README.md")):
        if command.startswith("python -m data_prep"):
            machine.run(command, out)
    return out


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_commands_of_a_page_run(page, machine, dataset, monkeypatch):
    out = machine.folder / page.as_posix().replace("/", "-")
    out.mkdir()
    if page.parts[0] in ("pipeline", "launch"):  # these begin with a dataset, and with a trained drafter
        for name in ("dataset", "prompts"):
            (out / name).symlink_to(dataset / name)
        if page in (Path("launch/README.md"), Path("pipeline/EVALUATION.md")):
            machine.run(
                "deepspeed launch/train.py --ds_config ds_configs/zero3.json --run launch/runs/qwen3-8b-5layers.yaml "
                "out=$R target.path=$T",
                out,
            )
        if page == Path("pipeline/EVALUATION.md"):
            machine.run("python launch/export.py $R/checkpoints $R/drafter", out)
    for command in commands(page):
        if re.fullmatch(r"T=\S+; R=\S+( +#.*)?", command) or any(part in command for part in ELSEWHERE):
            continue
        if "$SLURM_ARRAY_TASK_ID" in command:
            for task in range(int(re.search(r"--num-tasks (\d+)", command)[1])):
                machine.run(command.replace("$SLURM_ARRAY_TASK_ID", str(task)), out)
        else:
            machine.run(command, out)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_what_a_page_links_to_and_names_exists(page):
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert link.startswith("http") or (ROOT / page.parent / link).exists(), link
    for name in re.findall(r"`((?:launch|pipeline|data_prep|ds_configs|tests)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


def test_every_page_is_among_them():
    found = {
        path.relative_to(ROOT)
        for part in ("", "data_prep", "ds_configs", "launch", "launch/*", "pipeline")
        for path in ROOT.glob(f"{part}/*.md" if part else "*.md")
    }
    assert found == set(PAGES)


def test_the_readme_shows_what_to_do_within_two_screens_and_every_file_at_its_end():
    text = (ROOT / "README.md").read_text()
    assert text[: text.index("## Results")].count("\n") < 115
    tree = text[text.index("## Files") :]
    for folder in ("data_prep", "pipeline"):
        for path in (ROOT / folder).glob("*.py"):
            assert path.name in tree or path.name == "__init__.py", path
