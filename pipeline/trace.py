"""Whether a greedy output is one that the target itself chooses, where rounding turns near-ties (bfloat16).

Two passes of different shapes round differently, so a fixed text is no fair standard there: after one turned near-tie
both texts go on as the target's own. The emitted tokens are put through the target once more, and every one of them has
to be its choice, or as good as its choice, behind the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


@torch.inference_mode()
def logit_gaps(target: nn.Module, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[float]:
    """For every token of the output, by how much the target's largest logit exceeds that token's, in one pass over
    prompt and output: 0 where it is the target's choice."""
    ids_1S = torch.tensor([[*prompt_ids, *output_ids]], device=target.device)
    logits_TV = target(ids_1S, use_cache=False, logits_to_keep=len(output_ids) + 1).logits[0, :-1].float()
    chosen_T1 = torch.tensor(list(output_ids), device=target.device)[:, None]
    return (logits_TV.amax(-1) - logits_TV.gather(1, chosen_T1)[:, 0]).tolist()
