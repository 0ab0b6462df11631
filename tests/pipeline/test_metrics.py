"""Metrics of a step from per-slot sums, and files that show each step once."""
import json

import pytest
import torch

from pipeline.loss import BlockLoss
from pipeline.metrics import MetricsLog, step_metrics, tally


def test_the_numbers_of_a_step_by_hand():
    q = torch.tensor([[0.5, 0.5, 0.25], [1.0, 0.2, 0.1]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    nll, weights = -q.log() * mask, torch.tensor([[2.0, 1.0, 0.5], [0.5, 0.0, 0.0]])
    out = BlockLoss((weights * nll).sum(), nll, weights, torch.tensor([[True, False, True], [True, True, True]]))
    halves = [tally(BlockLoss((weights[i:i + 1] * nll[i:i + 1]).sum(), *(x[i:i + 1] for x in out[1:])), mask[i:i + 1], 0.5)
              for i in (0, 1)]
    torch.testing.assert_close(sum(halves), tally(out, mask, 0.5))  # ranks and micro-batches add up
    values = step_metrics(tally(out, mask, 0.5), 2.0)
    assert values["anchors"] == 2 and values["accuracy"] == 3 / 4
    assert values["accepted_length"] == 1 + (1 + 1) / 2  # slot 3 of the first block is right behind a wrong one
    assert [values[f"accuracy/{j}"] for j in (1, 2, 3)] == [1.0, 0.0, 1.0]
    assert [values[f"accepted_per_slot/{j}"] for j in (1, 2, 3)] == [1.0, 0.0, 0.0]
    assert [values[f"q/{j}"] for j in (1, 2, 3)] == pytest.approx([0.75, 0.5, 0.25])
    assert [values[f"weight_share/{j}"] for j in (1, 2, 3)] == pytest.approx([2.5 / 4, 1 / 4, 0.5 / 4])
    assert values["weights_per_anchor"] == 2.0
    # q~ = (0.75, 0.75, 0.625) and (1.0): S~ = 0.75 + 0.75^2 + 0.75^2 * 0.625 = 1.6640625, and 1
    assert values["surrogate"] == pytest.approx((1.6640625 + 1) / 2)


def test_a_log_opened_again_forgets_the_steps_to_come_and_a_line_that_was_cut(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in (1, 2, 3, 4)) + '{"step": 5, "lo')
    (tmp_path / "heldout.jsonl").write_text('{"step": 2}\n{"step": 3}\n')
    MetricsLog(tmp_path, 3, evaluated=False).close()
    steps = [[json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()]
             for name in ("metrics.jsonl", "heldout.jsonl")]
    assert steps == [[1, 2, 3], [2]]
