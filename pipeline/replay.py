"""The verification steps that greedy drafting takes, without taking them one by one.

Greedy drafting emits the target's own greedy text, whatever the drafter proposes, so all states that the loop would see
are those of that text. It is generated once for a batch of prompts, one pass gives the states, one pass of the drafter
proposes a block at every position of the response, and the walk over the positions that the loop would visit counts
what it would accept. In float32 the counts are the loop's own (`speculate.generate_drafted`); there are no times.

Shapes: B prompts, S positions, N anchors, K slots of a block, E = features * D, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data_prep.generate import generate
from pipeline.anchors import block_input_ids
from pipeline.speculate import Generation, Step, TappedLayers

CHUNK_BYTES = 256 * 1024**2  # float32 logits held at once
KEPT_BYTES = 4 * 1024**3  # states that are kept for the next drafter


@dataclass(frozen=True)
class Text:
    """A prompt with the target's greedy response. ids: both, and as many further tokens as the last block may be
    compared with; states: layer id -> raw outputs [S, D] of that layer over prompt and response."""

    prompt: int  # tokens
    output_ids: list[int]
    ids: Tensor
    states: dict[int, Tensor]

    @property
    def plain(self) -> Generation:
        return Generation(self.output_ids, [Step(0, 0)] * (len(self.output_ids) - 1))


class Responder:
    """Greedy texts of one target. What it has generated is remembered, and the states over it as far as KEPT_BYTES go,
    since every drafter is judged on the same text."""

    def __init__(self, target: nn.Module, max_new_tokens: int, stop_token_ids: Collection[int]):
        self.target, self.max_new_tokens, self.stop_token_ids = target, max_new_tokens, stop_token_ids
        self._known: dict[tuple[int, ...], list[int]] = {}  # prompt -> tokens behind it
        self._kept: dict[tuple[int, ...], dict[int, Tensor]] = {}  # prompt -> Text.states
        self._room = KEPT_BYTES

    @torch.inference_mode()
    def texts(self, prompts: Sequence[Sequence[int]], layer_ids: Sequence[int], block_size: int) -> list[Text]:
        """The texts of a batch of prompts, with the raw outputs of `layer_ids` over prompt and response, for blocks of
        up to `block_size` slots."""
        keys = [tuple(prompt) for prompt in prompts]
        behind = dict(zip(keys, self._behind(keys, self.max_new_tokens + block_size - 1)))
        outputs = {key: _cut(text[: self.max_new_tokens], self.stop_token_ids) for key, text in behind.items()}
        states = self._states({key: [*key, *output] for key, output in outputs.items()}, layer_ids)
        return [
            Text(len(key), outputs[key], torch.tensor([*key, *behind[key]], device=self.target.device), states[key])
            for key in keys
        ]

    def _states(
        self, wholes: dict[tuple[int, ...], list[int]], layer_ids: Sequence[int]
    ) -> dict[tuple[int, ...], dict[int, Tensor]]:
        """Text.states of every prompt, from its tokens with those of the response; one pass for what is not kept."""
        found = {key: self._kept[key] for key in wholes if set(layer_ids) <= self._kept.get(key, {}).keys()}
        if missing := {key: torch.tensor(ids) for key, ids in wholes.items() if key not in found}:
            ids_BS = nn.utils.rnn.pad_sequence(list(missing.values()), batch_first=True).to(self.target.device)
            with TappedLayers(self.target, layer_ids) as taps:
                # Causal: padding behind a row changes nothing in it.
                self.target.get_decoder()(input_ids=ids_BS, use_cache=False)
            for row, (key, ids) in enumerate(missing.items()):
                found[key] = {i: states_BSD[row, : len(ids)].clone() for i, states_BSD in taps.outputs.items()}
                size = sum(states.nbytes for states in found[key].values())
                if key not in self._kept and size <= self._room:
                    self._kept[key], self._room = found[key], self._room - size
        return found

    def _behind(self, prompts: list[tuple[int, ...]], length: int) -> list[list[int]]:
        """`length` greedy tokens behind every prompt: verification looks up to K - 1 tokens past the response's end, be
        that a stop token or the limit."""
        missing = [prompt for prompt in dict.fromkeys(prompts) if len(self._known.get(prompt, ())) < length]
        if missing:
            self._known |= zip(missing, generate(self.target, [list(prompt) for prompt in missing], length, []))
        return [self._known[prompt][:length] for prompt in prompts]


@torch.inference_mode()
def replay(target: nn.Module, drafter: nn.Module, text: Text) -> Generation:
    """What `generate_drafted` would give for this prompt, without its times."""
    K, anchors = drafter.config.block_size, len(text.output_ids) - 1
    accepted: list[int] = []
    per_pass = max(1, CHUNK_BYTES // (4 * drafter.config.vocab_size * (K - 1)))
    features_1SE = torch.cat([text.states[i] for i in drafter.config.target_layer_ids], dim=-1)[None]
    for first in range(text.prompt, text.prompt + anchors, per_pass):
        anchors_N = torch.arange(first, min(first + per_pass, text.prompt + anchors), device=text.ids.device)
        accepted += _accepted(target, drafter, text.ids, features_1SE, anchors_N)
    steps, at = [], 0
    while at < anchors:
        steps.append(Step(K - 1, accepted[at]))
        at += accepted[at] + 1
    return Generation(text.output_ids, steps)


def _accepted(
    target: nn.Module, drafter: nn.Module, ids_S: Tensor, features_1SE: Tensor, anchors_N: Tensor
) -> list[int]:
    """How many drafted tokens of the block at each anchor equal the text."""
    K = drafter.config.block_size
    block_ids_1T = block_input_ids(ids_S[None], anchors_N[None], K, drafter.config.mask_token_id)
    noise_1TD = target.get_input_embeddings()(block_ids_1T)
    hidden_1TD = drafter(noise_1TD, features_1SE, anchors_N[None])
    # Rows that lie behind one another: over a sliced tensor the head is multiplied block by block, 5 times slower.
    hidden_RD = hidden_1TD[0].unflatten(0, (-1, K))[:, 1:].flatten(0, 1)
    drafted_NJ = target.get_output_embeddings()(hidden_RD).argmax(-1).unflatten(0, (-1, K - 1))
    labels_NJ = ids_S[anchors_N[:, None] + torch.arange(1, K, device=anchors_N.device)]
    return (drafted_NJ == labels_NJ).long().cumprod(-1).sum(-1).tolist()


def _cut(tokens: list[int], stop_token_ids: Collection[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in stop_token_ids), len(tokens))
    return tokens[: end + 1]
