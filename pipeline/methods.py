"""Three ways to count the steps of drafting on given prompts; each yields one record a prompt (evaluation.py).

Loop     the drafting loop here, one sequence at a time, with its times
Walk     the same greedy steps from batches, without times (replay.py)
Served   a running server's own count (served.py)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from data_prep.files import canonical_json, sha256_hex
from pipeline.drafter import DFlashDrafter
from pipeline.drafter_config import DrafterConfig
from pipeline.evaluation_target import EvaluationTarget, Settings
from pipeline.reference import generate_reference
from pipeline.replay import replay
from pipeline.report import run_record
from pipeline.served import Engine
from pipeline.speculate import Generation, check_drafter_fits, generate_drafted, generate_plain
from pipeline.trace import logit_gaps

GENERATE_PROMPTS = 3  # first prompts that transformers' own `generate` is timed on
WALK_TOKENS = 16384  # prompt and new tokens of the prompts that are generated together

Todo = Iterable[tuple[int, list[int]]]  # numbers of prompts and their token ids


class Method(Protocol):
    device: str
    block_sizes: dict[str, int]  # by role

    def records(self, todo: Todo, turn: int) -> Iterator[tuple[int, dict]]:
        """(prompt, record) for all of `todo`, the prompts of one turn, in any order. `todo` may be read one by one, when
        the record before is logged, or all at once."""


def seed_of(settings: Settings, prompt: int, turn: int) -> int:
    """The seed of one sampled answer, whatever was sampled before it."""
    return int(sha256_hex(canonical_json([settings.seed, prompt, turn]))[:12], 16)


class _Local:
    """Target and drafters in this process, loaded with the first prompt. UserError where a drafter does not fit."""

    def __init__(self, target: EvaluationTarget, settings: Settings, folders: dict[str, Path]):
        self.target, self.settings, self.folders, self.device = target, settings, folders, target.device.type
        configs = {role: DrafterConfig.from_json(folder / "config.json") for role, folder in folders.items()}
        for config in configs.values():
            check_drafter_fits(config, target.config)
        self.block_sizes = {role: config.block_size for role, config in configs.items()}

    @cached_property
    def drafters(self) -> dict[str, DFlashDrafter]:
        return {role: self.target.drafter(folder) for role, folder in self.folders.items()}


class Loop(_Local):
    warm = False

    def records(self, todo: Todo, turn: int) -> Iterator[tuple[int, dict]]:
        """Every prompt is run plainly and with every drafter; the first ones by transformers' own `generate` as
        well."""
        for prompt, ids in todo:
            model = self.target.model
            if not self.warm:
                self._warm_up(ids)
            record = {
                "prompt_token_ids": ids,
                "plain": run_record(generate_plain(model, ids, **self._options(prompt, turn))),
            }
            for role, drafter in self.drafters.items():
                record[role] = run_record(generate_drafted(model, drafter, ids, **self._options(prompt, turn)))
                if self.settings.temperature == 0 and self.target.dtype != "float32":
                    record[role]["logit_gaps"] = logit_gaps(model, ids, record[role]["output_ids"])
            if prompt < GENERATE_PROMPTS and turn == 0:
                options = {name: value for name, value in self._options(prompt, turn).items() if name != "generator"}
                record["generate"] = run_record(generate_reference(model, ids, **options))
            yield prompt, record

    def _options(self, prompt: int, turn: int) -> dict:
        generator = torch.Generator(self.target.device).manual_seed(seed_of(self.settings, prompt, turn))
        return {
            "max_new_tokens": self.settings.max_new_tokens,
            "stop_token_ids": set(self.target.stop_token_ids),
            "temperature": self.settings.temperature,
            "generator": generator,
        }

    def _warm_up(self, ids: list[int]) -> None:
        """The first passes of a process are slow; keep them out of the first prompt's times."""
        generate_plain(self.target.model, ids, 2)
        generate_reference(self.target.model, ids, 2)
        for drafter in self.drafters.values():
            generate_drafted(self.target.model, drafter, ids, 2)
        self.warm = True


class Walk(_Local):
    def records(self, todo: Todo, turn: int) -> Iterator[tuple[int, dict]]:
        """Prompts of like lengths are generated together."""
        todo = sorted(todo, key=lambda item: len(item[1]), reverse=True)
        if not todo:
            return
        layer_ids = sorted({i for drafter in self.drafters.values() for i in drafter.config.target_layer_ids})
        longest = max(self.block_sizes.values())
        while todo:
            rows = max(1, WALK_TOKENS // (len(todo[0][1]) + self.settings.max_new_tokens))
            batch, todo = todo[:rows], todo[rows:]
            texts = self.target.responder.texts([ids for _, ids in batch], layer_ids, longest)
            for (prompt, ids), text in zip(batch, texts):
                runs = {role: replay(self.target.model, drafter, text) for role, drafter in self.drafters.items()}
                yield prompt, {
                    "prompt_token_ids": ids,
                    "plain": run_record(text.plain),
                    **{role: run_record(run) for role, run in runs.items()},
                }


class Served:
    """A server that drafts by itself, asked for one answer at a time; the drafter's folder says the block size."""

    device = "server"

    def __init__(self, settings: Settings, drafter: Path, target: Path, stop_token_ids: list[int], url: str):
        block_size = DrafterConfig.from_json(drafter / "config.json").block_size
        self.settings, self.block_sizes = settings, {"drafter": block_size}
        self.engine = Engine(
            settings.method,
            url,
            target,
            block_size,
            stop_token_ids,
            settings.max_new_tokens,
            settings.temperature,
            settings.ignore_eos,
        )

    def records(self, todo: Todo, turn: int) -> Iterator[tuple[int, dict]]:
        """`plain` is the drafted text once more: a server has no run without its drafter."""
        for prompt, ids in todo:
            drafted = self.engine.answer(ids, seed_of(self.settings, prompt, turn))
            plain = Generation(drafted.output_ids)
            yield prompt, {"prompt_token_ids": ids, "plain": run_record(plain), "drafter": run_record(drafted)}
