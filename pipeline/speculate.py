"""The drafting and verification loop: a block drafter proposes, the target checks, the longest agreeing prefix is kept.

One sequence at a time, on a Hugging Face causal LM with a key/value cache. Each step drafts the K - 1 tokens after the
last committed one in a single drafter pass, verifies them in a single target pass over K tokens, keeps the accepted
prefix plus one token of the target's own (correction or bonus), and removes the rejected positions from the target's
cache. Greedy output equals the target's own greedy output token for token in fp32; sampled output follows the target's
distribution (lossless rejection sampling, arXiv 2211.17192 Algorithm 1).

Shape legend: K slots of a block, T new positions, E = F*D concatenated features, D hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from data_prep.errors import UserError
from data_prep.model import decoder_layers
from pipeline.drafter_config import DrafterConfig


@dataclass(frozen=True)
class Step:
    """One verification step: how many tokens were drafted and how many of them the target accepted.

    `accepted` is the verdict of the verification, also for the last step, whose tokens past a stop token or past
    `max_new_tokens` are cut from the output. Serving engines count the same way.
    """

    drafted: int
    accepted: int


@dataclass
class Seconds:
    """Wall-clock seconds of one generation by part; `draft` includes extending the drafter's cache."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    rest: float = 0.0

    @property
    def decode(self) -> float:
        """Seconds after the prefill, the time that drafting can shorten."""
        return self.draft + self.verify + self.rest


@dataclass
class Generation:
    """The response of one prompt: token ids without the prompt, one `Step` per verification, and the time it took."""

    output_ids: list[int]
    steps: list[Step] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)


def check_drafter_fits(config: DrafterConfig, target: Mapping) -> None:
    """Raise UserError, naming both values, where a drafter's config contradicts the target's (its config.json, the part
    of the language model).

    Layer ids and mask token were checked against `num_target_layers` and `vocab_size` when the config was read.
    """
    for name, drafter_value, target_value in (
        ("hidden_size", config.hidden_size, target["hidden_size"]),
        ("vocab_size", config.vocab_size, target["vocab_size"]),
        ("num_target_layers", config.num_target_layers, target["num_hidden_layers"]),
    ):
        if drafter_value != target_value:
            raise UserError(
                f"the drafter's {name} is {drafter_value}, the target has {target_value}: a drafter serves only the"
                " target it was trained for; pass that target with --target, or a drafter of this one"
            )


def generate_plain(
    target: nn.Module,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Generation:
    """The same loop without a drafter (block size 1): the honest baseline of a speed-up.

    Arguments and result as in `generate_drafted`; every step has drafted = accepted = 0.
    """
    return _generate(target, None, prompt_ids, max_new_tokens, stop_token_ids, temperature, generator)


def generate_drafted(
    target: nn.Module,
    drafter: nn.Module,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Generation:
    """Generate one response with speculative decoding.

    target: Hugging Face causal LM in eval mode; drafter: a `DFlashDrafter` (or its equal in `config`, `new_cache`,
    `extend`, `draft`) on the same device. prompt_ids: at least one token. The output ends after the first token of
    `stop_token_ids` (included) or at exactly `max_new_tokens`. temperature 0 is greedy; above 0 tokens are sampled with
    `generator` (on the target's device).
    """
    return _generate(target, drafter, prompt_ids, max_new_tokens, stop_token_ids, temperature, generator)


@torch.inference_mode()
def _generate(target, drafter, prompt_ids, max_new_tokens, stop_token_ids, temperature, generator) -> Generation:
    if len(prompt_ids) == 0:
        raise UserError("the prompt has 0 tokens; generation starts from at least 1 token; remove the empty prompt")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    clock = _Clock(target.device)
    layer_ids = [] if drafter is None else drafter.config.target_layer_ids
    with _CachedTarget(target, layer_ids) as cached:
        logits_1V = cached.forward(list(prompt_ids), logits_to_keep=1)
        output = [_choose(logits_1V[0], temperature, generator)]
        cached.start_rolling_back()
        seconds = Seconds(prefill=clock.lap())
        steps: list[Step] = []
        if drafter is not None:
            draft_block = _Drafting(target, drafter, temperature, generator)
            draft_block.extend(cached.features_1TE())
            seconds.draft += clock.lap()

        while len(output) < max_new_tokens and output[-1] not in stop_token_ids:
            drafted, draft_probs_KV = ([], None) if drafter is None else draft_block(output[-1])
            seconds.draft += clock.lap()
            logits_KV = cached.forward([output[-1], *drafted], logits_to_keep=1 + len(drafted))
            if temperature > 0:
                probs_KV = torch.softmax(logits_KV.float() / temperature, dim=-1)
                accepted, token = accept_sampled(drafted, draft_probs_KV, probs_KV, generator)
            else:
                accepted, token = accept_greedy(drafted, logits_KV)
            seconds.verify += clock.lap()
            cached.roll_back(len(drafted) - accepted)
            steps.append(Step(len(drafted), accepted))
            output += _until_stop([*drafted[:accepted], token], stop_token_ids)
            seconds.rest += clock.lap()
            if drafter is not None:
                draft_block.extend(cached.features_1TE()[:, : accepted + 1])
                seconds.draft += clock.lap()
    return Generation(output[:max_new_tokens], steps, seconds)


def accept_greedy(drafted: Sequence[int], logits_KV: Tensor) -> tuple[int, int]:
    """Longest prefix of `drafted` (K-1 tokens) that equals the target's argmax, and the target's token after it.

    Row j of `logits_KV` predicts the token of slot j + 1; the last row gives the bonus token when all are accepted.
    """
    choices = logits_KV.argmax(dim=-1).tolist()
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == choices[accepted]:
        accepted += 1
    return accepted, choices[accepted]


def accept_sampled(
    drafted: Sequence[int], draft_probs_KV: Tensor | None, target_probs_KV: Tensor, generator: torch.Generator | None
) -> tuple[int, int]:
    """Lossless rejection sampling: (number accepted, next token), together distributed as the target's own samples.

    drafted: K-1 tokens, token j drawn from `draft_probs_KV[j]` ([K-1, V], q); `target_probs_KV` ([K, V], p), float32.
    Token j is accepted with probability min(1, p/q); the first rejection is replaced by a draw from (p - q)+; when all
    are accepted the bonus token is drawn from the last row of p.
    """
    for j, token in enumerate(drafted):
        p_V, q_V = target_probs_KV[j], draft_probs_KV[j]
        threshold = torch.rand((), generator=generator, device=p_V.device)
        if threshold * q_V[token] >= p_V[token]:
            # Where p == q up to rounding the residual can be all zeros; nothing distinguishes it from p then.
            residual_V = (p_V - q_V).clamp(min=0)
            return j, _draw(residual_V if residual_V.sum() > 0 else p_V, generator)
    return len(drafted), _draw(target_probs_KV[len(drafted)], generator)


def _choose(logits_V: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    if temperature > 0:
        return _draw(torch.softmax(logits_V.float() / temperature, dim=-1), generator)
    return int(logits_V.argmax())


def _draw(weights_V: Tensor, generator: torch.Generator | None) -> int:
    return int(torch.multinomial(weights_V, 1, generator=generator))


def _until_stop(tokens: list[int], stop_token_ids: Collection[int]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in stop_token_ids:
            return tokens[: i + 1]
    return tokens


class _Drafting:
    """A drafter with its cache for one sequence; calling it drafts the block behind a committed token."""

    def __init__(self, target: nn.Module, drafter: nn.Module, temperature: float, generator: torch.Generator | None):
        self.drafter, self.cache = drafter, drafter.new_cache()
        self.embedding, self.head = target.get_input_embeddings(), target.get_output_embeddings()
        self.temperature, self.generator = temperature, generator
        masks = [drafter.config.mask_token_id] * (drafter.config.block_size - 1)
        self.block_K = torch.tensor([0, *masks], device=target.device)

    def extend(self, features_1TE: Tensor) -> None:
        self.drafter.extend(self.cache, features_1TE)

    def __call__(self, last_token: int) -> tuple[list[int], Tensor | None]:
        """Tokens of slots 1..K-1 and, when sampling, the distributions [K-1, V] they were drawn from."""
        self.block_K[0] = last_token
        hidden_1KD = self.drafter.draft(self.cache, self.embedding(self.block_K[None]))
        # Slot 0 predicts nothing; with it the head's product has K rows, which CPUs multiply faster than K - 1 for K = 4.
        logits_KV = self.head(hidden_1KD[0])[1:]
        if self.temperature > 0:
            probs_KV = torch.softmax(logits_KV.float() / self.temperature, dim=-1)
            return torch.multinomial(probs_KV, 1, generator=self.generator)[:, 0].tolist(), probs_KV
        return logits_KV.argmax(dim=-1).tolist(), None


class TappedLayers:
    """Keeps the raw outputs of some decoder layers of the target's last forward pass, by layer id.

    A hook sees the output of decoder layer i itself (Hugging Face `hidden_states[i + 1]`), before any final norm, and
    nothing is kept of the layers that are not tapped.
    """

    def __init__(self, target: nn.Module, layer_ids: Sequence[int]):
        self.target, self.layer_ids = target, list(layer_ids)
        self.outputs: dict[int, Tensor] = {}

    def __enter__(self) -> TappedLayers:
        layers = decoder_layers(self.target)
        self.hooks = [layers[i].register_forward_hook(self._keep(i)) for i in self.layer_ids]
        return self

    def __exit__(self, *exc) -> None:
        for hook in self.hooks:
            hook.remove()

    def _keep(self, layer_id: int):
        def hook(module, inputs, output):
            self.outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook


class _CachedTarget(TappedLayers):
    """A target with a fresh key/value cache and the tapped layers' outputs of the last forward."""

    def __init__(self, target: nn.Module, layer_ids: Sequence[int]):
        super().__init__(target, layer_ids)
        self.cache = DynamicCache(config=target.config)
        # transformers 5.2x renamed the argument `past_key_values` to `cache`
        renamed = "cache" in inspect.signature(target.forward).parameters
        self.cached = {"cache" if renamed else "past_key_values": self.cache}

    def forward(self, token_ids: list[int], logits_to_keep: int) -> Tensor:
        """Run T tokens behind the cached ones; logits [logits_to_keep, V] of the last positions."""
        ids_1T = torch.tensor([token_ids], device=self.target.device)
        return self.target(ids_1T, use_cache=True, logits_to_keep=logits_to_keep, **self.cached).logits[0]

    def features_1TE(self) -> Tensor:
        return torch.cat([self.outputs[i] for i in self.layer_ids], dim=-1)

    def start_rolling_back(self) -> None:
        """From here on layers that normally forget (sliding windows) remember until the next roll_back."""
        self.cache.activate_past_recording()
        if not self.cache.is_croppable:
            raise UserError(
                f"a {self.target.config.model_type!r} target keeps state that rejected tokens cannot be removed from;"
                " speculative decoding needs attention layers only; choose another target"
            )

    def roll_back(self, positions: int) -> None:
        # transformers >= 5.20 takes the negative number of positions to remove and refuses a final length.
        self.cache.crop(-positions)


class _Clock:
    """Laps of wall-clock seconds that include the work queued on an accelerator."""

    def __init__(self, device: torch.device):
        self.device = device
        self.last = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def lap(self) -> float:
        now = self._now()
        seconds, self.last = now - self.last, now
        return seconds
