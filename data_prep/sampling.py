"""Sampling with the settings a model's makers recommend, reproducible sample by sample.

Shapes: B rows of a batch, V vocabulary.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import UserError

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}  # what a setting is that the model does not name: off
# Other settings of generation_config.json that would change a distribution, with the values that leave it alone.
OTHERS = {
    "min_p": (None, 0),
    "top_h": (None,),
    "typical_p": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "repetition_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
}


@dataclass(frozen=True)
class Sampling:
    """`temperature` > 0; `top_p` in (0, 1], 1 is off; `top_k`, 0 is off; `seed` of all samples."""

    temperature: float
    top_p: float
    top_k: int
    seed: int

    def meta(self) -> dict[str, Any]:
        """The settings as the responses' meta records them."""
        return asdict(self)


def recommended_sampling(folder: Path, seed: int) -> Sampling:
    """Temperature, top_p and top_k of the folder's generation_config.json; one that is missing there is off. Prints
    them, and what else the file recommends and is not applied. UserError when it names none of the three.
    """
    path = folder / "generation_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    named = {name: config[name] for name in NEUTRAL if config.get(name) is not None}
    if not named:
        raise UserError(
            f"{path} recommends no temperature, top_p or top_k, so --sample has nothing to go by; write the settings "
            'of serving into it, for example "temperature": 0.7, or leave out --sample.'
        )
    settings = Sampling(**(NEUTRAL | named), seed=seed)
    if settings.temperature <= 0 or not 0 < settings.top_p <= 1 or settings.top_k < 0:
        raise UserError(
            f"{path}: {named}; sampling needs temperature > 0, 0 < top_p <= 1, top_k >= 0; correct it, or leave out "
            "--sample for greedy responses."
        )
    print("sampling: " + ", ".join(f"{name} {value}" for name, value in settings.meta().items()))
    ignored = [f"{name} {config[name]}" for name, neutral in OTHERS.items() if config.get(name) not in neutral]
    if ignored:
        print(f"{path.name} also names {', '.join(ignored)}: not applied")
    return settings


def sample_seed(seed: int, name: str) -> int:
    """The seed of the sample `name`, in [0, 2**31): a function of both alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big") >> 1


def probabilities(logits_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """float32 [B, V]: temperature, then the top_k largest logits (with ties), then the smallest set of these that holds
    `top_p` of their probability, then softmax: transformers' order and rules.
    """
    logits_BV = logits_BV.float() / sampling.temperature
    count = logits_BV.shape[-1]
    if 0 < sampling.top_k < count:
        smallest_B1 = logits_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)
        count = int((logits_BV > -torch.inf).sum(-1).max())  # sorting these few replaces sorting the vocabulary
    if sampling.top_p < 1:
        sorted_BC, places_BC = logits_BV.topk(count, dim=-1)
        sorted_BC, places_BC = sorted_BC.flip(-1), places_BC.flip(-1)
        surplus_BC = sorted_BC.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        surplus_BC[:, -1] = False
        kept_BC = sorted_BC.masked_fill(surplus_BC, -torch.inf)
        logits_BV = torch.full_like(logits_BV, -torch.inf).scatter(-1, places_BC, kept_BC)
    return logits_BV.softmax(-1)


class Sampler:
    """Chooses the next id of each row by the row's own random numbers, so which rows share a batch does not matter."""

    def __init__(self, sampling: Sampling, names: list[str], steps: int):
        """`names` are the sample ids of the batch, `steps` the most ids of a response."""
        self.sampling = sampling
        generators = [torch.Generator().manual_seed(sample_seed(sampling.seed, name)) for name in names]
        self.uniform = torch.stack([torch.rand(steps, generator=one, dtype=torch.float64) for one in generators])

    def __call__(self, logits_BV: torch.Tensor, rows: list[int], step: int) -> torch.Tensor:
        """int64 [B]: for the rows `rows` of the batch, where the distribution function passes the step's number."""
        reached_BV = probabilities(logits_BV, self.sampling).cumsum(-1, dtype=torch.float64)
        whole_B = reached_BV[:, -1]
        wanted_B = self.uniform[rows, step].to(logits_BV.device) * whole_B
        wanted_B = torch.minimum(wanted_B, whole_B.nextafter(torch.zeros_like(whole_B)))  # the product may round up
        return torch.searchsorted(reached_BV, wanted_B[:, None], right=True).squeeze(-1)
