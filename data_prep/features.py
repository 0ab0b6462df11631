"""One frozen forward pass of the target: the tapped layers' outputs, and how well its own argmax fits the text."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from .model import decoder_layers

PROBES = 8  # positions per sample whose argmax is stored beside the states
LOGIT_BYTES = 256 << 20  # float32 logits held at a time


class Sample(NamedTuple):
    """What a forward pass says about one sample: states bf16 [S, F, D], probes, supervised tokens that equal the
    argmax.
    """

    hidden: torch.Tensor
    probes: list[dict[str, Any]]
    argmax_matches: int


class FeatureTaps:
    """Runs a causal LM's decoder and keeps the raw outputs of some of its layers, as bfloat16.

    The tap of layer id k is a forward hook on decoder layer k, so nothing depends on how an index into Hugging Face's
    `hidden_states` counts (there it is entry k + 1).
    """

    def __init__(self, model: PreTrainedModel, layer_ids: list[int]):
        self.decoder, self.head, self.device = model.get_decoder(), model.get_output_embeddings(), model.device
        self.count = len(layer_ids)
        self.states: torch.Tensor | None = None
        layers = decoder_layers(model)
        self.handles = [layers[k].register_forward_hook(partial(self._keep, f)) for f, k in enumerate(layer_ids)]

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self.handles:
            handle.remove()

    def _keep(self, feature: int, layer: nn.Module, args: Any, output: Any) -> None:
        output_BSD = output[0] if isinstance(output, tuple) else output
        if self.states is None:
            B, S, D = output_BSD.shape
            self.states = torch.empty(B, S, self.count, D, dtype=torch.bfloat16, device=output_BSD.device)
        self.states[:, :, feature].copy_(output_BSD)

    @torch.inference_mode()
    def run(self, samples: list[torch.Tensor], prompts: list[int]) -> list[Sample]:
        """Features, probes and argmax agreement of `samples` (int32 [S] each, supervised from prompts[i] on), on the
        CPU.

        Samples are padded on the right without an attention mask: causal attention never looks to the right.
        """
        longest = max(map(len, samples))
        ids_BS = torch.zeros(len(samples), longest, dtype=torch.long)
        for row, ids in zip(ids_BS, samples):
            row[: len(ids)] = ids
        self.states = None
        last_BSD = self.decoder(input_ids=ids_BS.to(self.device), use_cache=False).last_hidden_state
        states_BSFD, self.states = self.states.cpu(), None
        # position t predicts token t + 1: the supervised tokens are predicted from prompt - 1 .. S - 2
        rows_RD = torch.cat([last_BSD[b, p - 1 : len(ids) - 1] for b, (ids, p) in enumerate(zip(samples, prompts))])
        counts = [len(ids) - p for ids, p in zip(samples, prompts)]
        places = [torch.linspace(0, n - 1, min(PROBES, n)).round().long() for n in counts]
        offsets = torch.tensor([0, *counts]).cumsum(0)
        probed = torch.cat([place + offset for place, offset in zip(places, offsets)])
        argmax_R, logprobs = self._predict(rows_RD, probed)
        results = []
        for b, (ids, prompt) in enumerate(zip(samples, prompts)):
            own = argmax_R[offsets[b] : offsets[b + 1]]
            probes = [
                {"position": prompt - 1 + i, "argmax": int(own[i]), "logprob": round(logprobs.pop(0), 4)}
                for i in places[b].tolist()
            ]
            results.append(Sample(states_BSFD[b, : len(ids)], probes, int((own == ids[prompt:]).sum())))
        return results

    def _predict(self, rows_RD: torch.Tensor, probed: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        """Argmax (int32 [R]) of the head at every row, and its log-probability at the rows `probed` (ascending)."""
        step = max(1, LOGIT_BYTES // (4 * self.head.weight.shape[0]))
        argmax, logprobs = [], []
        for start in range(0, len(rows_RD), step):
            logits_RV = self.head(rows_RD[start : start + step])
            argmax.append(logits_RV.argmax(-1))
            wanted = probed[(probed >= start) & (probed < start + step)].to(self.device) - start
            logprobs += logits_RV[wanted].float().log_softmax(-1).amax(-1).tolist()
        return torch.cat(argmax).int().cpu(), logprobs
