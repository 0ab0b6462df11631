"""Checkpoints: one folder per tag under RUN/checkpoints, one file per rank, complete or invisible.

    checkpoints/step000150/   DeepSpeed's sharded files, written by all ranks
    checkpoints/step000150/complete.json   written last, after all ranks agreed: step, configuration, manifest, versions
    checkpoints/latest        the newest complete tag
    checkpoints/best          the tag with the best held-out number

A tag without `complete.json`, or whose files do not have the sizes that are written there, is never loaded. Pruning keeps
the newest `checkpoint.keep`, those of every `checkpoint.keep_every` steps and the best; the last one always stays. Nothing
of the frozen target is in here: embedding and head are no parameters of the drafter. Any number of ranks can load what any
other has saved.
"""
import json
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from data_prep.errors import UserError
from data_prep.files import write_atomic
from data_prep.manifest import flatten
from pipeline.config import FREE_ON_RESUME, CheckpointSection
from pipeline.repartition import load_repartitioned
from pipeline.runtime import Runtime

MARKER = "complete.json"
LATEST = "latest"
BEST = "best"
UNTRAINED = "untrained"  # beside the tags: the drafter before its first step, in the public format
_TAG = re.compile(r"step\d{6,}")


@dataclass(frozen=True)
class Marker:
    """What a complete checkpoint says of itself. `step` optimizer steps are done; the next one continues the stream of
    samples, anchors and learning rates, which are functions of the step number."""

    step: int
    total_steps: int
    run: dict
    drafter: dict  # the exported config.json
    manifest_sha256: str
    world: int
    versions: dict
    files: dict = field(default_factory=dict)  # name -> bytes of what the ranks wrote
    skipped: int = 0  # steps so far whose loss or gradient was not finite
    skipped_in_row: int = 0
    evaluated: bool = True  # False: the held-out evaluation due at this step was cut short
    heldout: float | None = None  # the held-out number of this step, if it was taken: the higher the better
    template: dict = field(default_factory=dict)  # chat template of the training data: sha256 and args


def tag_of(step: int) -> str:
    return f"step{step:06d}"


def complete_tags(folder: Path) -> list[str]:
    """Tags that can be loaded, oldest first."""
    return [tag for tag in _tags(folder) if not flaw(folder, tag)]


def _tags(folder: Path) -> list[str]:
    names = [p.name for p in folder.iterdir() if _TAG.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(names, key=lambda tag: int(tag.removeprefix("step")))


def flaw(folder: Path, tag: str) -> str | None:
    """Why a tag cannot be loaded; None where it can."""
    if not (folder / tag / MARKER).is_file():
        return f"is incomplete (it has no {MARKER}: a save was interrupted)"
    for name, expected in read_marker(folder, tag).files.items():
        path = folder / tag / name
        found = path.stat().st_size if path.is_file() else 0
        if found != expected:
            return f"is damaged ({name} has {found} bytes instead of {expected})"
    return None


def flaws(folder: Path) -> dict[str, str]:
    return {tag: found for tag in _tags(folder) if (found := flaw(folder, tag))}


def read_marker(folder: Path, tag: str) -> Marker:
    return Marker(**json.loads((folder / tag / MARKER).read_text()))


def resolve_resume(folder: Path, resume: str) -> str | None:
    """The tag to load: `auto` takes the newest complete one, or None where there is none; a name must exist."""
    tags = complete_tags(folder)
    if resume == "auto":
        return tags[-1] if tags else None
    if resume in tags:
        return resume
    state = flaw(folder, resume) if (folder / resume).is_dir() else "does not exist"
    raise UserError(f"--resume {resume}: {folder / resume} {state}; complete checkpoints there: {', '.join(tags) or 'none'}. "
                    "Name one of them, or use `--resume auto`")


def best_tag(folder: Path) -> str | None:
    """The complete tag with the highest held-out number, the earliest of equals; None where no tag has one."""
    numbers = {tag: read_marker(folder, tag).heldout for tag in complete_tags(folder)}
    known = [tag for tag, number in numbers.items() if number is not None]
    return max(known, key=numbers.get, default=None)


def save(engine, folder: Path, marker: Marker, section: CheckpointSection, runtime: Runtime) -> Path:
    """Called by every rank. The tag becomes visible only after all of them have written their part."""
    tag = tag_of(marker.step)
    if runtime.rank == 0 and (folder / tag).exists():
        shutil.rmtree(folder / tag)  # a rest of an interrupted save, perhaps of another number of ranks
    dist.barrier()
    engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    dist.barrier()
    if runtime.rank == 0:
        _sync_files(folder / tag)
        files = {path.name: path.stat().st_size for path in sorted((folder / tag).iterdir()) if path.is_file()}
        _write_marker(folder, replace(marker, files=files))
        write_atomic(folder / LATEST, tag.encode())
        best = best_tag(folder)
        if best:
            write_atomic(folder / BEST, best.encode())
        for old in _superfluous(complete_tags(folder), best, section):
            (folder / old / MARKER).unlink()  # invisible first, so that an interrupted removal leaves nothing half
            shutil.rmtree(folder / old)
    dist.barrier()
    return folder / tag


def is_best(folder: Path, number: float, runtime: Runtime) -> bool:
    """Whether `number` beats every checkpoint's; what rank 0 sees counts for all."""
    better = False
    if runtime.rank == 0:
        best = best_tag(folder)
        better = best is None or number > read_marker(folder, best).heldout
    return bool(runtime.sum(torch.tensor(float(better), dtype=torch.float64, device=runtime.device)) > 0)


def amend(folder: Path, marker: Marker, runtime: Runtime) -> None:
    """Adds the held-out number to a checkpoint that was saved before it was known."""
    if runtime.rank == 0:
        tag = tag_of(marker.step)
        saved = read_marker(folder, tag)
        _write_marker(folder, replace(saved, evaluated=marker.evaluated, heldout=marker.heldout))
        write_atomic(folder / BEST, best_tag(folder).encode())
    dist.barrier()


def _write_marker(folder: Path, marker: Marker) -> None:
    write_atomic(folder / tag_of(marker.step) / MARKER, json.dumps(asdict(marker), indent=2).encode())


def _superfluous(tags: list[str], best: str | None, section: CheckpointSection) -> list[str]:
    """Of complete tags, oldest first, those that pruning removes."""
    return [tag for tag in tags[:-section.keep] if tag != best
            and not (section.keep_every and int(tag.removeprefix("step")) % section.keep_every == 0)]


def _sync_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def load(engine, folder: Path, tag: str, runtime: Runtime) -> None:
    """Restores weights and optimizer state into `engine`; the marker must have been checked with `check_marker`."""
    saved_ranks = read_marker(folder, tag).world
    if saved_ranks != runtime.world:
        load_repartitioned(engine, folder / tag, saved_ranks, runtime.rank, runtime.world)
        return
    path, _ = engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)
    if path is None:
        raise UserError(f"DeepSpeed found nothing to load in {folder / tag} although it is marked complete; resume from an "
                        f"earlier tag ({', '.join(complete_tags(folder))})")


def identity(marker: Marker) -> dict[str, object]:
    """Everything that decides the numbers of a run, by the names of its keys: a resumed run must not change them.

    `data.manifest` is the dataset's hash; `target.*` are dimensions the drafter has from its target. Which number of
    ranks and of sequences per pass is not among them: they change the order of additions only.
    """
    dimensions = flatten({"target": {k: v for k, v in marker.drafter.items() if k != "dtype"}})
    run = {name: value for name, value in flatten(marker.run).items() if name not in FREE_ON_RESUME}
    own = {f"drafter.{name}": dimensions.pop(f"target.dflash_config.{name}") for name in ("mask_token_id", "target_layer_ids")}
    for name in ("target.block_size", "target.dflash_config.block_size", "target.num_hidden_layers",
                 "target.max_window_layers", "target.layer_types"):
        dimensions.pop(name)  # of the drafter: block_size and num_layers say the same
    return {"data.manifest": marker.manifest_sha256, **dimensions, **run, **own}


# What the tensors' shapes depend on: no resume can change it.
_SHAPES = ("drafter.num_layers", "target.")


def check_marker(saved: Marker, now: Marker, *, override: Collection[str], where: str) -> list[str]:
    """A resumed run must be the run that was stopped. Returns the differences that `override` allows, in words;
    UserError names the others, and any name in `override` that no run has."""
    before, after = identity(saved), identity(now)
    names = sorted(before.keys() | after.keys())
    if unknown := sorted(set(override) - set(names)):
        raise UserError(f"--override {', '.join(unknown)}: a resume compares no such key; it compares {', '.join(names)}")
    differences = {name: f"{name} {before.get(name)} became {after.get(name)}" for name in names
                   if before.get(name) != after.get(name)}
    refused = [name for name in differences if name not in override or name.startswith(_SHAPES)]
    if refused:
        fixed = [name for name in refused if name.startswith(_SHAPES)]
        remedy = (f"{', '.join(fixed)} decide the shapes of the weights and cannot change" if fixed else
                  f"add {' '.join(f'--override {name}' for name in refused)} where you mean it")
        raise UserError(f"{where} belongs to another run: {'; '.join(differences[name] for name in refused)}. Give the old "
                        f"values, or start a new run with another `out=`; {remedy}")
    return list(differences.values())


def set_newer_aside(folder: Path, tag: str) -> Path | None:
    """Moves complete tags behind `tag` to the first free FOLDER.N: a run that goes back to `tag` makes its own, and a
    later `--resume auto` must not find those of the road not taken."""
    tags = complete_tags(folder)
    newer = tags[tags.index(tag) + 1:]
    if not newer:
        return None
    aside = free_name(folder)
    aside.mkdir()
    for name in newer:
        (folder / name).rename(aside / name)
    write_atomic(folder / LATEST, tag.encode())
    return aside


def free_name(path: Path) -> Path:
    """The first PATH.N that does not exist."""
    number = 1
    while (free := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return free


def move_aside(path: Path) -> Path | None:
    """Renames an existing file or folder to the first free PATH.N, so that a fresh start loses nothing."""
    return path.rename(free_name(path)) if path.exists() else None
