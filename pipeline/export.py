"""A sharded checkpoint becomes a drafter folder that vLLM, SGLang and z-lab's package load (spec 6).

The weights come from the checkpoint's float32 master copies. The folder appears under its name only when it has been
written, read back and found equal, with exactly the tensors of the format.
"""
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from data_prep.errors import UserError
from pipeline import checkpoint
from pipeline.drafter import DFlashDrafter, check_tensors
from pipeline.drafter_config import DrafterConfig
from pipeline.runtime import versions

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def find_checkpoint(path: Path) -> tuple[Path, str]:
    """(folder, tag) of `path`: a complete checkpoint, or a folder of them, whose newest is taken."""
    if (path / checkpoint.MARKER).is_file():
        return path.parent, path.name
    tags = checkpoint.complete_tags(path)
    if not tags:
        raise UserError(f"{path} is no complete checkpoint (it has no {checkpoint.MARKER}) and holds none; pass "
                        "RUN/checkpoints or RUN/checkpoints/stepNNNNNN")
    return path, tags[-1]


def drafter_of(folder: Path, tag: str, untrained: bool = False) -> DFlashDrafter:
    """The drafter of a checkpoint in float32; `untrained`: as it was before the first step."""
    if untrained:
        return DFlashDrafter.from_pretrained(folder / checkpoint.UNTRAINED)
    marker = checkpoint.read_marker(folder, tag)
    drafter = DFlashDrafter(DrafterConfig.from_public(marker.drafter, str(folder / tag / checkpoint.MARKER)))
    state = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=tag)
    check_tensors({name: tuple(p.shape) for name, p in drafter.named_parameters()},
                  {name: tuple(t.shape) for name, t in state.items()}, str(folder / tag))
    drafter.load_state_dict(state)
    return drafter


def export(path: Path, out: Path, dtype: str | None = None, untrained: bool = False) -> Path:
    """Writes the drafter of checkpoint `path` to the new folder `out`; returns the checkpoint that was taken.

    dtype: float32 or bfloat16, by default what the run computed in. UserError where `out` exists, a weight is not
    finite, or what was written does not read back equal.
    """
    if out.exists():
        raise UserError(f"{out} exists already and is not overwritten; remove it or choose another folder")
    folder, tag = find_checkpoint(path)
    marker = checkpoint.read_marker(folder, tag)
    drafter = drafter_of(folder, tag, untrained).to(DTYPES[dtype or marker.drafter["dtype"]])
    if broken := [name for name, p in drafter.named_parameters() if not torch.isfinite(p).all()]:
        raise UserError(f"{folder / tag}: {', '.join(broken)} hold values that are not finite; export an earlier checkpoint")
    partial = out.with_name(out.name + ".tmp")
    if partial.exists():
        shutil.rmtree(partial)  # of an interrupted export
    drafter.save_pretrained(partial)
    step = 0 if untrained else marker.step
    (partial / "training.json").write_text(json.dumps(
        {**asdict(marker), "step": step, "exported_with": versions()}, indent=2) + "\n")
    again = DFlashDrafter.from_pretrained(partial, dtype=next(drafter.parameters()).dtype)
    for (name, ours), (_, theirs) in zip(drafter.named_parameters(), again.named_parameters(), strict=True):
        if not torch.equal(ours, theirs):
            raise UserError(f"{partial}: {name} reads back different from what was written; check the disk, export again")
    partial.rename(out)
    return folder / tag
