"""The DFlash drafter: Qwen3 layers whose queries come from a block and whose keys come from [context ; block].

The context is the target's hidden states of a few layers, fused once and shared by all drafter layers. Embedding and
head are the target's and live in `target_head.py`; nothing of them is ever a parameter or a checkpoint entry here.
Parameter names are those of the public checkpoints, so `save_pretrained` writes what vLLM, SGLang and z-lab load.

Shapes: B batch, S context tokens, N anchors, K slots of a block, T = N*K, D hidden, E = features * D, H heads.
Source: DFlash, arXiv 2602.06036; spec sections 2 and 6.
"""
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from data_prep.errors import UserError
from pipeline.attention import IMPLEMENTATIONS, cached_block_attention
from pipeline.drafter_config import DrafterConfig
from pipeline.fused import MLP, RMSNorm, rotate


@dataclass
class ContextCache:
    """Keys and values of the context, one [1, G, length, head_dim] pair a layer (RoPE already applied)."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int = 0


def _document_positions(features_BSE: Tensor, starts_BN: Tensor | None) -> Tensor:
    """int64 [B, S]: positions in the row, counted anew from every start. A document without blocks goes on counting
    from the one before it; nothing looks at it."""
    B, S, _ = features_BSE.shape
    places_BS = torch.arange(S, device=features_BSE.device).expand(B, S)
    if starts_BN is None:
        return places_BS
    begun_BS = torch.zeros_like(places_BS).scatter(1, starts_BN, starts_BN).cummax(1).values
    return places_BS - begun_BS


class BlockAttention(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.head_dim = config.head_dim
        query, key = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def _heads(self, x_BTE: Tensor) -> Tensor:
        return x_BTE.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, T, head_dim] of the context or of the block."""
        k = self.k_norm(self._heads(self.k_proj(x_BTD))).transpose(1, 2)
        v = self._heads(self.v_proj(x_BTD)).transpose(1, 2)
        return rotate(k, *rope), v

    def queries(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(self.q_norm(self._heads(self.q_proj(x_BTD))).transpose(1, 2), *rope)

    def project(self, out_BHTD: Tensor) -> Tensor:
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(2))

    def forward(self, x_BTD: Tensor, rope, context_BSD: Tensor, context_rope, attend) -> Tensor:
        context = self.keys_values(context_BSD, context_rope)
        return self.project(attend(self.queries(x_BTD, rope), *context, *self.keys_values(x_BTD, rope)))

    def attend_cached(self, x_BKD: Tensor, rope, context_k: Tensor, context_v: Tensor) -> Tensor:
        k, v = self.keys_values(x_BKD, rope)
        k, v = torch.cat([context_k, k], dim=2), torch.cat([context_v, v], dim=2)
        return self.project(cached_block_attention(self.queries(x_BKD, rope), k, v))


class DrafterLayer(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = MLP(config.qwen3())
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def _mlp(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))

    def forward(self, x_BTD: Tensor, rope, context_BSD: Tensor, context_rope, attend) -> Tensor:
        return self._mlp(x_BTD + self.self_attn(self.input_layernorm(x_BTD), rope, context_BSD, context_rope, attend))

    def draft(self, x_BKD: Tensor, rope, context_k: Tensor, context_v: Tensor) -> Tensor:
        return self._mlp(x_BKD + self.self_attn.attend_cached(self.input_layernorm(x_BKD), rope, context_k, context_v))


class DFlashDrafter(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.attention = "sdpa"  # how a training pass computes block attention, one of attention.IMPLEMENTATIONS
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config.qwen3())

    def initialise(self, seed: int) -> "DFlashDrafter":
        """Draws all weights anew: matrices normal with std `initializer_range`, norms 1. A function of seed alone."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, self.config.initializer_range, generator=generator)
        return self

    def context(self, features_BSE: Tensor) -> Tensor:
        """Fused target features [B, S, D], shared by all layers."""
        return self.hidden_norm(self.fc(features_BSE))

    def forward(self, noise_BTD: Tensor, features_BSE: Tensor, anchors_BN: Tensor,
                starts_BN: Tensor | None = None) -> Tensor:
        """Hidden states [B, N*K, D] of all blocks of a row in one masked pass (after the final norm).

        noise_BTD: embedded blocks, slot 0 the anchor's token, the others the mask token; features_BSE: the stored
        states of the target; anchors_BN: int64 places in the row, 0 for an unused block; starts_BN: where the block's
        document begins in a row that holds several, 0 for an unused block; None: one document a row. Positions are
        those of the document: slot k of a block sits at anchor - start + k.
        """
        K = self.config.block_size
        slots = torch.arange(K, device=noise_BTD.device)
        positions_BN = anchors_BN if starts_BN is None else anchors_BN - starts_BN
        rope = self.rotary_emb(noise_BTD, (positions_BN[:, :, None] + slots).flatten(1))
        context_BSD = self.context(features_BSE)
        context_rope = self.rotary_emb(noise_BTD, _document_positions(features_BSE, starts_BN))
        attend = IMPLEMENTATIONS[self.attention](anchors_BN, starts_BN, K, features_BSE.shape[1])
        x_BTD = noise_BTD
        for layer in self.layers:
            x_BTD = layer(x_BTD, rope, context_BSD, context_rope, attend)
        return self.norm(x_BTD)

    def new_cache(self) -> ContextCache:
        weight = self.fc.weight
        empty = weight.new_empty(1, self.config.num_key_value_heads, 0, self.config.head_dim)
        return ContextCache([empty] * len(self.layers), [empty] * len(self.layers))

    def extend(self, cache: ContextCache, features_1TE: Tensor) -> None:
        """Appends the states of the next T committed positions to the cache."""
        T = features_1TE.shape[1]
        context_1TD = self.context(features_1TE)
        positions = torch.arange(cache.length, cache.length + T, device=features_1TE.device)[None]
        rope = self.rotary_emb(context_1TD, positions)
        for i, layer in enumerate(self.layers):
            k, v = layer.self_attn.keys_values(context_1TD, rope)
            cache.keys[i] = torch.cat([cache.keys[i], k], dim=2)
            cache.values[i] = torch.cat([cache.values[i], v], dim=2)
        cache.length += T

    def draft(self, cache: ContextCache, noise_1KD: Tensor) -> Tensor:
        """Hidden states [1, K, D] of the block whose slot 0 sits at position `cache.length`; the cache stays as it is."""
        K = noise_1KD.shape[1]
        positions = torch.arange(cache.length, cache.length + K, device=noise_1KD.device)[None]
        rope = self.rotary_emb(noise_1KD, positions)
        x_1KD = noise_1KD
        for layer, k, v in zip(self.layers, cache.keys, cache.values):
            x_1KD = layer.draft(x_1KD, rope, k, v)
        return self.norm(x_1KD)

    @classmethod
    def from_pretrained(cls, folder: str | Path, dtype: torch.dtype = torch.float32) -> "DFlashDrafter":
        """Loads a drafter in the public format. UserError when a tensor is missing, unknown or of another shape."""
        config = DrafterConfig.from_json(Path(folder) / "config.json")
        path = Path(folder) / "model.safetensors"
        if not path.is_file():
            raise UserError(f"{folder} has no model.safetensors: a drafter folder holds config.json and model.safetensors; "
                            "export one with `python launch/export.py CHECKPOINT OUT`")
        drafter = cls(config)
        tensors = load_file(path)
        check_tensors({k: tuple(v.shape) for k, v in drafter.named_parameters()},
                      {k: tuple(v.shape) for k, v in tensors.items()}, str(path))
        drafter.load_state_dict(tensors)
        return drafter.to(dtype).eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes config.json and model.safetensors in the public format (spec 6)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: p.detach().cpu().contiguous() for name, p in self.named_parameters()}
        dtypes = {t.dtype for t in tensors.values()}
        if len(dtypes) != 1:
            raise UserError(f"parameters have dtypes {sorted(map(str, dtypes))}: an exported drafter has one; cast it first")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config.to_public(dtypes.pop()), indent=2) + "\n")


def check_tensors(expected: dict[str, tuple], found: dict[str, tuple], where: str) -> None:
    """The exact set of tensors, by name and shape; SGLang would ignore a difference without a word."""
    problems = [f"missing {name} {expected[name]}" for name in sorted(expected.keys() - found.keys())]
    problems += [f"unknown {name} {found[name]}" for name in sorted(found.keys() - expected.keys())]
    problems += [f"{name} is {found[name]}, expected {expected[name]}"
                 for name in sorted(expected.keys() & found.keys()) if found[name] != expected[name]]
    if problems:
        raise UserError(f"{where} does not hold exactly the tensors of a DFlash drafter: {'; '.join(problems)}; "
                        "export it again, or correct its config.json")
