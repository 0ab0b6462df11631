"""An evaluation: one target, one or two drafters and prompts, run to one record a prompt.

A record holds `prompt_token_ids` and a run (report.run_record) for `plain`, `drafter`, where there is one `baseline`,
and on the first prompts `generate`, transformers' own. What makes the records is a method (methods.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path

from tqdm import tqdm

from data_prep.files import canonical_json, sha256_hex
from data_prep.manifest import Manifest
from pipeline.acceptance import emitted_tokens
from pipeline.evaluation_target import EvaluationTarget, Settings, identity
from pipeline.methods import Method
from pipeline.prompts import Conversation
from pipeline.report import build_report
from pipeline.results import ResultLog
from pipeline.runtime import versions


class Evaluation:
    """`conversations` for the drafters of `folders` (`drafter`, `baseline`), all checked before anything runs."""

    def __init__(
        self,
        target: EvaluationTarget,
        settings: Settings,
        folders: dict[str, Path],
        method: Method,
        conversations: list[Conversation],
        dataset: Path | None = None,
    ):
        """method: what counts the steps, of the same target, settings and drafters (methods.py); dataset: the one that
        the drafter was trained on, if its folder does not say (a public drafter)."""
        self.settings, self.conversations, self.target, self.method = settings, conversations, target, method
        for conversation in conversations:  # later turns depend on the answers and are checked when they are known
            target.prompt(conversation, [])
        self.facts = {
            "target": target.identity,
            **{role: identity(folder) for role, folder in folders.items()},
            "prompts_sha256": self.prompts_sha256(conversations),
            "template": target.template,
            "training_template": training_template(folders["drafter"], dataset),
            "settings": {
                "max_new_tokens": settings.max_new_tokens,
                "temperature": settings.temperature,
                "seed": settings.seed,
                "dtype": target.dtype,
                "device": method.device,
                "stop_token_ids": target.stop_token_ids,
                "ignore_eos": settings.ignore_eos,
                "method": settings.method,
                "block_sizes": method.block_sizes,
            },
        }

    @staticmethod
    def prompts_sha256(conversations: list[Conversation]) -> str:
        """Hash of what is asked, wherever it is written."""
        return sha256_hex(canonical_json([{**asdict(conversation), "where": ""} for conversation in conversations]))

    @property
    def configuration(self) -> dict:
        """What results depend on: where a model lies and what it was trained with does not count."""
        return {
            name: {k: v for k, v in value.items() if k != "name"} if isinstance(value, dict) else value
            for name, value in self.facts.items()
            if name != "training_template"
        }

    def template_warning(self) -> str | None:
        """What to tell about prompts that are rendered in another way than the training data was."""
        trained, here = self.facts["training_template"], self.facts["template"]
        if not any(conversation.talk for conversation in self.conversations):
            return None
        if trained is None:
            return (
                "the drafter's folder does not say which chat template its training data was rendered with; name the"
                " dataset with --dataset to have it compared"
            )
        differences = [
            f"{name} is {here[name]!r} here and {trained[name]!r} in its training data"
            for name in ("sha256", "args")
            if here[name] != trained[name]
        ]
        return (
            f"the chat template's {' and its '.join(differences)}: the accepted length will differ from what serving"
            " with the training template gives; pass the same --template-args and template"
            if differences
            else None
        )

    def turns(self, task: int = 0, num_tasks: int = 1) -> list[tuple[int, int]]:
        """(prompt, turn) of every answer that is asked for, of task `task` of `num_tasks`."""
        return [
            (prompt, turn)
            for prompt in range(task, len(self.conversations), num_tasks)
            for turn in range(self.conversations[prompt].answers)
        ]

    def report(self, log: ResultLog) -> dict:
        """The content of report.json from a log that lacks nothing."""
        places = self.turns()
        return build_report(
            [log.records[place] for place in places],
            [self.conversations[prompt].source for prompt, _ in places],
            self.facts["settings"]["block_sizes"],
            {**self.facts, "versions": versions()},
        )

    def run(self, log: ResultLog, task: int = 0, num_tasks: int = 1) -> None:
        """Computes what the log lacks of this task, turn after turn, and logs it prompt by prompt. A task of the loop that
        is done takes over what the other tasks would come to last, so that none is waited for."""
        mine = self.turns(task, num_tasks)
        done = [log.records[place]["drafter"]["accepted"] for place in mine if place in log.records]
        emitted, steps = (sum(counts) for counts in zip(*map(emitted_tokens, done), strict=True)) if done else (0, 0)
        with tqdm(total=len(mine), initial=len(done), desc="evaluate", unit="prompt", smoothing=0.1) as bar:
            shares = [mine]
            if num_tasks > 1 and self.settings.method == "loop":
                shares.append([place for place in reversed(self.turns()) if place not in mine])
            turns = range(max(conversation.answers for conversation in self.conversations))
            for share, turn in product(shares, turns):
                places = [place for place in share if place[1] == turn]
                for prompt, record in self.method.records(self._missing(log, places), turn):
                    log.append(prompt, turn, record)
                    new = emitted_tokens(record["drafter"]["accepted"])
                    emitted, steps = emitted + new.numerator, steps + new.denominator
                    if steps:
                        bar.set_postfix(tau=f"{emitted / steps:.3f}", refresh=False)
                    if share is not mine:
                        bar.total += 1
                    bar.update()
            bar.total = bar.n  # what others have done of this task's share is not missing

    def _missing(self, log: ResultLog, places: list[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
        """(prompt, its ids) of the places that the log lacks when their turn comes. Left out are those whose earlier
        answers another task is still computing."""
        for prompt, turn in places:
            log.refresh()
            if (prompt, turn) not in log.records and all((prompt, earlier) in log.records for earlier in range(turn)):
                yield prompt, self._prompt(log, prompt, turn)

    def _prompt(self, log: ResultLog, prompt: int, turn: int) -> list[int]:
        answers = [log.records[prompt, earlier]["plain"]["output_ids"] for earlier in range(turn)]
        return self.target.prompt(self.conversations[prompt], answers)


def training_template(drafter: Path, dataset: Path | None) -> dict | None:
    """Hash and arguments of the chat template of the drafter's training data: from `dataset`'s manifest, else from what
    the export wrote beside the weights; None where neither says."""
    if dataset:
        manifest = Manifest.read(dataset)
        return {"sha256": manifest.template_sha256, "args": manifest.template_args}
    path = drafter / "training.json"
    return (json.loads(path.read_text()).get("template") or None) if path.is_file() else None
