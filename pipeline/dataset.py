"""The dataset a run trains on, compared with the target and the run file before anything is built."""
import tempfile
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import UserError
from data_prep.manifest import INDEX_NAME, MANIFEST_NAME, Manifest, SampleEntry, read_index
from data_prep.target import config_sha256, read_config, tokenizer_sha256
from data_prep.tokens import load_tokenizer, template_sha256
from pipeline.config import RunConfig
from pipeline.drafter_config import DrafterConfig
from pipeline.reader import SampleReader
from pipeline.sources import CachedSource, LocalFolder, Source, open_source


@dataclass(frozen=True)
class TrainingData:
    manifest: Manifest
    entries: list[SampleEntry]
    drafter: DrafterConfig
    reader: SampleReader


def open_dataset(run: RunConfig) -> TrainingData:
    """Manifest, index and the drafter's dimensions. UserError lists every field in which dataset, target and run file
    disagree, or the command that makes what is missing."""
    source = open_source(run.data_path)
    if source.sizes([MANIFEST_NAME]) == [None]:
        raise UserError(f"no dataset in {run.data_path}: make it with `bash launch/quickstart.sh` (the quickstart's) or "
                        f"`python -m data_prep extract --target TARGET --responses FILE --out {run.data_path}` (your own)")
    manifest, entries = _describe(source)
    target = run.target_path
    config = read_config(target)
    differences = [f"{name} is {found} in {target} and {have} in the dataset" for name, found, have in (
        ("config_sha256", config_sha256(target), manifest.target.config_sha256),
        ("tokenizer_sha256", tokenizer_sha256(target), manifest.tokenizer_sha256),
        ("template_sha256", template_sha256(load_tokenizer(target)), manifest.template_sha256)) if found != have]
    layer_ids, mask_id = manifest.features.layer_ids, manifest.mask_token_id
    if run.drafter.target_layer_ids not in (None, layer_ids):
        differences.append(f"target_layer_ids is {run.drafter.target_layer_ids} in the run file and {layer_ids} in the dataset")
    if run.drafter.mask_token_id not in (None, mask_id):
        differences.append(f"mask_token_id is {run.drafter.mask_token_id} in the run file and {mask_id} in the dataset")
    if differences:
        raise UserError(f"dataset {run.data_path} was made from another target or with other settings: "
                        f"{'; '.join(differences)}. Correct target.path or the run file, or extract again")
    drafter = DrafterConfig.for_target(
        config, num_layers=run.drafter.num_layers, block_size=run.drafter.block_size, mask_token_id=mask_id,
        target_layer_ids=layer_ids, vocab_size=manifest.target.vocab_size)
    _check_shards(source, manifest)
    if not isinstance(source, LocalFolder) and run.data.cache_bytes:
        source = CachedSource(source, run.cache_path, manifest.sha256()[:16], run.data.cache_bytes)
    return TrainingData(manifest, entries, drafter, SampleReader(source, manifest, entries))


def _describe(source: Source) -> tuple[Manifest, list[SampleEntry]]:
    """Manifest and index of a sealed dataset, wherever they lie."""
    if isinstance(source, LocalFolder):
        return _read(source.folder)
    with tempfile.TemporaryDirectory() as folder:
        for name in (MANIFEST_NAME, INDEX_NAME):
            (Path(folder) / name).write_bytes(source.read(name))
        return _read(Path(folder))


def _read(folder: Path) -> tuple[Manifest, list[SampleEntry]]:
    manifest = Manifest.read(folder)
    manifest.require_sealed()
    return manifest, read_index(folder, manifest)


def _check_shards(source: Source, manifest: Manifest) -> None:
    """All shards are there and as long as the manifest says, before the first step and not when one is reached."""
    sizes = source.sizes([shard.name for shard in manifest.shards])
    wrong = [f"{shard.name} {'is missing' if size is None else f'has {size} bytes'}, the manifest says {shard.bytes} bytes "
             f"with {shard.samples} samples" for shard, size in zip(manifest.shards, sizes) if size != shard.bytes]
    if wrong:
        raise UserError(f"{source}: {len(wrong)} of {len(sizes)} shards are not whole: {'; '.join(wrong[:10])}; copy them "
                        "again from where the dataset was made")
