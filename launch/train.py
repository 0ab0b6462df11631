"""Trains a DFlash block drafter on a prepared dataset, under DeepSpeed ZeRO.

    deepspeed launch/train.py --ds_config ds_configs/zero3.json
    deepspeed launch/train.py --ds_config ds_configs/zero3.json --run my.yaml --resume auto optim.lr=3e-4
    deepspeed --num_accelerators 2 launch/train.py ...       two ranks on a CPU

Without --run the quickstart's run file is used. Every key of a run file can be overridden as section.key=value.
A stop is asked for with SIGTERM or SIGUSR1 to any rank, or with `touch OUT/stop`.
Exit codes: 0 finished, 2 an error of input or configuration, 75 stopped on request with a checkpoint written: start again
with --resume auto.
"""
import argparse
import json
import sys
from pathlib import Path

from data_prep.errors import UserError
from pipeline import checkpoint
from pipeline.attention import resolve_attention
from pipeline.batches import StepDataset
from pipeline.config import RunConfig, load_run
from pipeline.dataset import TrainingData, open_dataset
from pipeline.drafter import DFlashDrafter
from pipeline.heldout import HeldoutSet, split
from pipeline.loader import read_ahead
from pipeline.order import StepPlan
from pipeline.passes import Passes
from pipeline.runtime import Runtime, fail, start, versions
from pipeline.sizes import expected, measured, parameter_counts
from pipeline.start import start_from_drafter, start_from_target

ROOT = Path(__file__).resolve().parent.parent


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ds_config", required=True, help="DeepSpeed JSON, e.g. ds_configs/zero3.json")
    parser.add_argument("--run", default=ROOT / "launch/runs/quickstart.yaml", help="run file (default: the quickstart's)")
    parser.add_argument("--resume", metavar="auto|TAG", help="auto: newest complete checkpoint, or step 0 where there is "
                        "none; TAG: that one. Without it training starts at step 0 and older results are moved aside")
    parser.add_argument("--override", metavar="KEY", action="append", default=[], help="with --resume: accept that KEY (such "
                        "as optim.lr or data.manifest) differs from the checkpoint's; may be repeated")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and sizes, train nothing")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher adds it; the environment counts
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for example optim.lr=1e-4 out=runs/try")
    return parser.parse_intermixed_args()  # overrides may follow options


def build(run: RunConfig, data: TrainingData, dataset: StepDataset, heldout: list, ds_config: dict, runtime: Runtime, stop,
          marker_of):
    """The trainer with its engine, head and data, at step 0."""
    from pipeline.engine import build_engine, recompute_layers
    from pipeline.target_head import TargetHead
    from pipeline.trainer import Trainer

    head = TargetHead.load(run.target_path, data.manifest, runtime.device, runtime.dtype)
    drafter, config = initial_drafter(run, data), data.drafter
    drafter.attention = resolve_attention(
        run.attention, runtime.device, runtime.dtype,
        (config.num_attention_heads, config.num_key_value_heads, config.head_dim), runtime.say)
    runtime.say(f"attention {drafter.attention}")
    engine = build_engine(recompute_layers(drafter) if run.optim.activation_checkpointing else drafter, ds_config, runtime)
    evaluate = heldout and run.evaluation.every
    evaluation = HeldoutSet(data.reader, heldout, run, data.drafter.mask_token_id) if evaluate else None
    return Trainer(run, runtime, engine, head, dataset, evaluation, total_steps(run, dataset.plan), stop, marker_of)


def initial_drafter(run: RunConfig, data: TrainingData) -> DFlashDrafter:
    """The drafter of step 0, the same on every rank."""
    drafter = DFlashDrafter(data.drafter).initialise(run.seed)
    if run.drafter.init_from:
        return start_from_drafter(drafter, run.drafter.init_from)
    return start_from_target(drafter, run.target_path) if run.drafter.init == "target_layers" else drafter


def total_steps(run: RunConfig, plan: StepPlan) -> int:
    return min(plan.steps, run.optim.max_steps or plan.steps)


def describe(run: RunConfig, data: TrainingData, dataset: StepDataset, heldout: list, ds_config: dict,
             runtime: Runtime) -> str:
    """What is about to happen, in numbers."""
    plan, passes = dataset.plan, dataset.passes
    counts, steps = parameter_counts(data.drafter), total_steps(run, plan)
    workers, ahead = read_ahead(run.data.workers, run.data.prefetch_bytes, dataset.largest_bytes)
    rows = f"rows of up to {passes.pack_tokens} tokens" if passes.pack_tokens else "sequences"
    count = counts["all"]
    zero = ds_config.get("zero_optimization", {})
    stage, offload = zero.get("stage", 0), zero.get("offload_optimizer", {}).get("device", "none")
    state = expected(count, stage, runtime.world, runtime.dtype.itemsize)
    tables = (1 if data.manifest.target.tied else 2) * data.manifest.target.vocab_size * data.manifest.target.hidden_size
    kept = run.checkpoint.keep + (steps // run.checkpoint.keep_every if run.checkpoint.keep_every else 0) + bool(heldout)
    dropped = "" if steps < plan.steps else f", the last {plan.unused} draws fill no step and are not used"
    evaluated = f"evaluated every {run.evaluation.every} steps" if run.evaluation.every else "not evaluated"
    aside = f"; {len(heldout)} more held out, {evaluated}" if heldout else "; none held out"
    return "\n".join([
        f"target   {data.manifest.target.name}: {data.manifest.target.num_hidden_layers} layers, hidden "
        f"{data.manifest.target.hidden_size}, features of layers {data.manifest.features.layer_ids}",
        f"data     {run.data_path}: {len(plan.entries)} samples, {sum(e.tokens for e in plan.entries)} tokens, "
        f"{sum(e.anchors for e in plan.entries)} valid anchors{aside}",
        f"drafter  {data.drafter.num_hidden_layers} layers, block {data.drafter.block_size}, mask token "
        f"{data.drafter.mask_token_id}: {count / 1e6:.1f} M parameters ({counts['layer'] / 1e6:.1f} M a layer, fc "
        f"{counts['fc'] / 1e6:.1f} M)",
        f"loss     {run.loss.credit}, alpha {run.loss.alpha:g}, up to {run.loss.max_anchors} anchors a sequence, "
        f"normalisation {run.loss.normalisation}",
        f"steps    {steps} of {run.optim.global_batch} sequences = {runtime.world} ranks x "
        f"{passes.per_step} micro-batches x {run.optim.micro_batch} {rows}{dropped}",
        f"reading  {len(data.manifest.shards)} shards of {data.reader.source}; {workers} processes a rank read ahead {ahead} "
        f"micro-batches each of at most {dataset.largest_bytes / 2**20:.1f} MiB, a step holds "
        f"{passes.per_step}; padding {passes.padding.share:.1%} of the positions ({passes.padding.waiting_share:.1%} with "
        f"ranks that wait for the longest row); a damaged sample: {run.data.on_error}",
        f"memory   per rank under ZeRO-{stage}: {state}{f' ({offload})' if offload != 'none' else ''}; frozen embedding and "
        f"head {tables * runtime.dtype.itemsize / 2**20:.0f} MiB; activations and logits come on top",
        f"storage  dataset {sum(s.bytes for s in data.manifest.shards) / 2**20:.0f} MiB; a checkpoint "
        f"{count * (12 + runtime.dtype.itemsize * (stage < 3)) / 2**20:.0f} MiB, {kept} of them at most",
        f"compute  {runtime.precision} on {runtime.device.type}",
    ])


def clear_results(run: RunConfig, runtime: Runtime) -> None:
    """A start at step 0 keeps what an earlier run left, under another name."""
    if runtime.rank == 0:
        for name in ("checkpoints", "metrics.jsonl", "heldout.jsonl", "tensorboard"):
            if moved := checkpoint.move_aside(run.out / name):
                runtime.say(f"{run.out / name} of an earlier run moved to {moved} (use --resume auto to continue a run)")


def train(args: argparse.Namespace) -> int:
    run = load_run(args.run, args.overrides)
    data = open_dataset(run)
    kept, heldout = split(data.entries, run.evaluation.share)
    plan = StepPlan(kept, run.seed, run.optim.epochs, run.optim.global_batch)
    folder = run.out / "checkpoints"
    tag = checkpoint.resolve_resume(folder, args.resume) if args.resume else None
    runtime = start(run.precision)
    from pipeline.engine import resolve_ds_config
    from pipeline.stop import StopRequest
    from pipeline.trainer import Progress

    passes = Passes(plan, runtime.world, run.optim.micro_batch, run.data.pack_tokens)
    dataset = StepDataset(data.reader, passes, rank=runtime.rank, max_anchors=run.loss.max_anchors,
                          block_size=data.drafter.block_size, mask_token_id=data.drafter.mask_token_id)
    ds_config = resolve_ds_config(args.ds_config, run, runtime, passes.per_step)
    runtime.say(describe(run, data, dataset, heldout, ds_config, runtime))
    if args.dry_run:
        runtime.say(json.dumps(run.model_dump(mode="json"), indent=2))
        return 0
    steps, known = total_steps(run, plan), versions()

    def marker_of(progress: Progress, number: float | None) -> checkpoint.Marker:
        return checkpoint.Marker(
            progress.done, steps, run.model_dump(mode="json"), data.drafter.to_public(runtime.dtype), data.manifest.sha256(),
            runtime.world, known, skipped=progress.skipped, skipped_in_row=progress.skipped_in_row,
            evaluated=progress.evaluated, heldout=number,
            template={"sha256": data.manifest.template_sha256, "args": data.manifest.template_args})

    for broken, why in checkpoint.flaws(folder).items():
        runtime.say(f"{folder / broken} {why} and is not used")
    progress = Progress()
    if tag:
        marker = checkpoint.read_marker(folder, tag)
        for change in checkpoint.check_marker(marker, marker_of(progress, None), override=args.override,
                                              where=str(folder / tag)):
            runtime.say(f"--override: {change}")
        evaluated = marker.evaluated or not (heldout and run.evaluation.every)
        progress = Progress(marker.step, marker.skipped, marker.skipped_in_row, evaluated)
        if progress.done >= steps and progress.evaluated:
            runtime.say(f"{folder / tag} holds all {steps} steps: nothing to do")
            return 0
    with StopRequest(run.out, runtime).installed() as stop:
        trainer = build(run, data, dataset, heldout, ds_config, runtime, stop, marker_of)
        trainer.progress = progress
        runtime.say(f"sharded  rank 0 holds {measured(trainer.engine)}")
        if tag:
            resume(trainer, folder, tag, runtime)
        else:
            runtime.say("starting from step 0" + (f" (no complete checkpoint in {folder})" if args.resume else ""))
            clear_results(run, runtime)
            if runtime.rank == 0:
                initial_drafter(run, data).save_pretrained(folder / checkpoint.UNTRAINED)
        return trainer.train()


def resume(trainer, folder: Path, tag: str, runtime: Runtime) -> None:
    """Loads `tag`; complete checkpoints of later steps are moved aside."""
    from pipeline.engine import set_hyperparameters

    saved_ranks = checkpoint.read_marker(folder, tag).world
    checkpoint.load(trainer.engine, folder, tag, runtime)
    set_hyperparameters(trainer.engine, trainer.run.optim)
    ranks = "" if saved_ranks == runtime.world else f", saved by {saved_ranks} ranks and shared out to {runtime.world}"
    runtime.say(f"resuming from {folder / tag}: step {trainer.progress.done} of {trainer.total_steps}{ranks}")
    if runtime.rank == 0:
        if aside := checkpoint.set_newer_aside(folder, tag):
            runtime.say(f"newer checkpoints moved to {aside}")


def main() -> int:
    args = parse()
    try:
        return train(args)
    except UserError as error:
        return fail(error)


if __name__ == "__main__":
    sys.exit(main())
