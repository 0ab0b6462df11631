"""Trains a DFlash block drafter on a prepared dataset, under DeepSpeed ZeRO.

    deepspeed launch/train.py --ds_config ds_configs/zero3.json
    deepspeed launch/train.py --ds_config ds_configs/zero3.json --run my.yaml --resume auto optim.lr=3e-4
    deepspeed --num_accelerators 2 launch/train.py ...       two ranks on a CPU

Without --run the quickstart's run file is used. Every key of a run file can be overridden as section.key=value.
Exit codes: 0 finished, 2 an error of input or configuration, 75 stopped by SIGTERM or SIGUSR1 with a checkpoint written.
"""
import argparse
import json
import sys
from pathlib import Path

from data_prep.errors import UserError
from pipeline import checkpoint
from pipeline.batches import StepDataset, StepPlan
from pipeline.config import RunConfig, load_run
from pipeline.dataset import TrainingData, open_dataset
from pipeline.drafter import DFlashDrafter
from pipeline.runtime import Runtime, fail, start, versions
from pipeline.start import start_from_target

ROOT = Path(__file__).resolve().parent.parent


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ds_config", required=True, help="DeepSpeed JSON, e.g. ds_configs/zero3.json")
    parser.add_argument("--run", default=ROOT / "launch/runs/quickstart.yaml", help="run file (default: the quickstart's)")
    parser.add_argument("--resume", metavar="auto|TAG", help="auto: newest complete checkpoint, or step 0 where there is "
                        "none; TAG: that one. Without it training starts at step 0 and older results are moved aside")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and sizes, train nothing")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher adds it; the environment counts
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for example optim.lr=1e-4 out=runs/try")
    return parser.parse_intermixed_args()  # overrides may follow options


def build(run: RunConfig, data: TrainingData, plan: StepPlan, ds_config: str, runtime: Runtime):
    """The trainer with its engine, head and data, at step 0."""
    from pipeline.engine import build_engine, resolve_ds_config
    from pipeline.target_head import TargetHead
    from pipeline.trainer import Trainer

    config = resolve_ds_config(ds_config, run, runtime)
    head = TargetHead.load(run.target_path, data.manifest, runtime.device, runtime.dtype)
    engine = build_engine(initial_drafter(run, data), config, runtime)
    dataset = StepDataset(run.data_path, plan, rank=runtime.rank, world=runtime.world, micro_batch=run.optim.micro_batch,
                          max_anchors=run.loss.max_anchors, block_size=data.drafter.block_size,
                          mask_token_id=data.drafter.mask_token_id)
    return Trainer(run, runtime, engine, head, dataset, total_steps(run, plan))


def initial_drafter(run: RunConfig, data: TrainingData) -> DFlashDrafter:
    """The drafter of step 0, the same on every rank."""
    drafter = DFlashDrafter(data.drafter).initialise(run.seed)
    return start_from_target(drafter, run.target_path) if run.drafter.start == "target" else drafter


def total_steps(run: RunConfig, plan: StepPlan) -> int:
    return min(plan.steps, run.optim.max_steps or plan.steps)


def describe(run: RunConfig, data: TrainingData, plan: StepPlan, runtime: Runtime) -> str:
    """What is about to happen, in numbers."""
    import torch

    with torch.device("meta"):
        count = sum(p.numel() for p in DFlashDrafter(data.drafter).parameters())
    steps = total_steps(run, plan)
    state = count * (16 if runtime.precision == "fp32" else 18) / runtime.world  # weights, gradient, master, two moments
    dropped = "" if steps < plan.steps else f", the last {plan.unused} draws fill no step and are not used"
    return "\n".join([
        f"target   {data.manifest.target.name}: {data.manifest.target.num_hidden_layers} layers, hidden "
        f"{data.manifest.target.hidden_size}, features of layers {data.manifest.features.layer_ids}",
        f"data     {run.data_path}: {len(data.entries)} samples, {data.manifest.plan.tokens} tokens, "
        f"{sum(e.anchors for e in data.entries)} valid anchors",
        f"drafter  {data.drafter.num_hidden_layers} layers, block {data.drafter.block_size}, mask token "
        f"{data.drafter.mask_token_id}: {count / 1e6:.1f} M parameters",
        f"loss     {run.loss.credit}, alpha {run.loss.alpha:g}, up to {run.loss.max_anchors} anchors a sequence, "
        f"normalisation {run.loss.normalisation}",
        f"steps    {steps} of {run.optim.global_batch} sequences = {runtime.world} ranks x "
        f"{run.accumulation(runtime.world)} micro-batches x {run.optim.micro_batch}{dropped}",
        f"memory   {state / 2**20:.0f} MiB of weights, gradients and optimizer state per rank under ZeRO-3, "
        f"{2 * data.manifest.target.vocab_size * data.manifest.target.hidden_size * runtime.dtype.itemsize / 2**20:.0f} MiB "
        f"at most for the frozen embedding and head; a checkpoint takes {count * 12 / 2**20:.0f} MiB",
        f"compute  {runtime.precision} on {runtime.device.type}",
    ])


def clear_results(run: RunConfig, runtime: Runtime) -> None:
    """A start at step 0 keeps what an earlier run left, under another name."""
    if runtime.rank == 0:
        for name in ("checkpoints", "metrics.jsonl", "tensorboard"):
            if moved := checkpoint.move_aside(run.out / name):
                runtime.say(f"{run.out / name} of an earlier run moved to {moved} (use --resume auto to continue a run)")


def train(args: argparse.Namespace) -> int:
    run = load_run(args.run, args.overrides)
    data = open_dataset(run)
    plan = StepPlan(data.entries, run.seed, run.optim.epochs, run.optim.global_batch)
    folder = run.out / "checkpoints"
    tag = checkpoint.resolve_resume(folder, args.resume) if args.resume else None
    runtime = start(run.precision)
    run.accumulation(runtime.world)
    runtime.say(describe(run, data, plan, runtime))
    if args.dry_run:
        runtime.say(json.dumps(run.model_dump(mode="json"), indent=2))
        return 0
    steps, resolved = total_steps(run, plan), run.model_dump(mode="json")
    public = data.drafter.to_public(runtime.dtype)
    begin = 0
    if tag:
        marker = checkpoint.read_marker(folder, tag)
        checkpoint.check_marker(marker, drafter=public, manifest_sha256=data.manifest.sha256(), run=resolved,
                                world=runtime.world, where=str(folder / tag))
        begin = marker.step
    for broken in checkpoint.incomplete_tags(folder):
        runtime.say(f"{folder / broken} is incomplete (a save was interrupted) and is ignored")
    if begin >= steps:
        runtime.say(f"{folder / tag} holds all {steps} steps: nothing to do")
        return 0
    from pipeline.trainer import StopSignal

    with StopSignal().installed() as stop:
        trainer = build(run, data, plan, args.ds_config, runtime)
        if tag:
            checkpoint.load(trainer.engine, folder, tag, runtime)
            runtime.say(f"resuming from {folder / tag}: step {begin} of {steps}")
        else:
            runtime.say("starting from step 0" + (f" (no complete checkpoint in {folder})" if args.resume else ""))
            clear_results(run, runtime)
            if runtime.rank == 0:
                initial_drafter(run, data).save_pretrained(folder / checkpoint.UNTRAINED)
        known = versions()
        return trainer.train(begin, lambda done: checkpoint.Marker(
            done, steps, resolved, public, data.manifest.sha256(), runtime.world, known), stop)


def main() -> int:
    args = parse()
    try:
        return train(args)
    except UserError as error:
        return fail(error)


if __name__ == "__main__":
    sys.exit(main())
