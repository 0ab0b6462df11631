"""Measure a drafter on prompts: accepted length, acceptance per slot, speed-up, and whether output is the target's own.

    python launch/evaluate.py --target TARGET --drafter DRAFTER --prompts PROMPTS.jsonl --out REPORT

A line of PROMPTS holds a conversation as `python -m data_prep prompts` writes or reads it (`messages`, `turns`,
`conversations`, `prompt`; `tools`), or `prompt_token_ids`. As in training data the target answers every turn in its own
words, whatever answers the line has. Every prompt is run plainly (block size 1) and drafted, one sequence at a time.
REPORT/results.jsonl keeps finished prompts: run again, it carries on.
Cost: two generations a prompt, three with --baseline. Exits 2 on a user's error.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from data_prep.errors import UserError
from data_prep.files import canonical_json, file_sha256, sha256_hex, write_atomic
from data_prep.messages import Message, flaw, open_turns, to_messages, to_tools
from data_prep.sources import read_lines
from data_prep.target import config_sha256, read_config, stop_token_ids, text_config
from data_prep.tokens import check_template_args, load_tokenizer, prompt_ids, template_sha256
from pipeline import acceptance, runtime
from pipeline.drafter import DFlashDrafter
from pipeline.plots import plot_acceptance, plot_training
from pipeline.report import build_report, format_table, run_record
from pipeline.results import ResultLog
from pipeline.speculate import check_drafter_fits, generate_drafted, generate_plain

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OUTPUTS = ("report.json", "prompts.jsonl", "acceptance.png", "training.png")


@dataclass(frozen=True)
class Conversation:
    """One line of the prompts: a ready prompt of token ids, or messages with None where the target answers."""

    where: str
    token_ids: tuple[int, ...] = ()
    talk: tuple[Message | None, ...] = ()
    tools: tuple[dict, ...] = ()

    @property
    def answers(self) -> int:
        return self.talk.count(None) or 1


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face folder of the target")
    parser.add_argument("--drafter", type=Path, required=True, help="folder of the drafter in the public format")
    parser.add_argument("--baseline", type=Path, help="a second drafter for the same prompts, e.g. the untrained one")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file of prompts")
    parser.add_argument("--out", type=Path, required=True, help="folder of the report; results in it are reused")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="length limit of a response (default 48)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default); above 0 samples")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--template-args", type=json.loads, default={}, metavar="JSON",
                        help='arguments of the chat template, e.g. \'{"enable_thinking": false}\'')
    parser.add_argument("--ignore-eos", action="store_true", help="generate past the target's stop tokens")
    parser.add_argument("--history", type=Path, help="the training run's metrics.jsonl, to draw its curves")
    parser.add_argument("--show", type=Path, action=Show, metavar="OUT", help="print a finished report again and end")
    args = parser.parse_args(argv)
    if args.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens is {args.max_new_tokens}; it must be at least 1")
    if args.temperature < 0:
        raise UserError(f"--temperature is {args.temperature}; it must be 0 (greedy) or above")
    if not isinstance(args.template_args, dict):
        raise UserError(f"--template-args is {args.template_args!r}; it must be a JSON object of names and values")
    if args.history and not args.history.is_file():
        raise UserError(f"--history {args.history} does not exist; pass the run's metrics.jsonl or leave it out")
    return args


def read_conversations(path: Path) -> list[Conversation]:
    """All prompts of a file. UserError names the line that holds none, or two."""
    conversations = []
    for where, line in read_lines(path):
        ids = line.get("prompt_token_ids")
        if ids is None:
            messages = to_messages(line, where)
            if reason := flaw(messages):
                raise UserError(f"{where}: {reason}; correct or remove this conversation")
            talk = open_turns(messages)
            conversations.append(Conversation(where, talk=tuple(talk), tools=tuple(to_tools(line, where) or ())))
            continue
        if others := {"messages", "conversations", "turns", "prompt"} & set(line):
            raise UserError(f"{where} holds prompt_token_ids and {', '.join(sorted(others))}; a line has one of them")
        if not isinstance(ids, list) or not ids or not all(type(item) is int for item in ids):
            raise UserError(f"{where}: prompt_token_ids is {ids!r}; it must be a list of at least one int")
        conversations.append(Conversation(where, token_ids=tuple(ids)))
    if not conversations:
        raise UserError(f"{path} holds 0 prompts; it needs at least one line")
    return conversations


class Evaluation:
    """Target, drafters and settings of one run, loaded and checked against each other."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.conversations = read_conversations(args.prompts)
        config = text_config(read_config(args.target))
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = args.dtype or ("bfloat16" if self.device.type == "cuda" else "float32")
        folders = {"drafter": args.drafter} | ({"baseline": args.baseline} if args.baseline else {})
        self.drafters = {
            role: DFlashDrafter.from_pretrained(folder, dtype=DTYPES[self.dtype]).to(self.device)
            for role, folder in folders.items()
        }
        has_tokenizer = any((args.target / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
        self.tokenizer = load_tokenizer(args.target) if has_tokenizer else None
        if args.template_args:
            check_template_args(self._required_tokenizer("--template-args"), args.template_args)
        self.target = AutoModelForCausalLM.from_pretrained(
            args.target, dtype=DTYPES[self.dtype], local_files_only=True
        ).to(self.device).eval()
        for drafter in self.drafters.values():
            check_drafter_fits(drafter.config, self.target)
        self.rows = self.target.get_input_embeddings().weight.shape[0]
        self.positions = config["max_position_embeddings"]
        # All first prompts are checked before the first one is run; later turns depend on the answers.
        self.first_prompts = [self.prompt(conversation, []) for conversation in self.conversations]
        self.facts = {
            "target": _identity(args.target),
            **{role: _identity(folder) for role, folder in folders.items()},
            "prompts_sha256": sha256_hex(args.prompts.read_bytes()),
            "template": {"sha256": self._template_sha256(), "args": args.template_args},
            "settings": {
                "max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed,
                "dtype": self.dtype, "device": self.device.type, "stop_token_ids": self._stop_tokens(),
                "block_sizes": {role: drafter.config.block_size for role, drafter in self.drafters.items()},
            },
        }

    def _required_tokenizer(self, where: str):
        if self.tokenizer is None:
            raise UserError(f"{where} needs the tokenizer, which {self.args.target} has not; add it, or give prompts as"
                            " prompt_token_ids")
        return self.tokenizer

    def _template_sha256(self) -> str | None:
        return template_sha256(self.tokenizer) if self.tokenizer is not None and self.tokenizer.chat_template else None

    def _stop_tokens(self) -> list[int]:
        if self.args.ignore_eos:
            return []
        if self.tokenizer is not None:
            return stop_token_ids(self.args.target, self.tokenizer)
        eos = self.target.generation_config.eos_token_id
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
            ids = prompt_ids(tokenizer, messages, self.args.template_args, list(conversation.tools) or None)
        outside = [i for i in ids if not 0 <= i < self.rows]
        if outside:
            raise UserError(f"{conversation.where}: token id {outside[0]} is not a row of the target's embedding table"
                            f" (0..{self.rows - 1}); these ids belong to another tokenizer")
        if len(ids) + self.args.max_new_tokens > self.positions:
            raise UserError(f"{conversation.where}: {len(ids)} prompt tokens + {self.args.max_new_tokens} new ones"
                            f" exceed the target's {self.positions} positions; shorten the prompt or lower"
                            " --max-new-tokens")
        return ids

    def run(self, ids: list[int], prompt: int, turn: int) -> dict:
        """One prompt plainly and with every drafter, as a record of the result log."""
        settings = self.facts["settings"]

        def options() -> dict:
            seed = int(sha256_hex(canonical_json([settings["seed"], prompt, turn]))[:12], 16)
            return {"max_new_tokens": settings["max_new_tokens"], "stop_token_ids": set(settings["stop_token_ids"]),
                    "temperature": settings["temperature"],
                    "generator": torch.Generator(self.device).manual_seed(seed)}

        record = {"prompt_token_ids": ids, "plain": run_record(generate_plain(self.target, ids, **options()))}
        for role, drafter in self.drafters.items():
            record[role] = run_record(generate_drafted(self.target, drafter, ids, **options()))
        return record

    def warm_up(self, ids: list[int]) -> None:
        """The first passes of a process are slow; keep them out of the first prompt's times."""
        generate_plain(self.target, ids, 2)
        for drafter in self.drafters.values():
            generate_drafted(self.target, drafter, ids, 2)

    def records(self, log: ResultLog) -> list[dict]:
        """Records of all prompts in order; the missing ones are computed and logged one by one."""
        records: list[dict] = []
        total = sum(conversation.answers for conversation in self.conversations)
        warm = False
        with tqdm(total=total, initial=len(log.records), desc="evaluate", unit="prompt", smoothing=0.1) as bar:
            for prompt, conversation in enumerate(self.conversations):
                answers: list[list[int]] = []
                for turn in range(conversation.answers):
                    if (prompt, turn) not in log.records:
                        ids = self.prompt(conversation, answers)
                        if not warm:
                            self.warm_up(self.first_prompts[0])
                            warm = True
                        log.append(prompt, turn, self.run(ids, prompt, turn))
                        bar.update()
                    records.append(log.records[prompt, turn])
                    answers.append(records[-1]["plain"]["output_ids"])
                    tau = acceptance.tau_pooled([record["drafter"]["accepted"] for record in records]).value
                    if tau is not None:
                        bar.set_postfix(tau=f"{tau:.3f}", refresh=False)
        return records


def _identity(folder: Path) -> dict:
    """Hashes that name a model: its config's meaning and the bytes of its weight files."""
    weights = {path.name: file_sha256(path) for path in sorted(folder.glob("*.safetensors"))}
    if not weights:
        raise UserError(f"{folder} holds no *.safetensors; save the model with safetensors")
    return {"name": str(folder), "config_sha256": config_sha256(folder), "weights_sha256": weights}


def show(folder: Path) -> None:
    """Print the table of a finished report and where its files are."""
    path = folder / "report.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no report.json; run launch/evaluate.py with --out {folder} to its end")
    print(format_table(json.loads(path.read_text())))
    for name in OUTPUTS:
        if (folder / name).is_file():
            print(folder / name)


class Show(argparse.Action):
    """`--show FOLDER` prints a finished report and ends, as --help does; no other argument is needed."""

    def __call__(self, parser, namespace, values, option_string=None):
        show(values)
        parser.exit()


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse_arguments(argv)
        evaluation = Evaluation(args)
        args.out.mkdir(parents=True, exist_ok=True)
        # Names are where a model lies; moving it changes no result.
        configuration = {
            name: {k: v for k, v in value.items() if k != "name"} if isinstance(value, dict) else value
            for name, value in evaluation.facts.items()
        }
        log = ResultLog(args.out / "results.jsonl", configuration)
        total = sum(conversation.answers for conversation in evaluation.conversations)
        settings = evaluation.facts["settings"]
        print("settings:", ", ".join(f"{name} {value}" for name, value in settings.items()), flush=True)
        if log.changes:
            print(f"{log.path} holds results of another configuration, which are not used: {'; '.join(log.changes)}")
        if log.records:
            print(f"resuming: {len(log.records)} of {total} prompts are done in {log.path}", flush=True)
        records = evaluation.records(log)
        report = build_report(records, settings["block_sizes"], {**evaluation.facts, "versions": runtime.versions()})
        lines = "".join(json.dumps({"prompt_token_ids": record["prompt_token_ids"]}) + "\n" for record in records)
        write_atomic(args.out / "prompts.jsonl", lines.encode())
        plot_acceptance(report, args.out / "acceptance.png")
        if args.history:
            plot_training(args.history, args.out / "training.png")
        write_atomic(args.out / "report.json", (json.dumps(report) + "\n").encode())
        show(args.out)
    except UserError as error:
        return runtime.fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
