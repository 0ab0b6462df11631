"""Checkpoints without a run: what pruning keeps, which one is best, what a resume compares, pieces for other ranks."""
import dataclasses

import pytest
import torch

from data_prep.errors import UserError
from pipeline import checkpoint
from pipeline.checkpoint import Marker, best_tag, check_marker, complete_tags
from pipeline.config import CheckpointSection, RunConfig
from pipeline.drafter_config import DrafterConfig
from pipeline.repartition import _cut

TARGET = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64,
          "num_hidden_layers": 6, "rope_theta": 1e4}


def marker(step=1, heldout=None, mask_token_id=299, manifest="a" * 64, **changes):
    drafter = DrafterConfig.for_target(TARGET, num_layers=2, block_size=4, mask_token_id=mask_token_id,
                                       target_layer_ids=[1, 3], vocab_size=300).to_public(torch.float32)
    run = RunConfig(out="x", **changes).model_dump(mode="json")
    return Marker(step, 100, run, drafter, manifest, 2, {}, heldout=heldout)


def test_pruning_keeps_the_newest_every_nth_and_the_best(tmp_path):
    for step, number in ((10, 1.2), (20, 1.9), (25, None), (30, 1.4), (40, 1.9), (50, 1.3)):
        (tmp_path / f"step{step:06d}").mkdir()
        checkpoint._write_marker(tmp_path, marker(step, number))
    (tmp_path / "step000060").mkdir()  # incomplete
    tags = complete_tags(tmp_path)
    assert tags[-1] == "step000050" and best_tag(tmp_path) == "step000020"  # the earlier of equals
    section = CheckpointSection(keep=2, keep_every=30)
    assert checkpoint._superfluous(tags, "step000020", section) == ["step000010", "step000025"]
    assert checkpoint._superfluous(tags[-1:], None, section) == []


def test_a_resume_compares_what_decides_the_numbers_and_names_each_difference():
    same = check_marker(marker(), marker(data={"workers": 7}, optim={"micro_batch": 8}, checkpoint={"keep": 9},
                                         drafter={"init": "target_layers"}), override=(), where="here")
    assert same == []
    for changed, key in ((marker(manifest="b" * 64), "data.manifest"), (marker(loss={"alpha": 0.3}), "loss.alpha"),
                         (marker(loss={"credit": "dpace_cumulative"}), "loss.credit"), (marker(seed=4), "seed"),
                         (marker(loss={"normalisation": "reference"}), "loss.normalisation"),
                         (marker(mask_token_id=5), "drafter.mask_token_id"),
                         (marker(optim={"global_batch": 2}), "optim.global_batch"),
                         (marker(drafter={"block_size": 8}), "drafter.block_size"),
                         (marker(evaluation={"share": 0.5}), "evaluation.share")):
        with pytest.raises(UserError, match=f"{key} .* became .*--override {key}"):
            check_marker(marker(), changed, override=(), where="here")
        (told,) = check_marker(marker(), changed, override=[key], where="here")
        assert told.startswith(f"{key} ")


def test_what_decides_the_shapes_of_the_weights_cannot_be_overridden():
    wider = dataclasses.replace(marker(), drafter=marker().drafter | {"hidden_size": 64})
    with pytest.raises(UserError, match="target.hidden_size decide the shapes of the weights and cannot change"):
        check_marker(marker(), wider, override=["target.hidden_size"], where="here")


def test_a_range_is_cut_out_of_pieces_that_lie_behind_one_another():
    whole = torch.arange(20.0)
    pieces = list(whole.split([3, 1, 9, 7]))
    for first in range(20):
        for count in range(1, 21 - first):
            assert torch.equal(_cut(pieces, first, count), whole[first:first + count])
