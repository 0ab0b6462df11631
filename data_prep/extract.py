"""Hidden states of the frozen target over prompt + response, written as shards: resumable at any point.

    python -m data_prep extract --target TARGET --responses responses.jsonl --out dataset/

Cost: one forward pass of the target, its head only at supervised positions, and 2 * F * D + 5 bytes a token on the
disk. The manifest is written before the first shard. A shard is computed into a file of the process's own, fsynced and
linked to its final name, and a record is put beside it; the last step seals the manifest. Killed anywhere, the same
command keeps finished shards and redoes the rest; a second process of the same task does no harm.
"""

import sys
from pathlib import Path
from typing import Any

from .compute import compute_shards
from .errors import UserError
from .estimate import check_room
from .features import FeatureTaps
from .files import create_atomic, remove_unfinished
from .manifest import MANIFEST_NAME, Features, Manifest, Responses, differences
from .merge import merge
from .model import dtype_name, load_model
from .plan import Batches, make_plan
from .recipe import Recipe
from .records import SUFFIX, Record, finished, read_record, scan_shard, write_record
from .responses import read_meta
from .shards import sample_bytes, shard_name
from .target import check_layer_ids, feature_layer_ids, mask_token_id, stop_token_ids, target_facts, tokenizer_sha256
from .tokens import check_template_args, load_tokenizer, template_sha256

LOW_AGREEMENT = 0.9  # greedy responses of this very target agree with its argmax almost everywhere


def prepare(target: Path, responses: Path, recipe: Recipe) -> tuple[Manifest, Batches]:
    """The manifest before its first shard, and the plan. UserError where the responses do not belong to the target.

    Layer ids default to the 5 of the public recipe (fewer for targets of less than 8 layers).
    """
    if not responses.is_file():
        raise UserError(f"there is no responses file {responses}; make it with `python -m data_prep respond`.")
    tokenizer = load_tokenizer(target)
    facts = target_facts(target, dtype_name(recipe.torch_dtype()))
    layers, rows = facts["num_hidden_layers"], facts["vocab_size"]
    ids = recipe.layer_ids or feature_layer_ids(layers, min(5, max(layers - 3, 1)))
    check_layer_ids(ids, layers)
    meta = read_meta(responses)
    made_with = {
        "target": {name: value for name, value in facts.items() if name != "dtype"},  # the serving dtype is free
        "tokenizer_sha256": tokenizer_sha256(target),
        "template_sha256": template_sha256(tokenizer),
    }
    changed = differences(meta, made_with)
    if changed:
        raise UserError(
            f"{responses} was not written by the target {target} ({'; '.join(changed)}); pass the target that wrote "
            "it, or regenerate the responses."
        )
    check_template_args(tokenizer, meta["template_args"])
    stops = stop_token_ids(target, tokenizer)
    mask = mask_token_id(tokenizer, rows, recipe.mask_token_id, stop_ids=stops)
    shared = {
        "mask_token_id": mask,
        "max_length": recipe.max_length,
        "shard_bytes": recipe.shard_bytes,
        "batch_tokens": recipe.batch_tokens,
        "storage": recipe.storage,
        "drop": recipe.drop,
    }
    batches = make_plan(
        responses,
        tokenizer,
        meta["template_args"],
        vocab_rows=rows,
        hidden_size=facts["hidden_size"],
        features=len(ids),
        stop_ids=stops,
        last_hidden=recipe.last_hidden,
        **shared,
    )
    manifest = Manifest(
        target=facts,
        features=Features(layer_ids=ids, last_state="post_norm" if recipe.last_hidden else None),
        tokenizer_sha256=made_with["tokenizer_sha256"],
        template_sha256=made_with["template_sha256"],
        template_args=meta["template_args"],
        stop_token_ids=stops,
        source_sha256=batches.source_sha256,
        responses=Responses(generator=meta["generator"], sampling=meta["sampling"], from_text=batches.from_text),
        plan=batches.plan(),
        dropped=dict(batches.dropped),
        **shared,
    )
    mask_text = tokenizer.convert_ids_to_tokens(mask) or "a row past the tokenizer"
    print(
        f"layers {','.join(map(str, ids))} of {layers}; mask token {mask} ({mask_text}); "
        f"{manifest.plan.samples} samples, {manifest.plan.tokens} tokens, {manifest.plan.shards} shards; "
        f"{batches.cut} cut to {recipe.max_length} tokens; padding {batches.padding():.1%}"
    )
    if batches.from_text:
        print(f"{batches.from_text} responses are tokenised text, not ids that the target emitted")
    for reason, count in batches.dropped.items():
        print(f"dropped {count}: {reason}")
    return manifest, batches


def open_dataset(out: Path, fresh: Manifest, batches: Batches, numbers: range) -> Manifest:
    """The manifest to carry on from: `fresh`, written, for a new folder, else the folder's own if it is the same
    dataset.

    Files that dead processes left of the shards `numbers` are removed, and records that they did not write are made.
    UserError for other settings and for shards that this dataset did not make.
    """
    shards = sorted(path.name for path in out.glob("*.tar"))
    if shards and not (out / MANIFEST_NAME).is_file():
        raise UserError(
            f"{out} holds {shards[0]} but no {MANIFEST_NAME}: foreign shards would mix; choose an empty --out."
        )
    if not (out / MANIFEST_NAME).is_file():
        create_atomic(out / MANIFEST_NAME, fresh.encode())  # of tasks that start together one writes it
    manifest = Manifest.read(out)
    changed = manifest.differences(fresh.identity())
    if changed:
        raise UserError(
            f"{out} was made with other settings ({'; '.join(changed)}); repeat those settings to carry on, or choose "
            "another --out."
        )
    foreign = sorted(set(shards) - {shard_name(n) for n in range(manifest.plan.shards)})
    if foreign:
        raise UserError(
            f"{out} holds {foreign[0]}, which is not in its manifest: a foreign shard; remove it or choose another --out."
        )
    if manifest.sealed:
        _check_whole(out, manifest)
        return manifest
    for number in numbers:
        name = shard_name(number)
        remove_unfinished(out, name)
        remove_unfinished(out, name + SUFFIX)
        if name in shards:
            known = read_record(out, name)
            record = known or scan_shard(out / name)
            _check_planned(record, batches, number, out)
            if not known:
                write_record(out, record)
    return manifest


def _check_whole(out: Path, manifest: Manifest) -> None:
    """UserError unless every shard of a sealed dataset is there in its full length."""
    for shard in manifest.shards:
        path = out / shard.name
        size = path.stat().st_size if path.is_file() else None
        if size != shard.bytes:
            found = "is missing" if size is None else f"has {size} bytes, expected {shard.bytes}"
            raise UserError(f"{path} {found}; restore it or start in an empty folder.")


def _check_planned(record: Record, batches: Batches, number: int, out: Path) -> None:
    """UserError unless the shard holds the planned samples."""
    planned = [(sample.key, sample.tokens) for batch in batches.shards[number] for sample in batch]
    if [(row.key, row.tokens) for row in record.samples] != planned:
        raise UserError(
            f"{out / record.shard.name} does not hold the samples that the plan puts there: a foreign shard; remove it or "
            "choose another --out."
        )


def extract(
    target: Path,
    responses: Path,
    out: Path,
    *,
    device_map: str | dict[str, Any] | None = None,
    force: bool = False,
    num_tasks: int = 1,
    task_id: int = 0,
    **recipe: Any,
) -> Manifest:
    """Make the dataset `out`, or carry on with it, and return its manifest. A finished one is left untouched.

    `recipe`: fields of Recipe. Of several tasks this one makes the shards task_id, task_id + num_tasks, ..., and `merge`
    seals the dataset when all are there; a single task seals it itself. UserError as the parts say, and without room on
    the disk unless `force`; a share of supervised tokens equal to the target's argmax below 0.9 is warned about on
    stderr for greedy responses.
    """
    if not 0 <= task_id < num_tasks:
        raise UserError(f"--task-id {task_id} of --num-tasks {num_tasks}: ids run from 0 to {num_tasks - 1}.")
    settings = Recipe(**recipe)
    fresh, batches = prepare(target, responses, settings)
    out.mkdir(parents=True, exist_ok=True)
    numbers = range(task_id, fresh.plan.shards, num_tasks)
    manifest = open_dataset(out, fresh, batches, numbers)
    if manifest.sealed:
        merge(out)  # a process that died after sealing has left its records
        print(f"{out} is finished: {manifest.plan.shards} shards, 0 samples computed")
        _report(manifest, finished(out, manifest))
        return manifest
    todo = [number for number in numbers if not (out / shard_name(number)).exists()]
    if todo:
        layout = (len(manifest.features.layer_ids), manifest.target.hidden_size, settings.storage, settings.last_hidden)
        samples = (sample for number in todo for batch in batches.shards[number] for sample in batch)
        check_room(out, sum(sample_bytes(sample.tokens, *layout) for sample in samples), force)
        model = load_model(target, settings.torch_dtype(), device_map)
        taps = FeatureTaps(model, manifest.features.layer_ids, settings.storage, settings.last_hidden)
        compute_shards(taps, responses, out, manifest, batches, numbers)
    if num_tasks == 1:
        manifest = merge(out)
        _report(manifest, finished(out, manifest))
    else:
        print(
            f"task {task_id} of {num_tasks}: its {len(numbers)} shards of {manifest.plan.shards} are there; when those of "
            f"all tasks are: python -m data_prep merge {out}"
        )
        _report(manifest, [record for number in numbers if (record := read_record(out, shard_name(number)))])
    return manifest


def _report(manifest: Manifest, records: list[Record]) -> None:
    """Print what the states and tokens of the finished shards are worth."""
    shards = [record.shard for record in records]
    if not shards:
        return
    if manifest.storage == "fp8":
        tokens = sum(shard.tokens for shard in shards)
        for feature, layer in enumerate(manifest.features.layer_ids):
            error = sum(shard.fp8_error[feature] * shard.tokens for shard in shards) / tokens
            print(f"fp8 relative error of layer {layer}: {error:.2%}")
    share = sum(shard.argmax_matches for shard in shards) / sum(shard.supervised for shard in shards)
    print(f"supervised tokens equal to the target's argmax: {share:.2%}")
    if share < LOW_AGREEMENT and manifest.responses.sampling is None:
        print(
            f"warning: only {share:.1%} of the supervised tokens are what the target itself would emit (greedy responses "
            f"of this target: above {LOW_AGREEMENT:.0%}); regenerate them with `python -m data_prep respond`.",
            file=sys.stderr,
        )
