"""An evaluation: one target, one or two drafters and prompts, run to one record a prompt.

A record holds `prompt_token_ids` and a run (report.run_record) for `plain`, `drafter`, where there is one `baseline`, and on
the first prompts `generate`, transformers' own. Records come from the drafting loop, one sequence at a time and with its times, or under `walk` from batches that give the
same greedy steps without times (replay.py).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from data_prep.errors import UserError
from data_prep.files import canonical_json, file_sha256, sha256_hex
from data_prep.manifest import Manifest
from data_prep.messages import Message
from data_prep.model import load_model
from data_prep.target import config_sha256, read_config, stop_token_ids, text_config
from data_prep.tokens import check_template_args, load_tokenizer, prompt_ids, template_sha256
from pipeline.acceptance import emitted_tokens
from pipeline.drafter import DFlashDrafter
from pipeline.prompts import Conversation
from pipeline.reference import generate_reference
from pipeline.replay import Responder, replay
from pipeline.report import build_report, run_record
from pipeline.results import ResultLog
from pipeline.runtime import versions
from pipeline.speculate import check_drafter_fits, generate_drafted, generate_plain
from pipeline.trace import logit_gaps

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GENERATE_PROMPTS = 3  # first prompts that transformers' own `generate` is timed on
WALK_TOKENS = 16384  # prompt and new tokens of the prompts that are generated together


@dataclass(frozen=True)
class Settings:
    """What decides the numbers besides weights and prompts. dtype: float32 or bfloat16, None for the device's."""

    max_new_tokens: int = 48
    temperature: float = 0.0
    seed: int = 0
    dtype: str | None = None
    template_args: dict = field(default_factory=dict)
    ignore_eos: bool = False
    walk: bool = False

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if self.temperature < 0:
            raise UserError(f"temperature is {self.temperature}; it must be 0 (greedy) or above")
        if self.walk and self.temperature > 0:
            raise UserError(f"walk reads the steps off greedy text, temperature is {self.temperature}; leave one of them out")
        if self.dtype not in (None, *DTYPES):
            raise UserError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if not isinstance(self.template_args, dict):
            raise UserError(f"template_args is {self.template_args!r}; it must be a JSON object of names and values")

    @property
    def method(self) -> str:
        return "walk" if self.walk else "loop"


class EvaluationTarget:
    """A target with its tokenizer, loaded once for any number of drafters."""

    def __init__(self, folder: Path, settings: Settings):
        self.folder, self.settings = folder, settings
        self.positions = text_config(read_config(folder))["max_position_embeddings"]
        has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
        self.tokenizer = load_tokenizer(folder) if has_tokenizer else None
        if settings.template_args:
            check_template_args(self._required_tokenizer("template_args"), settings.template_args)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = settings.dtype or ("bfloat16" if self.device.type == "cuda" else "float32")
        self.model = load_model(folder, DTYPES[self.dtype])
        self.rows = self.model.get_input_embeddings().weight.shape[0]
        self.stop_token_ids = self._stop_tokens()
        self.responder = Responder(self.model, settings.max_new_tokens, set(self.stop_token_ids))
        self.identity = identity(folder)

    def drafter(self, folder: Path) -> DFlashDrafter:
        """The drafter in `folder`, ready to draft for this target. UserError where it was made for another one."""
        drafter = DFlashDrafter.from_pretrained(folder, dtype=DTYPES[self.dtype]).to(self.device)
        check_drafter_fits(drafter.config, self.model)
        return drafter

    def _required_tokenizer(self, where: str):
        if self.tokenizer is None:
            raise UserError(f"{where} needs the tokenizer, which {self.folder} has not; add it, or give prompts as"
                            " prompt_token_ids")
        return self.tokenizer

    @property
    def template(self) -> dict:
        """Hash and arguments of the chat template that prompts are rendered with."""
        there = self.tokenizer is not None and self.tokenizer.chat_template
        return {"sha256": template_sha256(self.tokenizer) if there else None, "args": self.settings.template_args}

    def _stop_tokens(self) -> list[int]:
        if self.settings.ignore_eos:
            return []
        if self.tokenizer is not None:
            return stop_token_ids(self.folder, self.tokenizer)
        eos = self.model.generation_config.eos_token_id
        return eos if isinstance(eos, list) else [] if eos is None else [eos]

    def prompt(self, conversation: Conversation, answers: list[list[int]]) -> list[int]:
        """Token ids of the next prompt of a conversation after `answers` (response ids), as a server would be fed."""
        if conversation.token_ids:
            ids = list(conversation.token_ids)
        else:
            tokenizer = self._required_tokenizer(conversation.where)
            spoken = iter(tokenizer.decode(answer, skip_special_tokens=True) for answer in answers)
            messages: list[Message] = []
            for message in conversation.talk:
                answer = None if message else next(spoken, None)
                if message is None and answer is None:
                    break
                messages.append(message or {"role": "assistant", "content": answer})
            ids = prompt_ids(tokenizer, messages, self.settings.template_args, list(conversation.tools) or None)
        outside = [i for i in ids if not 0 <= i < self.rows]
        if outside:
            raise UserError(f"{conversation.where}: token id {outside[0]} is not a row of the target's embedding table"
                            f" (0..{self.rows - 1}); these ids belong to another tokenizer")
        if len(ids) + self.settings.max_new_tokens > self.positions:
            raise UserError(f"{conversation.where}: {len(ids)} prompt tokens + {self.settings.max_new_tokens} new ones"
                            f" exceed the target's {self.positions} positions; shorten the prompt or lower"
                            " --max-new-tokens")
        return ids


class Evaluation:
    """`conversations` with the drafters of `folders` (`drafter`, `baseline`), all checked before anything runs."""

    def __init__(self, target: EvaluationTarget, settings: Settings, folders: dict[str, Path],
                 conversations: list[Conversation], dataset: Path | None = None):
        """dataset: the one that the drafter was trained on, if its folder does not say (a public drafter)."""
        self.target, self.settings, self.conversations = target, settings, conversations
        self.drafters = {role: target.drafter(folder) for role, folder in folders.items()}
        # All first prompts are checked before the first one is run; later turns depend on the answers.
        self.first_prompts = [target.prompt(conversation, []) for conversation in conversations]
        self.facts = {
            "target": target.identity,
            **{role: identity(folder) for role, folder in folders.items()},
            "prompts_sha256": self.prompts_sha256(conversations),
            "template": target.template,
            "training_template": training_template(folders["drafter"], dataset),
            "settings": {
                "max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature, "seed": settings.seed,
                "dtype": target.dtype, "device": target.device.type, "stop_token_ids": target.stop_token_ids,
                "ignore_eos": settings.ignore_eos, "method": settings.method,
                "block_sizes": {role: drafter.config.block_size for role, drafter in self.drafters.items()},
            },
        }

    @staticmethod
    def prompts_sha256(conversations: list[Conversation]) -> str:
        """Hash of what is asked, wherever it is written."""
        return sha256_hex(canonical_json([{**asdict(conversation), "where": ""} for conversation in conversations]))

    @property
    def configuration(self) -> dict:
        """What results depend on: where a model lies and what it was trained with does not count."""
        return {name: {k: v for k, v in value.items() if k != "name"} if isinstance(value, dict) else value
                for name, value in self.facts.items() if name != "training_template"}

    def template_warning(self) -> str | None:
        """What to tell about prompts that are rendered in another way than the training data was."""
        trained, here = self.facts["training_template"], self.facts["template"]
        if not any(conversation.talk for conversation in self.conversations):
            return None
        if trained is None:
            return ("the drafter's folder does not say which chat template its training data was rendered with; name the dataset "
                    "with --dataset to have it compared")
        differences = [f"{name} is {here[name]!r} here and {trained[name]!r} in its training data"
                       for name in ("sha256", "args") if here[name] != trained[name]]
        return (f"the chat template's {' and its '.join(differences)}: the accepted length will differ from what serving with the "
                "training template gives; pass the same --template-args and template") if differences else None

    def turns(self, task: int = 0, num_tasks: int = 1) -> list[tuple[int, int]]:
        """(prompt, turn) of every answer that is asked for, of task `task` of `num_tasks`."""
        return [(prompt, turn) for prompt in range(task, len(self.conversations), num_tasks)
                for turn in range(self.conversations[prompt].answers)]

    def report(self, log: ResultLog) -> dict:
        """The content of report.json from a log that lacks nothing."""
        places = self.turns()
        return build_report([log.records[place] for place in places],
                            [self.conversations[prompt].source for prompt, _ in places],
                            self.facts["settings"]["block_sizes"], {**self.facts, "versions": versions()})

    def run(self, log: ResultLog, task: int = 0, num_tasks: int = 1) -> None:
        """Computes what the log lacks of this task, turn after turn, and logs it prompt by prompt."""
        mine = self.turns(task, num_tasks)
        done = [log.records[place]["drafter"]["accepted"] for place in mine if place in log.records]
        emitted, steps = (sum(counts) for counts in zip(*map(emitted_tokens, done), strict=True)) if done else (0, 0)
        batches = self._walked if self.settings.walk else self._looped
        with tqdm(total=len(mine), initial=len(done), desc="evaluate", unit="prompt", smoothing=0.1) as bar:
            for turn in range(max(conversation.answers for conversation in self.conversations)):
                todo = [(prompt, self._prompt(log, prompt, turn)) for prompt, at in mine
                        if at == turn and (prompt, turn) not in log.records]
                for prompt, record in batches(todo, turn):
                    log.append(prompt, turn, record)
                    new = emitted_tokens(record["drafter"]["accepted"])
                    emitted, steps = emitted + new.numerator, steps + new.denominator
                    if steps:
                        bar.set_postfix(tau=f"{emitted / steps:.3f}", refresh=False)
                    bar.update()

    def _prompt(self, log: ResultLog, prompt: int, turn: int) -> list[int]:
        answers = [log.records[prompt, earlier]["plain"]["output_ids"] for earlier in range(turn)]
        return self.target.prompt(self.conversations[prompt], answers)

    def _looped(self, todo: list[tuple[int, list[int]]], turn: int):
        """(prompt, record) of every prompt, run plainly and with every drafter, one sequence at a time."""
        for number, (prompt, ids) in enumerate(todo):
            if number == 0 and turn == 0:
                self._warm_up(ids)
            record = {"prompt_token_ids": ids,
                      "plain": run_record(generate_plain(self.target.model, ids, **self._options(prompt, turn)))}
            for role, drafter in self.drafters.items():
                record[role] = run_record(generate_drafted(self.target.model, drafter, ids, **self._options(prompt, turn)))
                if self.settings.temperature == 0 and self.target.dtype != "float32":
                    record[role]["logit_gaps"] = logit_gaps(self.target.model, ids, record[role]["output_ids"])
            if prompt < GENERATE_PROMPTS and turn == 0:
                options = {name: value for name, value in self._options(prompt, turn).items() if name != "generator"}
                record["generate"] = run_record(generate_reference(self.target.model, ids, **options))
            yield prompt, record

    def _options(self, prompt: int, turn: int) -> dict:
        seed = int(sha256_hex(canonical_json([self.settings.seed, prompt, turn]))[:12], 16)
        return {"max_new_tokens": self.settings.max_new_tokens, "stop_token_ids": set(self.target.stop_token_ids),
                "temperature": self.settings.temperature,
                "generator": torch.Generator(self.target.device).manual_seed(seed)}

    def _warm_up(self, ids: list[int]) -> None:
        """The first passes of a process are slow; keep them out of the first prompt's times."""
        generate_plain(self.target.model, ids, 2)
        generate_reference(self.target.model, ids, 2)
        for drafter in self.drafters.values():
            generate_drafted(self.target.model, drafter, ids, 2)

    def _walked(self, todo: list[tuple[int, list[int]]], turn: int):
        """(prompt, record) of every prompt, prompts of like lengths together."""
        layer_ids = sorted({i for drafter in self.drafters.values() for i in drafter.config.target_layer_ids})
        longest = max(drafter.config.block_size for drafter in self.drafters.values())
        todo = sorted(todo, key=lambda item: len(item[1]), reverse=True)
        while todo:
            rows = max(1, WALK_TOKENS // (len(todo[0][1]) + self.settings.max_new_tokens))
            batch, todo = todo[:rows], todo[rows:]
            texts = self.target.responder.texts([ids for _, ids in batch], layer_ids, longest)
            for (prompt, ids), text in zip(batch, texts):
                runs = {role: replay(self.target.model, drafter, text) for role, drafter in self.drafters.items()}
                yield prompt, {"prompt_token_ids": ids, "plain": run_record(text.plain),
                               **{role: run_record(run) for role, run in runs.items()}}


def training_template(drafter: Path, dataset: Path | None) -> dict | None:
    """Hash and arguments of the chat template of the drafter's training data: from `dataset`'s manifest, else from what the
    export wrote beside the weights; None where neither says."""
    if dataset:
        manifest = Manifest.read(dataset)
        return {"sha256": manifest.template_sha256, "args": manifest.template_args}
    path = drafter / "training.json"
    return (json.loads(path.read_text()).get("template") or None) if path.is_file() else None


def identity(folder: Path) -> dict:
    """Hashes that name a model: its config's meaning and the bytes of its weight files."""
    weights = {path.name: file_sha256(path) for path in sorted(folder.glob("*.safetensors"))}
    if not weights:
        raise UserError(f"{folder} holds no *.safetensors; save the model with safetensors")
    return {"name": str(folder), "config_sha256": config_sha256(folder), "weights_sha256": weights}
