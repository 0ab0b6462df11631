"""One frozen forward pass of the target: the tapped layers' outputs, and how well its own argmax fits the text."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from .fp8 import dequantise, quantise, relative_error
from .model import decoder_layers
from .samples import Storage

PROBES = 8  # positions per sample whose argmax is stored beside the states
LOGIT_BYTES = 256 << 20  # float32 logits held at a time


class Sample(NamedTuple):
    """What a forward pass says about one sample: its states as they are stored (see samples.py), the relative error per
    layer where that is fp8, probes, and how many supervised tokens equal the argmax.
    """

    states: dict[str, torch.Tensor]
    fp8_error: list[float] | None
    probes: list[dict[str, Any]]
    argmax_matches: int


def _device(module: nn.Module) -> torch.device:
    """Where a module's inputs go; weights that accelerate has moved off the device are `meta`, it moves inputs itself."""
    device = module.weight.device
    return torch.device("cpu") if device.type == "meta" else device


class FeatureTaps:
    """Runs a causal LM's decoder and keeps the raw outputs of some of its layers, as bfloat16.

    The tap of layer id k is a forward hook on decoder layer k, so nothing depends on how an index into Hugging Face's
    `hidden_states` counts (there it is entry k + 1). The layers may lie on different devices.
    """

    def __init__(
        self, model: PreTrainedModel, layer_ids: list[int], storage: Storage = "bf16", last_hidden: bool = False
    ):
        self.decoder, self.head = model.get_decoder(), model.get_output_embeddings()
        self.storage, self.last_hidden = storage, last_hidden
        self.device = _device(model.get_input_embeddings())
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
    def run(self, samples: list[torch.Tensor], masks: list[torch.Tensor]) -> list[Sample]:
        """Features, probes and argmax agreement of `samples` (int32 [S] each) with loss masks `masks` (uint8 [S]), on the
        CPU.

        Samples are padded on the right without an attention mask: causal attention never looks to the right.
        """
        longest = max(map(len, samples))
        ids_BS = torch.zeros(len(samples), longest, dtype=torch.long)
        for row, ids in zip(ids_BS, samples):
            row[: len(ids)] = ids
        self.states = None
        last_BSD = self.decoder(input_ids=ids_BS.to(self.device), use_cache=False).last_hidden_state
        stored = self._stored(last_BSD)
        error_BSF = stored.pop("fp8_error", None)
        # position t predicts token t + 1
        places = [mask[1:].nonzero().flatten() for mask in masks]
        counts = [len(place) for place in places]
        probed = [torch.linspace(0, n - 1, min(PROBES, n)).round().long() for n in counts]
        rows_RD = torch.cat([last_BSD[b, place.to(last_BSD.device)] for b, place in enumerate(places)])
        offsets = torch.tensor([0, *counts]).cumsum(0)
        argmax_R, logprobs = self._predict(rows_RD, torch.cat([p + offset for p, offset in zip(probed, offsets)]))
        results = []
        for b, (ids, place) in enumerate(zip(samples, places)):
            own = argmax_R[offsets[b] : offsets[b + 1]]
            probes = [
                {"position": int(place[i]), "argmax": int(own[i]), "logprob": round(logprobs.pop(0), 4)}
                for i in probed[b].tolist()
            ]
            matches = int((own == ids[place + 1]).sum())
            states = {name: tensor[b, : len(ids)] for name, tensor in stored.items()}
            error = error_BSF[b, : len(ids)].mean(0).tolist() if error_BSF is not None else None
            results.append(Sample(states, error and [round(e, 6) for e in error], probes, matches))
        return results

    def _stored(self, last_BSD: torch.Tensor) -> dict[str, torch.Tensor]:
        """The batch's states on the CPU, quantised before they travel; fp8_error float32 [B, S, F] with them."""
        states_BSFD, self.states = self.states, None
        stored = {"hidden": states_BSFD}
        if self.storage == "fp8":
            codes, scale = quantise(states_BSFD)
            error_BSF = relative_error(states_BSFD, dequantise(codes, scale))
            stored = {"hidden": codes, "hidden_scale": scale, "fp8_error": error_BSF}
        if self.last_hidden:
            stored["last_hidden"] = last_BSD.bfloat16()
        return {name: tensor.cpu() for name, tensor in stored.items()}

    def _predict(self, rows_RD: torch.Tensor, probed: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        """Argmax (int32 [R]) of the head at every row, and its log-probability at the rows `probed` (ascending)."""
        step = max(1, LOGIT_BYTES // (4 * self.head.weight.shape[0]))
        argmax, logprobs = [], []
        for start in range(0, len(rows_RD), step):
            logits_RV = self.head(rows_RD[start : start + step].to(_device(self.head)))
            argmax.append(logits_RV.argmax(-1))
            wanted = probed[(probed >= start) & (probed < start + step)].to(logits_RV.device) - start
            logprobs += logits_RV[wanted].float().log_softmax(-1).amax(-1).tolist()
        return torch.cat(argmax).int().cpu(), logprobs
