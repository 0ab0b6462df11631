"""Run files, overrides and the DeepSpeed JSON: what is refused, and with which words."""
import json
import re
from pathlib import Path

import pytest
import torch

from data_prep.errors import UserError
from pipeline.config import RunConfig, load_run
from pipeline.engine import resolve_ds_config
from pipeline.runtime import Runtime
from pipeline.schedule import learning_rate

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "launch/runs/quickstart.yaml"
ZERO3 = ROOT / "ds_configs/zero3.json"
ONE_CPU = Runtime(0, 1, 0, torch.device("cpu"), "fp32")


@pytest.mark.parametrize("path", sorted((ROOT / "launch/runs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_run_file_is_valid_and_resolves(path):
    run = load_run(path)
    resolved = resolve_ds_config(ZERO3, run, ONE_CPU, run.optim.global_batch // run.optim.micro_batch)
    assert resolved["train_batch_size"] == run.optim.global_batch


def test_every_key_of_the_quickstart_run_file_has_a_comment_and_none_is_missing():
    text = QUICKSTART.read_text()
    for line in filter(None, text.splitlines()[1:]):
        assert "#" in line or re.fullmatch(r"\w+:", line), f"no comment: {line}"
    import yaml

    def names(tree):
        return {k: names(v) if isinstance(v, dict) else None for k, v in tree.items()}

    assert names(yaml.safe_load(text)) == names(RunConfig(out="x").model_dump())


def test_overrides_reach_nested_keys_with_their_types():
    run = load_run(QUICKSTART, ["optim.lr=1e-4", "out=elsewhere", "drafter.target_layer_ids=[1, 2]", "optim.max_steps=null"])
    assert (run.optim.lr, run.out, run.drafter.target_layer_ids, run.optim.max_steps) == (1e-4, Path("elsewhere"), [1, 2], None)
    assert run.data_path == Path("elsewhere/dataset") and run.target_path == Path("elsewhere/target")
    url = "https://example.org/a/dataset"
    assert load_run(QUICKSTART, [f"data.path={url}"]).data_path == url
    assert load_run(QUICKSTART, ["data.path=/a/dataset"]).data_path == Path("/a/dataset")


@pytest.mark.parametrize("overrides,words", [
    (["optim.learning_rate=1"], ["optim.learning_rate", "Extra inputs are not permitted", "got 1", "pipeline/config.py"]),
    (["loss.alpha=0"], ["loss.alpha", "greater than 0", "got 0"]),
    (["loss.credit=dpase"], ["loss.credit", "dpace_continuation", "dpase"]),
    (["drafter.block_size=1"], ["drafter.block_size", "greater than or equal to 2"]),
    (["loss.credit=decay", "drafter.block_size=12"], ["loss.gamma is needed", "block_size 12"]),
    (["optim.min_lr=1"], ["optim.min_lr 1.0 is above optim.lr"]),
    (["nonsense"], ["no `=`"]),
    (["out.deeper=1"], ["out is a value, not a section"])])
def test_a_wrong_key_or_value_is_refused_by_name(overrides, words):
    with pytest.raises(UserError) as caught:
        load_run(QUICKSTART, overrides)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_missing_run_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist; the ready ones are in launch/runs/"):
        load_run(tmp_path / "none.yaml")


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
def test_every_auto_is_filled_by_its_owner(path):
    config = resolve_ds_config(path, load_run(QUICKSTART), ONE_CPU, 2)
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"],
            config["gradient_clipping"], config["bf16"]["enabled"]) == (4, 2, 2, 1.0, False)
    assert config["optimizer"]["params"]["lr"] == 2e-3 and "auto" not in json.dumps(config)


@pytest.mark.parametrize("change,words", [
    ({"train_batch_size": 8}, ["train_batch_size = 8", "the run says 4", "optim.global_batch", 'write "auto"']),
    ({"gradient_clipping": 0.5}, ["gradient_clipping = 0.5", "the run says 1.0"]),
    ({"bf16": {"enabled": True}}, ["bf16.enabled = True", "the run says False", "precision (fp32 on cpu)"]),
    ({"fp16": {"enabled": True}}, ["enables fp16"]),
    ({"checkpoint": {"writer": {"type": "FAST", "decoupled": True}}}, ["a checkpoint writer of its own", "remove it"]),
    ({"zero_optimization": {"stage": 1}}, ["zero_optimization.stage = 1", "stages 3 and 2"]),
    ({"scheduler": {"type": "WarmupLR"}}, ["has a `scheduler`", "optim.warmup_ratio"]),
    ({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}, ["zero_optimization.reduce_bucket_size"])])
def test_a_json_that_contradicts_the_run_names_both_sides(tmp_path, change, words):
    (tmp_path / "ds.json").write_text(json.dumps({**json.loads(ZERO3.read_text()), **change}))
    with pytest.raises(UserError) as caught:
        resolve_ds_config(tmp_path / "ds.json", load_run(QUICKSTART), ONE_CPU, 2)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_json_may_repeat_what_the_run_says(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({**json.loads(ZERO3.read_text()), "train_batch_size": 4}))
    assert resolve_ds_config(tmp_path / "ds.json", load_run(QUICKSTART), ONE_CPU, 2)["train_batch_size"] == 4


def test_the_learning_rate_warms_up_and_reaches_its_minimum_at_the_last_step():
    rates = [learning_rate(t, 100, peak=1.0, minimum=0.1, warmup_ratio=0.04) for t in range(100)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0]) and rates[4] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1, abs=1e-12) and all(a >= b for a, b in zip(rates[4:], rates[5:]))
