"""The configuration of a training run: one typed schema, a YAML file a run, dotted overrides on the command line.

    load_run("launch/runs/quickstart.yaml", ["optim.lr=1e-4", "out=runs/try"])

Unknown keys, wrong types and impossible values are errors that name the key. The defaults are the paper's recipe.
"""
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from data_prep.errors import UserError
from pipeline.credit import DECAY_GAMMA, DECAY_KINDS
from pipeline.sources import is_url

# Keys that a resumed run may change freely: where things lie, how fast they come, what is shown and kept, how a step is
# cut into passes. All others decide the numbers and are compared (pipeline/checkpoint.py).
FREE_ON_RESUME = frozenset({
    "out", "attention", "data.path", "data.pack_tokens", "data.on_error", "data.workers", "data.prefetch_bytes", "data.cache_dir",
    "data.cache_bytes", "target.path", "drafter.init", "drafter.init_from", "optim.micro_batch",
    "optim.activation_checkpointing", "optim.max_nonfinite", "checkpoint.every", "checkpoint.keep", "checkpoint.keep_every",
    "evaluation.every", "log.every"})


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSection(_Section):
    path: str | None = Field(None, description="dataset folder (manifest.json and shards), or its URL for fsspec, such as "
                                               "https://... or s3://...; default OUT/dataset")
    pack_tokens: int | None = Field(None, ge=1, description="several documents share a row of at most so many tokens; null: "
                                                            "one a row, padded to the longest of the micro-batch")
    on_error: Literal["stop", "skip"] = Field("stop", description="a damaged sample ends the run, or is left out and counted")
    workers: int = Field(2, ge=0, description="processes per rank that read ahead; 0 reads in the training process")
    prefetch_bytes: int = Field(2**31, ge=1, description="bytes of states that the workers of a rank hold at most")
    cache_dir: Path | None = Field(None, description="where a URL's byte ranges are kept; a local disk; default OUT/cache")
    cache_bytes: int = Field(10 * 2**30, ge=0, description="bytes that cache_dir takes at most; 0 keeps nothing")


class TargetSection(_Section):
    path: Path | None = Field(None, description="target's Hugging Face folder; default OUT/target. Only its embedding "
                                                "and head are read")


class DrafterSection(_Section):
    num_layers: int = Field(5, ge=1, description="drafter layers; the paper uses 3 and 5")
    block_size: int = Field(16, ge=2, description="slots of a block, anchor included; block_size - 1 tokens are drafted")
    init: Literal["random", "target_layers"] = Field(
        "target_layers", description="initial weights: the target's own last layers (pipeline/start.py), or drawn from the "
                                     "seed")
    init_from: Path | None = Field(None, description="drafter folder (exported or public) whose weights the run starts "
                                                     "from; stands in for `init`")
    target_layer_ids: list[int] | None = Field(None, description="default: the dataset's; if set, must equal them")
    mask_token_id: int | None = Field(None, description="default: the dataset's; if set, must equal it")


class LossSection(_Section):
    credit: Literal["uniform", "decay", "dpace", "dpace_cumulative", "dpace_continuation", "accepted_prefix",
                    "reanchored_decay"] = Field(
        "dpace", description="weight of each slot in the loss (pipeline/credit.py)")
    alpha: float = Field(0.5, gt=0, le=1, description="smoothing of D-PACE's weights, in (0, 1]; 0.3 to 0.7 is stable")
    gamma: float | None = Field(None, gt=0, description="decay constant; default DFlash's for block 16, 10 and 8")
    normalisation: Literal["global", "reference"] = Field(
        "global", description="`reference` divides by the local batch as the published code does; for parity tests only")
    max_anchors: int = Field(512, ge=1, description="blocks drawn per sequence and epoch")


class OptimSection(_Section):
    lr: float = Field(6e-4, gt=0, description="peak learning rate of AdamW")
    min_lr: float = Field(0.0, ge=0, description="learning rate of the last step")
    warmup_ratio: float = Field(0.04, ge=0, le=1, description="share of the steps with linear warm-up; cosine after it")
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, gt=0, description="bound of the global gradient norm")
    epochs: int = Field(6, ge=1)
    max_steps: int | None = Field(None, ge=1, description="stop after so many optimizer steps; the learning rate's "
                                                          "schedule ends there too")
    global_batch: int = Field(64, ge=1, description="sequences per optimizer step, over all ranks and micro-batches")
    micro_batch: int = Field(1, ge=1, description="rows per rank and forward pass; a row is one sequence, or several with "
                                                  "data.pack_tokens")
    max_nonfinite: int = Field(5, ge=1, description="steps in a row that are skipped because loss or gradient is not "
                                                    "finite; at that many the run stops")
    activation_checkpointing: bool = Field(False, description="recompute each drafter layer in the backward pass: less "
                                                              "memory, about a third more time")


class CheckpointSection(_Section):
    every: int = Field(500, ge=1, description="optimizer steps between checkpoints; the last step is always saved")
    keep: int = Field(2, ge=1, description="newest complete checkpoints that stay on the disk; the best one stays besides")
    keep_every: int | None = Field(None, ge=1, description="checkpoints of steps divisible by this stay as well")


class EvaluationSection(_Section):
    every: int | None = Field(500, ge=1, description="optimizer steps between held-out evaluations; null: none")
    share: float = Field(0.01, ge=0, lt=1, description="share of the samples, chosen by a hash of their keys, that is never "
                                                       "trained on; 0: none, and no evaluation")
    samples: int = Field(64, ge=1, description="held-out samples that an evaluation reads at most")


class LogSection(_Section):
    every: int = Field(10, ge=1, description="optimizer steps between lines on the terminal and columns of the heat map of "
                                             "weight shares; metrics.jsonl and TensorBoard's scalars have every step")


class RunConfig(_Section):
    out: Path = Field(description="folder of the run: checkpoints/, metrics.jsonl, tensorboard/")
    seed: int = 0
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="auto: bf16 with fp32 master weights where the device computes in it, else fp32")
    attention: Literal["auto", "sdpa", "flex", "flash"] = Field(
        "auto", description="how block attention is computed (pipeline/attention.py), one mathematics; auto: the fastest that "
                            "works on the device")
    data: DataSection = DataSection()
    target: TargetSection = TargetSection()
    drafter: DrafterSection = DrafterSection()
    loss: LossSection = LossSection()
    optim: OptimSection = OptimSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def _cross_checks(self):
        K, gamma = self.drafter.block_size, self.loss.gamma
        if self.loss.credit in DECAY_KINDS and gamma is None and K not in DECAY_GAMMA:
            raise ValueError(f"loss.gamma is needed for credit `{self.loss.credit}` with block_size {K}: DFlash published "
                             f"constants only for {sorted(DECAY_GAMMA)}; set loss.gamma")
        if self.optim.min_lr > self.optim.lr:
            raise ValueError(f"optim.min_lr {self.optim.min_lr} is above optim.lr {self.optim.lr}; lower it")
        return self

    @property
    def data_path(self) -> Path | str:
        """The dataset's folder, or its URL."""
        if self.data.path is None:
            return self.out / "dataset"
        return self.data.path if is_url(self.data.path) else Path(self.data.path)

    @property
    def cache_path(self) -> Path:
        return self.data.cache_dir or self.out / "cache"

    @property
    def target_path(self) -> Path:
        return self.target.path or self.out / "target"


def load_run(path: str | Path, overrides: list[str] = ()) -> RunConfig:
    """Reads a run file and applies `section.key=value` overrides (values are YAML)."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"run file {path} does not exist; the ready ones are in launch/runs/")
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise UserError(f"run file {path} is not valid YAML: {error}") from error
    for override in overrides:
        _apply(tree, override)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'run'}: {e['msg']} (got {e['input']!r})"[:400] for e in error.errors()]
        raise UserError(f"{path}: " + "; ".join(lines) + "; the keys and their meaning are in pipeline/config.py and "
                        "launch/runs/quickstart.yaml") from error


def _apply(tree: dict, override: str) -> None:
    name, found, text = override.partition("=")
    if not found:
        raise UserError(f"override {override!r} has no `=`; write section.key=value, for example optim.lr=1e-4")
    *sections, key = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UserError(f"override {override!r}: {section} is a value, not a section; the keys are in "
                            "launch/runs/quickstart.yaml")
    tree[key] = yaml.safe_load(text)
