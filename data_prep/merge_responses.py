"""The responses of several tasks become one file.

    python -m data_prep merge responses.jsonl

Conversations keep the order task 0, task 1, ...; it does not depend on which task ended first, and neither does the
dataset that is made from it. The tasks' files stay; merging again writes the same file.
"""

import json
import os
import re
import shutil
from pathlib import Path

from .errors import UserError
from .files import open_locked, sync_folder, unfinished_path, write_atomic
from .manifest import differences
from .responses import BATCHING, FINISHED, check_meta, meta_path, read_meta, share_path


def merge_responses(out: Path) -> int:
    """Writes `out` and its settings from the files of all tasks; returns its lines. UserError names the tasks that are
    missing, unfinished or made with other settings.
    """
    found = [match for path in out.parent.glob(f"{out.name}.task-*") if (match := re.search(r"-of-(\d+)$", path.name))]
    counts = sorted({int(match[1]) for match in found})
    if len(counts) != 1:
        raise UserError(
            f"{out} has files of {' and of '.join(map(str, counts))} tasks beside it: which ones count is ambiguous; "
            "remove the others."
            if counts
            else f"{out} is no dataset folder and has no files of tasks beside it (NAME.task-I-of-N, made by `python "
            "-m data_prep respond --num-tasks N --task-id I`)."
        )
    (tasks,) = counts
    shares = [share_path(out, task, tasks) for task in range(tasks)]
    missing = [share.name for share in shares if not share.is_file() or FINISHED not in read_meta(share)]
    if missing:
        raise UserError(
            f"{len(missing)} of {tasks} tasks are missing or unfinished ({', '.join(missing[:8])}"
            f"{', ...' if len(missing) > 8 else ''}); run the respond command of their --task-id again, then merge."
        )
    metas = [read_meta(share) for share in shares]
    lines = sum(meta.pop(FINISHED) for meta in metas)
    # tasks on other machines may have other batches; nothing else may differ
    for share, meta in zip(shares, metas):
        changed = differences(meta, {name: value for name, value in metas[0].items() if name not in BATCHING})
        if changed:
            raise UserError(f"{share} was made with other settings ({'; '.join(changed)}); answer its share again.")
    check_meta(out, {name: value for name, value in metas[0].items() if name not in BATCHING})
    write_atomic(meta_path(out), (json.dumps(metas[0], indent=2) + "\n").encode())
    temporary = unfinished_path(out)
    with open_locked(temporary) as file:
        for share in shares:
            with open(share, "rb") as part:
                shutil.copyfileobj(part, file, 2**24)
        file.flush()
        os.fsync(file.fileno())
        os.replace(temporary, out)
    sync_folder(out.parent)
    return lines
