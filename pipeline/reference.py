"""Plain `generate` of transformers, timed like the drafting loop: the speed that a user of the target has today."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import torch
from torch import nn
from transformers import LogitsProcessor

from pipeline.speculate import Generation, Seconds


class _PrefillEnd(LogitsProcessor):
    """Remembers when the first logits were there."""

    at: float | None = None

    def __call__(self, input_ids, scores):
        if self.at is None:
            if scores.is_cuda:
                torch.cuda.synchronize(scores.device)
            self.at = time.perf_counter()
        return scores


@torch.inference_mode()
def generate_reference(
    target: nn.Module,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    temperature: float = 0.0,
) -> Generation:
    """The target's response from `target.generate`, without steps; seconds after the prompt's pass count as `verify`.

    Sampled text (temperature above 0) is drawn from torch's global generator and serves the timing only.
    """
    ids_1S = torch.tensor([list(prompt_ids)], device=target.device)
    sampling = (
        {"do_sample": True, "temperature": temperature}
        if temperature > 0
        else {"do_sample": False, "temperature": None}
    )
    prefill, begin = _PrefillEnd(), time.perf_counter()
    stops = sorted(stop_token_ids) or None
    output_1T = target.generate(
        ids_1S,
        attention_mask=torch.ones_like(ids_1S),
        max_new_tokens=max_new_tokens,
        eos_token_id=stops,
        top_p=None,
        top_k=None,
        repetition_penalty=None,
        pad_token_id=stops[0] if stops else 0,
        logits_processor=[prefill],
        **sampling,
    )
    output = output_1T[0, ids_1S.shape[1] :].tolist()
    end = time.perf_counter()  # tolist has waited for the device
    return Generation(output, [], Seconds(prefill=prefill.at - begin, verify=end - prefill.at))
