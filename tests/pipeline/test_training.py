"""Real DeepSpeed runs of the training command on a tiny target: same losses on any ranks, exact resume, safe checkpoints."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep.target import read_embedding_and_head
from pipeline import checkpoint
from pipeline.drafter import DFlashDrafter
from pipeline.export import drafter_of
from tests.datasets import make_run_folder, read_metrics
from tests.distributed import ROOT, train

STEPS = 10
SETTINGS = ("optim.max_steps=10", "checkpoint.every=4", "checkpoint.keep=5", "optim.micro_batch=1")


def losses(out):
    return [line["loss"] for line in read_metrics(out)]


def copy(source, out):
    shutil.copytree(source, out)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run_folder(tmp_path_factory.mktemp("training") / "data")


@pytest.fixture(scope="module")
def two_ranks(folder):
    """The run that nobody disturbed, on 2 ranks."""
    out = copy(folder, folder.parent / "two")
    train(out, *SETTINGS, ranks=2)
    return out


def test_one_and_two_ranks_give_the_same_losses_and_gradient_norms(folder, two_ranks):
    out = copy(folder, folder.parent / "one")
    train(out, *SETTINGS, ranks=1)
    assert [m["step"] for m in read_metrics(out)] == list(range(1, STEPS + 1))
    for one, two in zip(read_metrics(out), read_metrics(two_ranks), strict=True):
        for name in ("loss", "grad_norm", "accepted_length", "lr", "anchors"):
            assert one[name] == pytest.approx(two[name], rel=1e-5), (one["step"], name)


def test_plain_python_without_launcher_and_other_micro_batches_give_the_same_losses(folder, two_ranks):
    out = copy(folder, folder.parent / "plain")
    train(out, *SETTINGS[:3], "optim.micro_batch=4", launcher=False)
    assert losses(out) == pytest.approx(losses(two_ranks), rel=1e-5)


def test_a_resumed_run_repeats_the_undisturbed_one_bit_by_bit(folder, two_ranks):
    out = copy(two_ranks, folder.parent / "resumed")
    for tag in ("step000008", "step000010"):
        shutil.rmtree(out / "checkpoints" / tag)
    done = train(out, *SETTINGS, "--resume", "auto", ranks=2)
    assert "resuming from" in done.stdout and "step 4 of 10" in done.stdout
    assert losses(out) == losses(two_ranks)
    assert [m["lr"] for m in read_metrics(out)] == [m["lr"] for m in read_metrics(two_ranks)]
    a, b = (drafter_of(o / "checkpoints", "step000010", False).state_dict() for o in (out, two_ranks))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_tensorboard_shows_each_step_once_after_a_resume(folder, two_ranks):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = copy(two_ranks, folder.parent / "board")
    for tag in ("step000008", "step000010"):
        shutil.rmtree(out / "checkpoints" / tag)
    train(out, *SETTINGS, "--resume", "step000004", ranks=2)
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, STEPS + 1))


def test_checkpoints_hold_no_target_tensor_and_the_target_is_untouched(folder, two_ranks):
    embedding, _, _ = read_embedding_and_head(two_ranks / "target")
    state = drafter_of(two_ranks / "checkpoints", "step000010", False).state_dict()
    for path in (two_ranks / "checkpoints").rglob("*.pt"):
        stack = [torch.load(path, weights_only=False)]
        while stack:
            item = stack.pop()
            if isinstance(item, torch.Tensor):
                assert item.shape != embedding.shape
            elif isinstance(item, dict):
                stack += item.values()
            elif isinstance(item, (list, tuple)):
                stack += item
    assert not [name for name in state if "embed" in name or "lm_head" in name]
    assert (two_ranks / "target/model.safetensors").read_bytes() == (folder / "target/model.safetensors").read_bytes()


def test_every_weight_moved_norms_included_and_the_untrained_drafter_is_the_seeds(two_ranks):
    trained = drafter_of(two_ranks / "checkpoints", "step000010", False)
    untrained = drafter_of(two_ranks / "checkpoints", "step000010", True)
    assert all(torch.equal(a, b) for a, b in zip(untrained.parameters(),
                                                 DFlashDrafter(untrained.config).initialise(0).parameters()))
    for (name, a), b in zip(trained.named_parameters(), untrained.parameters()):
        assert not torch.equal(a, b), name


def test_the_optimizer_state_is_one_partition_per_rank_in_float32(two_ranks):
    numbers = []
    for path in sorted((two_ranks / "checkpoints/step000010").glob("zero_pp_rank_*_optim_states.pt")):
        state = torch.load(path, weights_only=False)["optimizer_state_dict"]
        flat = state["fp32_flat_groups"]
        assert all(t.dtype == torch.float32 for t in flat)
        numbers.append(sum(t.numel() for t in flat))
    count = sum(p.numel() for p in drafter_of(two_ranks / "checkpoints", "step000010", True).parameters())
    assert len(numbers) == 2 and numbers[0] == numbers[1] and count <= sum(numbers) < count * 1.01


def test_under_bf16_master_weights_and_moments_are_float32_and_norms_move_also_after_a_resume(folder):
    out = copy(folder, folder.parent / "bf16")
    settings = ("precision=bf16", "optim.max_steps=8", "checkpoint.every=4", "checkpoint.keep=5", "optim.lr=6e-4")
    train(out, *settings, launcher=False)
    shutil.rmtree(out / "checkpoints/step000008")
    train(out, *settings, "--resume", "auto", launcher=False)
    (path,) = (out / "checkpoints/step000008").glob("*_optim_states.pt")
    state = torch.load(path, weights_only=False)["optimizer_state_dict"]
    moments = [v for s in state["optimizer_state_dict"]["state"].values() for v in s.values() if torch.is_tensor(v)]
    assert {t.dtype for t in [*state["fp32_flat_groups"], *moments]} == {torch.float32}
    for (name, a), b in zip(drafter_of(out / "checkpoints", "step000008").named_parameters(),
                            drafter_of(out / "checkpoints", "step000008", True).parameters()):
        assert not torch.equal(a, b), name
    assert len(losses(out)) == 8 and json.loads((out / "checkpoints/step000008/complete.json").read_text())["step"] == 8


def test_the_export_equals_the_checkpoint_and_refuses_to_overwrite(two_ranks, tmp_path):
    command = [sys.executable, "launch/export.py", str(two_ranks / "checkpoints"), str(tmp_path / "drafter")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    ours = drafter_of(two_ranks / "checkpoints", "step000010", False).eval()
    again = DFlashDrafter.from_pretrained(tmp_path / "drafter")
    x, features, anchors = torch.randn(1, 8, 32), torch.randn(1, 9, 64), torch.tensor([[5]])
    with torch.no_grad():
        assert torch.equal(ours(x, features, anchors), again(x, features, anchors))
    note = json.loads((tmp_path / "drafter/training.json").read_text())
    assert note["step"] == 10 and note["run"]["optim"]["max_steps"] == 10 and note["versions"]["deepspeed"]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert second.returncode == 2 and "exists already and is not overwritten" in second.stderr


def test_an_incomplete_checkpoint_is_invisible_and_the_previous_one_is_resumed(folder, two_ranks):
    out = copy(two_ranks, folder.parent / "torn")
    (out / "checkpoints/step000010/complete.json").unlink()
    assert checkpoint.complete_tags(out / "checkpoints") == ["step000004", "step000008"]
    done = train(out, *SETTINGS, "--resume", "auto", ranks=2)
    assert "step000010 is incomplete" in done.stdout and "step 8 of 10" in done.stdout
    assert losses(out) == losses(two_ranks)


def test_a_finished_run_resumed_says_so_and_changes_nothing(two_ranks):
    before = {p: p.stat().st_mtime_ns for p in two_ranks.rglob("*") if p.is_file()}
    done = train(two_ranks, *SETTINGS, "--resume", "auto", ranks=2)
    assert "nothing to do" in done.stdout
    assert before == {p: p.stat().st_mtime_ns for p in two_ranks.rglob("*") if p.is_file()}


def test_a_fresh_start_moves_older_results_aside(folder, two_ranks):
    out = copy(two_ranks, folder.parent / "again")
    done = train(out, "optim.max_steps=2", launcher=False)
    assert "moved to" in done.stdout and len(read_metrics(out)) == 2
    assert checkpoint.complete_tags(out / "checkpoints.1") == ["step000004", "step000008", "step000010"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_to_one_rank_saves_the_same_step_on_all_and_the_rest_follows(folder, two_ranks, victim):
    out = copy(folder, folder.parent / f"signal{victim}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    from tests.distributed import free_port

    port = free_port()
    command = [sys.executable, "launch/train.py", "--ds_config", "ds_configs/zero3.json", "--run", "launch/runs/smoke.yaml",
               f"out={out}", *SETTINGS]
    ranks = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env={**environment, "MASTER_PORT": port, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in (0, 1)]
    while not (out / "metrics.jsonl").is_file() or not read_metrics(out):
        assert all(rank.poll() is None for rank in ranks), [rank.communicate() for rank in ranks]
        time.sleep(0.02)
    ranks[victim].send_signal(signal.SIGTERM)
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [75, 75], outputs
    (tag,) = checkpoint.complete_tags(out / "checkpoints")[-1:]
    assert len(read_metrics(out)) == checkpoint.read_marker(out / "checkpoints", tag).step < STEPS
    train(out, *SETTINGS, "--resume", "auto", ranks=2)
    assert losses(out) == losses(two_ranks)


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def other_embedding(out):
    path = out / "target/model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][5] += 1
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("damage,arguments,words", [
    (lambda out: shutil.rmtree(out / "dataset"), (), ["no dataset in", "bash launch/quickstart.sh"]),
    (lambda out: edit_json(out / "target/config.json", lambda c: c.update(rope_theta=7.0)), (), ["config_sha256"]),
    (other_embedding, (), ["the embedding of", "the dataset was made from a target whose embedding"]),
    (lambda out: (out / "target/chat_template.jinja").write_text("{{ messages }}"), (), ["template_sha256"]),
    (None, ("drafter.target_layer_ids=[0,2]",), ["target_layer_ids is [0, 2] in the run file and [1, 3] in the dataset"]),
    (None, ("drafter.mask_token_id=5",), ["mask_token_id is 5 in the run file and 297 in the dataset"]),
    (lambda out: edit_json(out / "dataset/manifest.json", lambda m: m.update(mask_token_id=300)), (),
     ["mask_token_id 300 is no row of the target's embedding table (rows 0..299)"]),
    (lambda out: edit_json(out / "dataset/manifest.json", lambda m: m.update(sealed=False)), (), ["unfinished"]),
    (None, ("--resume", "step000007"), ["step000007 does not exist", "complete checkpoints there: none"]),
    (None, ("optim.warmup=3",), ["optim.warmup", "Extra inputs"])])
def test_a_wrong_input_stops_the_start_with_value_rule_and_remedy(folder, tmp_path, damage, arguments, words):
    out = copy(folder, tmp_path / "run")
    if damage:
        damage(out)
    done = train(out, *arguments, launcher=False, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert all(word in done.stderr for word in words), done.stderr
    assert not (out / "checkpoints").exists()


def test_a_resume_under_other_settings_or_ranks_is_refused_with_the_differences(two_ranks):
    other = train(two_ranks, *SETTINGS, "--resume", "auto", "optim.lr=1e-4", "optim.max_steps=20", launcher=False, check=False)
    assert other.returncode == 2 and "optim" in other.stderr and "0.0001" in other.stderr
    alone = train(two_ranks, *SETTINGS, "--resume", "step000004", launcher=False, check=False)
    assert alone.returncode == 2 and "was saved by 2 ranks and this run has 1" in alone.stderr


def test_a_dry_run_prints_sizes_and_trains_nothing(folder, tmp_path):
    out = copy(folder, tmp_path / "run")
    done = train(out, *SETTINGS, "--dry-run", launcher=False)
    assert "steps    10 of 4 sequences" in done.stdout and '"max_anchors": 16' in done.stdout
    assert sorted(p.name for p in out.iterdir()) == ["dataset", "target"]
