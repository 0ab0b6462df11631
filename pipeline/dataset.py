"""The dataset a run trains on, compared with the target and the run file before anything is built."""
from dataclasses import dataclass

from data_prep.errors import UserError
from data_prep.manifest import Manifest, SampleEntry, check_shards, read_index
from data_prep.target import config_sha256, read_config, tokenizer_sha256
from data_prep.tokens import load_tokenizer, template_sha256
from pipeline.config import RunConfig
from pipeline.drafter_config import DrafterConfig


@dataclass(frozen=True)
class TrainingData:
    manifest: Manifest
    entries: list[SampleEntry]
    drafter: DrafterConfig


def open_dataset(run: RunConfig) -> TrainingData:
    """Manifest, index and the drafter's dimensions. UserError lists every field in which dataset, target and run file
    disagree, or the command that makes what is missing."""
    if not (run.data_path / "manifest.json").is_file():
        raise UserError(f"no dataset in {run.data_path}: make it with `bash launch/quickstart.sh` (the quickstart's) or "
                        f"`python -m data_prep extract --target TARGET --responses FILE --out {run.data_path}` (your own)")
    manifest = Manifest.read(run.data_path)
    manifest.require_sealed()
    check_shards(run.data_path, manifest)
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
    return TrainingData(manifest, read_index(run.data_path, manifest), drafter)
