"""The target of an evaluation: its tokenizer, its prompts as a server would be fed them, and the model where one is
run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from data_prep.errors import UserError
from data_prep.files import file_sha256
from data_prep.messages import Message
from data_prep.model import load_model
from data_prep.target import config_sha256, read_config, stop_token_ids, text_config
from data_prep.tokens import check_template_args, load_tokenizer, prompt_ids, template_sha256
from pipeline.drafter import DFlashDrafter
from pipeline.prompts import Conversation
from pipeline.replay import Responder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# How steps are counted: by the drafting loop, from batches of greedy text, or by a server (methods.py).
METHODS = ("loop", "walk", "vllm", "sglang")


@dataclass(frozen=True)
class Settings:
    """What decides the numbers besides weights and prompts. dtype: float32 or bfloat16, None for the device's."""

    max_new_tokens: int = 48
    temperature: float = 0.0
    seed: int = 0
    dtype: str | None = None
    template_args: dict = field(default_factory=dict)
    ignore_eos: bool = False
    method: str = "loop"

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if self.temperature < 0:
            raise UserError(f"temperature is {self.temperature}; it must be 0 (greedy) or above")
        if self.method not in METHODS:
            raise UserError(f"method is {self.method!r}; it must be one of {', '.join(METHODS)}")
        if self.method == "walk" and self.temperature > 0:
            raise UserError(
                f"walk reads the steps off greedy text, temperature is {self.temperature}; leave one of them out"
            )
        if self.dtype not in (None, *DTYPES):
            raise UserError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if not isinstance(self.template_args, dict):
            raise UserError(f"template_args is {self.template_args!r}; it must be a JSON object of names and values")


class EvaluationTarget:
    """A target folder with its tokenizer; the model is loaded once for any number of drafters."""

    def __init__(self, folder: Path, settings: Settings):
        self.folder, self.settings = folder, settings
        self.config = text_config(read_config(folder))
        self.positions, self.rows = self.config["max_position_embeddings"], self.config["vocab_size"]
        has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
        self.tokenizer = load_tokenizer(folder) if has_tokenizer else None
        if settings.template_args:
            check_template_args(self._required_tokenizer("template_args"), settings.template_args)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = settings.dtype or ("bfloat16" if self.device.type == "cuda" else "float32")
        self.stop_token_ids = self._stop_tokens()
        self.identity = identity(folder)

    @cached_property
    def model(self) -> PreTrainedModel:
        """Loaded when it is first run: a server's drafter is evaluated without, and so is a finished log reported."""
        return load_model(self.folder, DTYPES[self.dtype])

    @cached_property
    def responder(self) -> Responder:
        return Responder(self.model, self.settings.max_new_tokens, set(self.stop_token_ids))

    def drafter(self, folder: Path) -> DFlashDrafter:
        """The drafter in `folder`, ready to draft for this target."""
        return DFlashDrafter.from_pretrained(folder, dtype=DTYPES[self.dtype]).to(self.device)

    def _required_tokenizer(self, where: str):
        if self.tokenizer is None:
            raise UserError(
                f"{where} needs the tokenizer, which {self.folder} has not; add it, or give prompts as prompt_token_ids"
            )
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
        generation = self.folder / "generation_config.json"
        said = json.loads(generation.read_text()) if generation.is_file() else self.config
        eos = said.get("eos_token_id")
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
            raise UserError(
                f"{conversation.where}: token id {outside[0]} is not a row of the target's embedding table"
                f" (0..{self.rows - 1}); these ids belong to another tokenizer"
            )
        if len(ids) + self.settings.max_new_tokens > self.positions:
            raise UserError(
                f"{conversation.where}: {len(ids)} prompt tokens + {self.settings.max_new_tokens} new ones"
                f" exceed the target's {self.positions} positions; shorten the prompt or lower"
                " --max-new-tokens"
            )
        return ids


def identity(folder: Path) -> dict:
    """Hashes that name a model: its config's meaning and the bytes of its weight files."""
    weights = {path.name: file_sha256(path) for path in sorted(folder.glob("*.safetensors"))}
    if not weights:
        raise UserError(f"{folder} holds no *.safetensors; save the model with safetensors")
    return {"name": str(folder), "config_sha256": config_sha256(folder), "weights_sha256": weights}
