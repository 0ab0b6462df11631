"""Checkpoints: one folder per tag under RUN/checkpoints, one file per rank, complete or invisible.

    checkpoints/step000150/   DeepSpeed's sharded files, written by all ranks
    checkpoints/step000150/complete.json   written last, after all ranks agreed: step, configuration, manifest, versions
    checkpoints/latest        the newest complete tag

A tag without `complete.json` does not exist for any reader. Pruning removes complete tags oldest first and never the
last one. Nothing of the frozen target is in here: embedding and head are no parameters of the drafter.
"""
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from data_prep.errors import UserError
from data_prep.files import write_atomic
from pipeline.runtime import Runtime, versions

MARKER = "complete.json"
LATEST = "latest"
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


def tag_of(step: int) -> str:
    return f"step{step:06d}"


def complete_tags(folder: Path) -> list[str]:
    """Tags that can be loaded, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((p.name for p in folder.iterdir() if _TAG.fullmatch(p.name) and (p / MARKER).is_file()),
                  key=lambda tag: int(tag.removeprefix("step")))


def read_marker(folder: Path, tag: str) -> Marker:
    return Marker(**json.loads((folder / tag / MARKER).read_text()))


def resolve_resume(folder: Path, resume: str) -> str | None:
    """The tag to load: `auto` takes the newest complete one, or None where there is none; a name must exist."""
    tags = complete_tags(folder)
    if resume == "auto":
        return tags[-1] if tags else None
    if resume in tags:
        return resume
    state = "is incomplete (it has no complete.json)" if (folder / resume).is_dir() else "does not exist"
    raise UserError(f"--resume {resume}: {folder / resume} {state}; complete checkpoints there: {', '.join(tags) or 'none'}. "
                    "Name one of them, or use `--resume auto`")


def incomplete_tags(folder: Path) -> list[str]:
    complete = set(complete_tags(folder))
    return sorted(p.name for p in folder.glob("step*") if p.is_dir() and p.name not in complete) if folder.is_dir() else []


def save(engine, folder: Path, marker: Marker, keep: int, runtime: Runtime) -> Path:
    """Called by every rank. The tag becomes visible only after all of them have written their part."""
    tag = tag_of(marker.step)
    if runtime.rank == 0 and (folder / tag).exists():
        shutil.rmtree(folder / tag)  # a rest of an interrupted save, perhaps of another number of ranks
    dist.barrier()
    engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    dist.barrier()
    if runtime.rank == 0:
        _sync_files(folder / tag)
        write_atomic(folder / tag / MARKER, json.dumps(asdict(marker), indent=2).encode())
        write_atomic(folder / LATEST, tag.encode())
        for old in complete_tags(folder)[:-keep]:
            (folder / old / MARKER).unlink()  # invisible first, so that an interrupted removal leaves nothing half
            shutil.rmtree(folder / old)
    dist.barrier()
    return folder / tag


def _sync_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def load(engine, folder: Path, tag: str, runtime: Runtime) -> None:
    """Restores weights and optimizer state into `engine`; the marker must have been checked with `check_marker`."""
    path, _ = engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)
    if path is None:
        raise UserError(f"DeepSpeed found nothing to load in {folder / tag} although it is marked complete; resume from an "
                        f"earlier tag ({', '.join(complete_tags(folder))})")


def check_marker(marker: Marker, *, drafter: dict, manifest_sha256: str, run: dict, world: int, where: str) -> None:
    """A resumed run must be the run that was stopped: same data, drafter, loss, batches and seed."""
    differences = []
    if marker.manifest_sha256 != manifest_sha256:
        differences.append(f"dataset manifest {marker.manifest_sha256[:16]}... became {manifest_sha256[:16]}...")
    for name in sorted(drafter.keys() | marker.drafter.keys()):
        if drafter.get(name) != marker.drafter.get(name):
            differences.append(f"drafter {name} {marker.drafter.get(name)} became {drafter.get(name)}")
    for section in ("seed", "precision", "drafter", "loss", "optim"):
        if run[section] != marker.run[section]:
            differences.append(f"{section} {marker.run[section]} became {run[section]}")
    if differences:
        raise UserError(f"{where} belongs to another run: {'; '.join(differences)}. Give the old values, or start a new run "
                        "with another `out=`")
    if marker.world != world:
        raise UserError(f"{where} was saved by {marker.world} ranks and this run has {world}: ZeRO's files are one per rank; "
                        f"start with {marker.world} ranks (`deepspeed --num_gpus {marker.world}`, on a CPU "
                        f"`--num_accelerators {marker.world}`)")


def move_aside(path: Path) -> Path | None:
    """Renames an existing file or folder to the first free PATH.N, so that a fresh start loses nothing."""
    if not path.exists():
        return None
    number = 1
    while (moved := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(moved)
    return moved
