"""The DeepSpeed engine: the JSON's "auto" values resolved from the run file, contradictions refused, the drafter wrapped.

The run file owns batch sizes, learning rate, clipping and precision; the JSON owns how DeepSpeed works (ZeRO stage,
buckets, offload). A value that both give must be the same.
"""
import json
from functools import partial
from pathlib import Path

import deepspeed
import torch
import torch.utils.checkpoint
from deepspeed.utils import set_z3_leaf_modules

from data_prep.errors import UserError
from pipeline.config import OptimSection, RunConfig
from pipeline.drafter import DFlashDrafter, DrafterLayer
from pipeline.runtime import Runtime

_MISSING = object()


def _owned_values(run: RunConfig, runtime: Runtime, passes: int) -> dict[str, tuple[object, str]]:
    """DeepSpeed key -> (value, where the value comes from)."""
    optim = run.optim
    return {
        "train_batch_size": (passes * runtime.world * optim.micro_batch, "rows of a step: optim.global_batch unless packed"),
        "train_micro_batch_size_per_gpu": (optim.micro_batch, "optim.micro_batch"),
        "gradient_accumulation_steps": (passes, "passes of a step, see pipeline/passes.py"),
        "gradient_clipping": (optim.clip, "optim.clip"),
        "optimizer.params.lr": (optim.lr, "optim.lr"),
        "optimizer.params.betas": (list(optim.betas), "optim.betas"),
        "optimizer.params.eps": (optim.eps, "optim.eps"),
        "optimizer.params.weight_decay": (optim.weight_decay, "optim.weight_decay"),
        "bf16.enabled": (runtime.precision == "bf16", f"precision ({runtime.precision} on {runtime.device.type})"),
    }


def resolve_ds_config(path: str | Path, run: RunConfig, runtime: Runtime, passes: int) -> dict:
    """DeepSpeed's configuration with every "auto" filled in. UserError names both sides of a contradiction.

    passes: forward passes of a rank per optimizer step."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"DeepSpeed configuration {path} does not exist; the ready ones are in ds_configs/")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"DeepSpeed configuration {path} is not valid JSON: {error}") from error
    if "scheduler" in config:
        raise UserError(f"{path} has a `scheduler`: the learning rate is a function of the optimizer step and belongs to "
                        "the run file (optim.lr, optim.warmup_ratio, optim.min_lr); remove it")
    if (stage := config.get("zero_optimization", {}).get("stage")) not in (2, 3):
        raise UserError(f"{path} says zero_optimization.stage = {stage}: this project runs and tests stages 3 and 2; take one "
                        "of ds_configs/")
    if "writer" in config.get("checkpoint", {}) or "datastates_ckpt" in config:
        raise UserError(f"{path} asks for a checkpoint writer of its own (checkpoint.writer or datastates_ckpt): a "
                        "checkpoint is marked complete when DeepSpeed's save returns, and these are not finished then; remove it")
    if config.get("fp16", {}).get("enabled"):
        raise UserError(f"{path} enables fp16: hidden states overflow it; remove the section, bf16 is chosen by `precision`")
    for name, (value, owner) in _owned_values(run, runtime, passes).items():
        *sections, key = name.split(".")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
        given = section.get(key, _MISSING)
        if given not in (_MISSING, "auto") and given != value:
            raise UserError(f"{path} says {name} = {given}, the run says {value} ({owner}); write \"auto\" in the JSON, "
                            "the run file owns this value")
        section[key] = value
    if unresolved := _autos(config):
        raise UserError(f"{path}: nothing fills \"auto\" in {', '.join(unresolved)}; write a value")
    return config


def _autos(tree, name: str = "") -> list[str]:
    if isinstance(tree, dict):
        return [found for key, value in tree.items() for found in _autos(value, f"{name}.{key}" if name else key)]
    return [name] if tree == "auto" else []


def build_engine(drafter: DFlashDrafter, ds_config: dict, runtime: Runtime) -> deepspeed.DeepSpeedEngine:
    """Partitions the drafter and its optimizer state; all ranks must hold the same drafter (rank 0's is broadcast).

    ZeRO-3 gathers a layer's parameters in one go: hooks on every little module cost more than a small layer computes."""
    set_z3_leaf_modules(drafter, [DrafterLayer])
    engine, *_ = deepspeed.initialize(model=drafter, config=ds_config, model_parameters=list(drafter.parameters()))
    masters = {tensor.dtype for tensor in master_weights(engine)}
    if masters - {torch.float32}:
        raise UserError(f"DeepSpeed keeps master weights in {masters}: they must be float32, or norm weights never move; "
                        "remove the setting that changes it from the DeepSpeed JSON")
    return engine


def master_weights(engine: deepspeed.DeepSpeedEngine) -> list[torch.Tensor]:
    """This rank's flat pieces of the master weights."""
    optimizer = engine.optimizer
    return (optimizer.fp32_partitioned_groups_flat if engine.zero_optimization_stage() == 3
            else optimizer.single_partition_of_fp32_groups)


def recompute_layers(drafter: DFlashDrafter) -> DFlashDrafter:
    """Activation checkpointing: every layer keeps its inputs only and is computed again in the backward pass."""
    for layer in drafter.layers:
        layer.forward = partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
    return drafter


def step_was_skipped(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Whether the optimizer step just made changed nothing, because a gradient on any rank was not finite. The norm that
    decides it is the global one, so all ranks give the same answer."""
    return bool(engine.optimizer.overflow)


def set_hyperparameters(engine: deepspeed.DeepSpeedEngine, optim: OptimSection) -> None:
    """The run file's values in place of those that a loaded checkpoint brought along."""
    for group in engine.optimizer.param_groups:
        group.update(betas=tuple(optim.betas), eps=optim.eps, weight_decay=optim.weight_decay)
    engine.optimizer.clip_grad = optim.clip


def set_learning_rate(engine: deepspeed.DeepSpeedEngine, lr: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
