"""Real DeepSpeed runs of the training command on a tiny target: same losses on any ranks, exact resume, safe checkpoints."""
import json
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep.errors import UserError
from data_prep.target import read_embedding_and_head
from pipeline import checkpoint
from pipeline.drafter import DFlashDrafter
from pipeline.export import drafter_of, export
from tests.datasets import make_run_folder, read_metrics
from tests.distributed import ROOT, Ranks, train

STEPS = 12  # 22 samples to train on, 4 a step: step 11 ends the second epoch exactly
LAST = "step000012"
SETTINGS = ("optim.max_steps=12", "checkpoint.every=1", "checkpoint.keep=20", "optim.micro_batch=1", "evaluation.every=4",
            "log.every=5")


def losses(out):
    return [line["loss"] for line in read_metrics(out)]


def heldout(out):
    return read_metrics(out, "heldout.jsonl")


def weights(out, tag=LAST):
    return drafter_of(out / "checkpoints", tag).state_dict()


def same_weights(a, b, tag=LAST):
    ours, theirs = weights(a, tag), weights(b, tag)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def copy(source, out, upto=None):
    """A copy of a run, with the checkpoints of the first `upto` steps only."""
    shutil.copytree(source, out)
    for tag in checkpoint.complete_tags(out / "checkpoints"):
        if upto and int(tag.removeprefix("step")) > upto:
            shutil.rmtree(out / "checkpoints" / tag)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run_folder(tmp_path_factory.mktemp("training") / "data")


@pytest.fixture(scope="module")
def ranks(folder):
    """Two process groups, of 1 and of 2 ranks."""
    groups = {world: Ranks(world, folder.parent) for world in (1, 2)}
    yield groups
    for group in groups.values():
        group.close()


@pytest.fixture(scope="module")
def one(ranks):
    return ranks[1]


@pytest.fixture(scope="module")
def two(ranks):
    return ranks[2]


@pytest.fixture(scope="module")
def two_ranks(two, folder):
    """The run that nobody disturbed, on 2 ranks."""
    out = copy(folder, folder.parent / "two")
    two.train(out, *SETTINGS)
    return out


def test_one_and_two_ranks_give_the_same_losses_gradient_norms_and_heldout_numbers(one, folder, two_ranks):
    out = copy(folder, folder.parent / "one")
    one.train(out, *SETTINGS)
    assert [m["step"] for m in read_metrics(out)] == list(range(1, STEPS + 1))
    for a, b in zip(read_metrics(out), read_metrics(two_ranks), strict=True):
        for name in ("loss", "grad_norm", "accepted_length", "surrogate", "lr", "anchors", "tokens", "sequences", "q/3"):
            assert a[name] == pytest.approx(b[name], rel=1e-5), (a["step"], name)
    assert [line["step"] for line in heldout(out)] == [4, 8, 12]
    for a, b in zip(heldout(out), heldout(two_ranks), strict=True):
        assert a == pytest.approx(b, rel=1e-5) and a["heldout/samples"] == 4
        assert (a["heldout/walk_tau"], a["heldout/all_anchors_tau"]) == (b["heldout/walk_tau"], b["heldout/all_anchors_tau"])


def test_the_deepspeed_launcher_gives_the_same_run(folder, two_ranks):
    out = copy(folder, folder.parent / "launcher")
    train(out, *SETTINGS, ranks=2)
    assert losses(out) == losses(two_ranks) and heldout(out) == heldout(two_ranks)


def test_plain_python_without_launcher_and_other_micro_batches_give_the_same_losses(folder, two_ranks):
    out = copy(folder, folder.parent / "plain")
    train(out, *SETTINGS, "optim.micro_batch=4", launcher=False)
    assert losses(out) == pytest.approx(losses(two_ranks), rel=1e-5)


@pytest.mark.parametrize("settings,ds_config", [
    (("optim.activation_checkpointing=true",), "zero3"), ((), "zero3_offload")])
def test_offload_and_recomputed_activations_give_the_same_losses(two, folder, two_ranks, tmp_path, settings, ds_config):
    out = copy(folder, tmp_path / "run")
    two.train(out, *SETTINGS, *settings, ds_config=f"ds_configs/{ds_config}.json")
    assert losses(out) == pytest.approx(losses(two_ranks), rel=1e-5)


@pytest.mark.parametrize("begin", [4, 11], ids=["inside an epoch", "at the end of an epoch"])
def test_a_resumed_run_repeats_the_undisturbed_one_bit_by_bit_and_shows_each_step_once(two, two_ranks, tmp_path, begin):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = copy(two_ranks, tmp_path / "run", upto=begin)
    done = two.train(out, *SETTINGS, "--resume", "auto")
    assert f"resuming from {out / 'checkpoints'}/step{begin:06d}: step {begin} of 12\n" in done.stdout
    assert losses(out) == losses(two_ranks) and heldout(out) == heldout(two_ranks)
    assert [m["lr"] for m in read_metrics(out)] == [m["lr"] for m in read_metrics(two_ranks)]
    assert same_weights(out, two_ranks)
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, STEPS + 1))
    assert [event.step for event in events.Scalars("heldout/walk_tau")] == [4, 8, 12]
    assert [event.step for event in events.Histograms("weight_share_per_slot")] == [5, 10, 12]


def test_a_checkpoint_of_other_ranks_is_shared_out_by_the_resume_and_the_next_losses_agree(ranks, folder, two_ranks, tmp_path):
    four = Ranks(4, folder.parent)
    try:
        for source, saved, group in ((two_ranks, 2, ranks[1]), (two_ranks, 2, four), (folder.parent / "one", 1, ranks[2])):
            out = copy(source, tmp_path / f"{saved}_to_{group.world}", upto=4)
            done = group.train(out, *SETTINGS, "--resume", "auto")
            assert f"saved by {saved} ranks and shared out to {group.world}" in done.stdout
            assert losses(out) == pytest.approx(losses(two_ranks), rel=1e-5)
            assert checkpoint.read_marker(out / "checkpoints", LAST).world == group.world
    finally:
        four.close()


def test_under_zero_2_a_checkpoint_is_shared_out_as_well_and_another_stage_is_refused(ranks, folder, two_ranks, tmp_path):
    out = copy(folder, tmp_path / "run")
    ranks[2].train(out, *SETTINGS, ds_config="ds_configs/zero2.json")
    assert losses(out) == pytest.approx(losses(two_ranks), rel=1e-5)
    resumed = copy(out, tmp_path / "resumed", upto=4)
    ranks[1].train(resumed, *SETTINGS, "--resume", "auto", ds_config="ds_configs/zero2.json")
    assert losses(resumed) == pytest.approx(losses(two_ranks), rel=1e-5)
    other = copy(out, tmp_path / "other", upto=4)
    refused = ranks[1].train(other, *SETTINGS, "--resume", "auto", check=False)
    assert refused.returncode == 2 and "saved by 2 ranks under ZeRO-2 and this run has 1 under ZeRO-3" in refused.stdout


def test_every_rank_holds_its_share_of_parameters_gradients_and_optimizer_state(ranks, folder, tmp_path):
    config = json.loads((ROOT / "ds_configs/zero3.json").read_text())
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # else tiny matrices stay whole
    (tmp_path / "ds.json").write_text(json.dumps(config))
    held = {}
    for world, group in ranks.items():
        done = group.train(copy(folder, tmp_path / f"run{world}"), "optim.max_steps=1", ds_config=tmp_path / "ds.json")
        (line,) = re.findall("sharded .*", done.stdout)
        held[world] = [float(number) for number in re.findall(r"([\d.]+) MiB", line)]
    assert held[2] == pytest.approx([number / 2 for number in held[1]], rel=0.02)


def test_checkpoints_hold_no_target_tensor_and_the_target_is_untouched(folder, two_ranks):
    embedding, _, _ = read_embedding_and_head(two_ranks / "target")
    state = drafter_of(two_ranks / "checkpoints", LAST).state_dict()
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
    trained = drafter_of(two_ranks / "checkpoints", LAST)
    untrained = drafter_of(two_ranks / "checkpoints", LAST, True)
    assert all(torch.equal(a, b) for a, b in zip(untrained.parameters(),
                                                 DFlashDrafter(untrained.config).initialise(0).parameters()))
    for (name, a), b in zip(trained.named_parameters(), untrained.parameters()):
        assert not torch.equal(a, b), name


def test_the_optimizer_state_is_one_partition_per_rank_in_float32(two_ranks):
    numbers = []
    for path in sorted((two_ranks / "checkpoints/step000012").glob("zero_pp_rank_*_optim_states.pt")):
        state = torch.load(path, weights_only=False)["optimizer_state_dict"]
        flat = state["fp32_flat_groups"]
        assert all(t.dtype == torch.float32 for t in flat)
        numbers.append(sum(t.numel() for t in flat))
    count = sum(p.numel() for p in drafter_of(two_ranks / "checkpoints", LAST, True).parameters())
    assert len(numbers) == 2 and numbers[0] == numbers[1] and count <= sum(numbers) < count * 1.01


def test_under_bf16_master_weights_and_moments_are_float32_and_norms_move_also_after_a_resume(one, folder):
    out = copy(folder, folder.parent / "bf16")
    settings = ("precision=bf16", "optim.max_steps=8", "checkpoint.every=4", "checkpoint.keep=5", "optim.lr=6e-4")
    one.train(out, *settings)
    shutil.rmtree(out / "checkpoints/step000008")
    one.train(out, *settings, "--resume", "auto")
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
    ours = drafter_of(two_ranks / "checkpoints", LAST).eval()
    again = DFlashDrafter.from_pretrained(tmp_path / "drafter")
    x, features, anchors = torch.randn(1, 8, 32), torch.randn(1, 9, 64), torch.tensor([[5]])
    with torch.no_grad():
        assert torch.equal(ours(x, features, anchors), again(x, features, anchors))
    note = json.loads((tmp_path / "drafter/training.json").read_text())
    assert note["step"] == 12 and note["run"]["optim"]["max_steps"] == 12 and note["versions"]["deepspeed"]
    with pytest.raises(UserError, match="exists already and is not overwritten"):
        export(two_ranks / "checkpoints", tmp_path / "drafter")


def test_incomplete_and_damaged_checkpoints_are_not_used_and_the_previous_one_is_resumed(two, two_ranks, tmp_path):
    out = copy(two_ranks, tmp_path / "torn", upto=10)
    (out / "checkpoints/step000010/complete.json").unlink()
    torn = out / "checkpoints/step000009/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torn.write_bytes(torn.read_bytes()[:-100])
    assert checkpoint.complete_tags(out / "checkpoints")[-1] == "step000008"
    done = two.train(out, *SETTINGS, "--resume", "auto")
    assert "step000010 is incomplete" in done.stdout and f"step000009 is damaged ({torn.name} has " in done.stdout
    assert "step 8 of 12" in done.stdout and losses(out) == losses(two_ranks)
    named = two.train(copy(two_ranks, tmp_path / "named"), *SETTINGS, "--resume", "step000099", check=False)
    assert named.returncode == 2 and "step000099 does not exist; complete checkpoints there: step000001, " in named.stdout


def test_a_finished_run_resumed_says_so_and_changes_nothing(two, two_ranks):
    before = {p: p.stat().st_mtime_ns for p in two_ranks.rglob("*") if p.is_file()}
    done = two.train(two_ranks, *SETTINGS, "--resume", "auto")
    assert "nothing to do" in done.stdout
    assert before == {p: p.stat().st_mtime_ns for p in two_ranks.rglob("*") if p.is_file()}


def test_a_fresh_start_moves_older_results_aside_and_so_does_a_step_back(one, two, two_ranks, tmp_path):
    out = copy(two_ranks, tmp_path / "again", upto=8)
    done = two.train(out, *SETTINGS, "--resume", "step000004", "checkpoint.keep=2", "checkpoint.keep_every=5")
    assert "newer checkpoints moved to" in done.stdout and losses(out) == losses(two_ranks)
    assert checkpoint.complete_tags(out / "checkpoints.1") == [f"step{n:06d}" for n in range(5, 9)]
    best = (out / "checkpoints/best").read_text()
    numbers = {f"step{line['step']:06d}": line["heldout/walk_tau"] for line in heldout(out)}
    assert best == max(numbers, key=numbers.get)
    expected = {best, "step000005", "step000010", "step000011", "step000012"}
    assert checkpoint.complete_tags(out / "checkpoints") == sorted(expected)
    done = one.train(out, "optim.max_steps=2")
    assert "moved to" in done.stdout and len(read_metrics(out)) == 2
    assert checkpoint.complete_tags(out / "checkpoints.2") == sorted(expected)


def terminate(rank):
    return lambda two, out: two.signal(rank, signal.SIGTERM if rank else signal.SIGUSR1)


@pytest.mark.parametrize("ask,moment", [
    (terminate(0), "metrics.jsonl"), (terminate(1), "checkpoints/step000004/*"),
    (lambda two, out: (out / "stop").touch(), "heldout.jsonl")],
    ids=["signal to rank 0", "signal to rank 1 during a save", "stop file behind an evaluation"])
def test_a_stop_asked_of_one_rank_saves_one_step_on_all_and_the_rest_follows(two, folder, two_ranks, tmp_path, ask, moment):
    out = copy(folder, tmp_path / "run")
    two.begin(out, *SETTINGS)
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size for path in out.glob(moment)):
        assert time.monotonic() < deadline, two.output()
        time.sleep(0.002)
    ask(two, out)
    assert two.end() == [75, 75], two.output()
    (tag,) = checkpoint.complete_tags(out / "checkpoints")[-1:]
    assert len(read_metrics(out)) == checkpoint.read_marker(out / "checkpoints", tag).step < STEPS
    assert "stopped on request" in two.output() and not (out / "stop").exists()
    two.train(out, *SETTINGS, "--resume", "auto")
    assert losses(out) == losses(two_ranks) and heldout(out) == heldout(two_ranks) and same_weights(out, two_ranks)


def test_an_evaluation_cut_short_by_a_stop_is_made_up_for_by_the_resume(two, two_ranks, tmp_path):
    out = copy(two_ranks, tmp_path / "run", upto=8)
    marker = json.loads((out / "checkpoints/step000008/complete.json").read_text())
    (out / "checkpoints/step000008/complete.json").write_text(json.dumps(marker | {"evaluated": False, "heldout": None}))
    two.train(out, *SETTINGS, "--resume", "auto")
    assert heldout(out) == heldout(two_ranks) and losses(out) == losses(two_ranks)
    assert json.loads((out / "checkpoints/step000008/complete.json").read_text()) == marker | {"versions": marker["versions"]}


def test_steps_that_are_not_finite_change_nothing_on_any_rank_are_counted_and_stop_the_run(two, tmp_path):
    out = make_run_folder(tmp_path / "run", not_finite={0, 1, 2, 3})
    done = two.train(out, *SETTINGS, "optim.max_steps=5", "optim.max_nonfinite=3")
    lines = read_metrics(out)
    bad = [line["step"] for line in lines if line["loss"] != line["loss"]]
    assert 0 < len(bad) < 5 and lines[-1]["skipped_steps"] == len(bad)
    for step in bad:
        assert f"step {step} skipped: loss nan" in done.stdout
        before, after = ((weights(out, f"step{n:06d}") if n else
                          drafter_of(out / "checkpoints", "step000001", True).state_dict()) for n in (step - 1, step))
        assert all(torch.equal(before[name], after[name]) for name in before)
    marker = checkpoint.read_marker(out / "checkpoints", "step000005")
    assert marker.skipped == len(bad)
    stopped = two.train(out, *SETTINGS, "optim.max_steps=5", "optim.max_nonfinite=1", check=False)
    assert stopped.returncode == 2 and f"step {bad[0]}: loss or gradient was not finite for 1 steps in a row" in stopped.stdout
    assert re.search(r"from samples (0000\d\d, ){3}0000\d\d; the weights and the last checkpoint are intact", stopped.stdout)


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
    (None, ("evaluation.share=0.001",), ["evaluation.share 0.001 of 26 samples holds out 0", "set it to 0"]),
    (None, ("optim.warmup=3",), ["optim.warmup", "Extra inputs"])])
def test_a_wrong_input_stops_the_start_with_value_rule_and_remedy(one, folder, tmp_path, damage, arguments, words):
    out = copy(folder, tmp_path / "run")
    if damage:
        damage(out)
    done = one.train(out, *arguments, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stdout, done.stdout[-2000:]
    assert all(word in done.stdout for word in words), done.stdout
    assert not (out / "checkpoints").exists()


def test_a_resume_under_other_settings_is_refused_by_name_unless_overridden(two, two_ranks, tmp_path):
    out = copy(two_ranks, tmp_path / "run", upto=4)
    changed = (*SETTINGS, "--resume", "auto", "optim.lr=1e-4", "loss.alpha=0.4")
    refused = two.train(out, *changed, check=False)
    assert refused.returncode == 2 and "loss.alpha 0.5 became 0.4; optim.lr 0.003 became 0.0001" in refused.stdout
    assert "--override loss.alpha --override optim.lr" in refused.stdout
    half = two.train(out, *changed, "--override", "optim.lr", check=False)
    assert half.returncode == 2 and "optim.lr" not in half.stdout.split("belongs to another run")[1]
    unknown = two.train(out, *changed, "--override", "optim.rate", check=False)
    assert unknown.returncode == 2 and "--override optim.rate: a resume compares no such key" in unknown.stdout
    deeper = ("drafter.num_layers=3", "--override", "drafter.num_layers")
    shapes = two.train(out, *SETTINGS, "--resume", "auto", *deeper, check=False)
    assert shapes.returncode == 2 and "drafter.num_layers decide the shapes of the weights" in shapes.stdout
    allowed = [word for key in ("optim.lr", "loss.alpha", "optim.weight_decay") for word in ("--override", key)]
    done = two.train(out, *changed, "optim.weight_decay=0.1", *allowed)
    assert "--override: optim.lr 0.003 became 0.0001" in done.stdout
    (path,) = (out / "checkpoints" / LAST).glob("zero_pp_rank_0_*_optim_states.pt")
    state = torch.load(path, weights_only=False)["optimizer_state_dict"]["optimizer_state_dict"]
    assert state["param_groups"][0]["weight_decay"] == 0.1
    assert losses(out)[:4] == losses(two_ranks)[:4] and losses(out)[5:] != losses(two_ranks)[5:]


def test_a_run_starts_from_the_weights_of_an_exported_drafter(one, folder, two_ranks, tmp_path):
    out = copy(folder, tmp_path / "run")
    source = tmp_path / "drafter"
    drafter_of(two_ranks / "checkpoints", LAST).save_pretrained(source)
    done = one.train(out, *SETTINGS, "optim.max_steps=1", f"drafter.init_from={source}", "--resume", "auto")
    assert f"starting from step 0 (no complete checkpoint in {out / 'checkpoints'})" in done.stdout
    ours, theirs = drafter_of(out / "checkpoints", "step000001", True).state_dict(), weights(two_ranks)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_dry_run_prints_sizes_and_trains_nothing(one, folder, tmp_path):
    out = copy(folder, tmp_path / "run")
    done = one.train(out, *SETTINGS, "--dry-run")
    assert "steps    12 of 4 sequences" in done.stdout and '"max_anchors": 16' in done.stdout
    assert "22 samples" in done.stdout and "4 more held out" in done.stdout and "under ZeRO-3: parameters" in done.stdout
    assert sorted(p.name for p in out.iterdir()) == ["dataset", "target"]
