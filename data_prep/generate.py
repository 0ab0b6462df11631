"""Generation for a batch of prompts, arranged to waste little on a CPU.

What the prompts share at their start (a system turn) is computed once; keys and values live in buffers that grow in
steps instead of being copied at every token; rows that have ended leave the batch.
"""

import inspect
from collections.abc import Callable

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

# (logits [B, V], the rows of the batch they belong to, the step) -> next ids int64 [B]
Choice = Callable[[torch.Tensor, list[int], int], torch.Tensor]

GROWTH = 64  # positions by which a full key/value buffer grows


class _BufferedLayer(DynamicLayer):
    """DynamicLayer whose `keys` and `values` [B, H, T, D] are views of larger buffers, so that a new position costs one
    row.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [self.keys, self.values]
        old = self.get_seq_length()
        new = old + key_states.shape[-2]
        for i, states in enumerate((key_states, value_states)):
            if old == 0 or new > self.buffers[i].shape[-2]:
                buffer = states.new_empty(*states.shape[:-2], new + GROWTH, states.shape[-1])
                if old:
                    buffer[:, :, :old] = (self.keys, self.values)[i]
                self.buffers[i] = buffer
            self.buffers[i][:, :, old:new] = states
        self.keys, self.values = (buffer[:, :, :new] for buffer in self.buffers)
        return self.keys, self.values

    def _replace(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        self.buffers = [keys, values]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace(self.keys.repeat_interleave(repeats, dim=0), self.values.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        length = self.get_seq_length()
        self._replace(*(buffer[indices] for buffer in self.buffers))
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache for `model`; full-attention layers get buffers, other kinds (sliding, recurrent) stay as they
    are.
    """
    cache = DynamicCache(config=model.config)
    cache.layers = [_BufferedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _shared_prefix(prompts: list[list[int]]) -> int:
    """Number of ids that all prompts start with; at least one id of each prompt is left over."""
    first, last = min(prompts), max(prompts)
    limit = min(map(len, prompts)) - 1
    return next((i for i in range(limit) if first[i] != last[i]), limit)


def greedy(logits_BV: torch.Tensor, rows: list[int], step: int) -> torch.Tensor:
    """The most probable next id of every row."""
    return logits_BV.argmax(-1)


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    stop_ids: list[int],
    on_step: Callable[[int], None] = lambda rows: None,
    choose: Choice = greedy,
) -> list[list[int]]:
    """The target's continuation of each prompt, up to and including its first stop token.

    `on_step` is told after every step how many rows got a token; `choose` picks the next ids. The result depends on the
    batch only through rounding.
    """
    # transformers 5.2x renamed the argument `past_key_values` to `cache`
    cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    device = model.device
    cache = new_cache(model)
    prefix = _shared_prefix(prompts)
    if prefix:
        shared = torch.tensor([prompts[0][:prefix]], device=device)
        model(input_ids=shared, use_cache=True, logits_to_keep=1, **{cache_argument: cache})
        cache.batch_repeat_interleave(len(prompts))
    width = max(map(len, prompts)) - prefix
    tokens = torch.tensor([[0] * (width - len(p) + prefix) + p[prefix:] for p in prompts], device=device)
    gaps = torch.tensor([width - len(p) + prefix for p in prompts], device=device)
    columns = torch.arange(prefix + width + max_new_tokens, device=device)
    # a row is its prefix, then its padding, then its own ids: padding lies between, so positions are given, not counted
    visible = (columns < prefix) | (columns >= prefix + gaps[:, None])
    positions = torch.where(columns < prefix, columns, columns - gaps[:, None]).clamp(min=0)
    stops = torch.tensor(stop_ids, device=device)
    rows = list(range(len(prompts)))  # rows[i]: the prompt that row i of the batch continues
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    responses: list[list[int]] = [[] for _ in prompts]
    begin, end = prefix, prefix + width
    for step in range(max_new_tokens):
        output = model(
            input_ids=tokens,
            attention_mask=visible[:, :end].long(),
            position_ids=positions[:, begin:end],
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument: cache},
        )
        following = choose(output.logits[:, -1], rows, step)
        live = (~ended).tolist()
        for row, token, alive in zip(rows, following.tolist(), live):
            if alive:
                responses[row].append(token)
        on_step(sum(live))
        ended |= torch.isin(following, stops)
        begin, end = end, end + 1
        count = int(ended.sum())
        if count == len(rows):
            break
        if count >= max(1, len(rows) // 16):  # dropping copies the cache, so not for a single row of many
            keep = (~ended).nonzero().flatten()
            cache.batch_select_indices(keep)
            visible, positions, following, ended = visible[keep], positions[keep], following[keep], ended[keep]
            rows = [rows[i] for i in keep.tolist()]
        tokens = following[:, None]
    return responses
