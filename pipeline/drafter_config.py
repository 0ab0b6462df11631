"""The drafter's dimensions: derived from a target's config.json, read from and written to the public config.json."""
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import Qwen3Config

from data_prep.errors import UserError

# RoPE kinds whose tables change with the length seen so far: a drafter that caches rotated keys cannot follow them.
_CHANGING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class DrafterConfig:
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int  # rows of the target's embedding table
    max_position_embeddings: int
    rope_parameters: str  # canonical JSON of transformers' rope_parameters; a string keeps the class hashable
    initializer_range: float
    block_size: int  # K: slot 0 holds the anchor's token, K - 1 tokens are drafted
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int

    def __post_init__(self):
        if self.block_size < 2:
            raise UserError(f"block_size {self.block_size}: a block holds the anchor and at least one drafted token; "
                            "set drafter.block_size to 2 or more")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(f"mask_token_id {self.mask_token_id} is no row of the target's embedding table "
                            f"(rows 0..{self.vocab_size - 1}); choose an existing row that text never uses")
        ids, last = self.target_layer_ids, self.num_target_layers - 1
        if list(ids) != sorted(set(ids)) or not ids or ids[0] < 0 or ids[-1] >= last:
            raise UserError(f"target_layer_ids {list(ids)}: layer ids ascend without repetition within 0..{last - 1} "
                            f"(the last of {self.num_target_layers} layers is excluded: engines and Hugging Face "
                            "disagree about its norm)")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(f"{self.num_attention_heads} attention heads are no multiple of "
                            f"{self.num_key_value_heads} key/value heads; correct the drafter's config")

    @property
    def rope(self) -> dict:
        return json.loads(self.rope_parameters)

    @cache
    def qwen3(self) -> Qwen3Config:
        """The same dimensions as the class whose layers this drafter is made of."""
        return Qwen3Config(
            hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads, num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim, intermediate_size=self.intermediate_size, rms_norm_eps=self.rms_norm_eps,
            vocab_size=self.vocab_size, max_position_embeddings=self.max_position_embeddings,
            rope_parameters=self.rope, initializer_range=self.initializer_range, tie_word_embeddings=False,
            use_sliding_window=False, sliding_window=None, bos_token_id=None, eos_token_id=None, pad_token_id=None)

    @classmethod
    def for_target(cls, target: dict, *, num_layers: int, block_size: int, mask_token_id: int,
                   target_layer_ids: list[int], vocab_size: int) -> "DrafterConfig":
        """A drafter of the target's width; `target` is the content of the target's config.json."""
        text = target.get("text_config", target)
        heads = text["num_attention_heads"]
        return cls(
            hidden_size=text["hidden_size"], num_hidden_layers=num_layers, num_attention_heads=heads,
            num_key_value_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or text["hidden_size"] // heads,
            intermediate_size=text["intermediate_size"], rms_norm_eps=text.get("rms_norm_eps", 1e-6),
            vocab_size=vocab_size, max_position_embeddings=text["max_position_embeddings"],
            rope_parameters=json.dumps(_rope_of(text), sort_keys=True),
            initializer_range=text.get("initializer_range", 0.02), block_size=block_size, mask_token_id=mask_token_id,
            target_layer_ids=tuple(target_layer_ids), num_target_layers=text["num_hidden_layers"])

    @classmethod
    def from_json(cls, path: Path) -> "DrafterConfig":
        """Reads a public drafter's config.json; refuses to guess what it leaves out."""
        if not path.is_file():
            raise UserError(f"{path} does not exist: a drafter folder holds config.json and model.safetensors")
        return cls.from_public(json.loads(path.read_text()), str(path))

    @classmethod
    def from_public(cls, public: dict, path: str) -> "DrafterConfig":
        """The content of a public config.json; `path` is where it came from, for messages."""
        dflash = public.get("dflash_config", {})
        missing = [f"dflash_config.{k}" for k in ("mask_token_id", "target_layer_ids") if dflash.get(k) is None]
        missing += [k for k in ("block_size", "num_target_layers", "head_dim", "vocab_size") if public.get(k) is None]
        if missing:
            raise UserError(f"{path} lacks {', '.join(missing)}: these are never guessed, a wrong guess drafts badly "
                            "without an error; take them from the run that trained the drafter")
        if dflash.get("block_size", public["block_size"]) != public["block_size"]:
            raise UserError(f"{path} says block_size {public['block_size']} at top level and "
                            f"{dflash['block_size']} in dflash_config; they must agree")
        if any(kind != "full_attention" for kind in public.get("layer_types", [])) or public.get("attention_bias"):
            raise UserError(f"{path} asks for sliding-window layers or attention biases, which this drafter does not have")
        return cls(
            **{name: public[name] for name in (
                "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
                "intermediate_size", "rms_norm_eps", "vocab_size", "max_position_embeddings", "block_size",
                "num_target_layers")},
            rope_parameters=json.dumps(_rope_of(public), sort_keys=True),
            initializer_range=public.get("initializer_range", 0.02), mask_token_id=dflash["mask_token_id"],
            target_layer_ids=tuple(dflash["target_layer_ids"]))

    def to_public(self, dtype: torch.dtype) -> dict:
        """config.json of the export (spec 6). RoPE is written three ways that agree: transformers 5 reads only
        `rope_parameters`, transformers 4 and older engines only `rope_theta` and `rope_scaling`."""
        rope = self.rope
        plain = rope["rope_type"] == "default"
        return {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": str(dtype).removeprefix("torch."),
            "block_size": self.block_size,
            "dflash_config": {"block_size": self.block_size, "mask_token_id": self.mask_token_id,
                              "target_layer_ids": list(self.target_layer_ids)},
            "num_target_layers": self.num_target_layers, "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers, "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads, "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size, "rms_norm_eps": self.rms_norm_eps,
            "vocab_size": self.vocab_size, "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if plain else {k: v for k, v in rope.items() if k != "rope_theta"},
            "rope_parameters": rope, "layer_types": ["full_attention"] * self.num_hidden_layers,
            "hidden_act": "silu", "is_causal": False, "attention_bias": False, "attention_dropout": 0.0,
            "sliding_window": None, "use_sliding_window": False, "max_window_layers": self.num_hidden_layers,
            "tie_word_embeddings": False, "initializer_range": self.initializer_range, "use_cache": True,
            "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _rope_of(config: dict) -> dict:
    """transformers' `rope_parameters` out of either spelling; a partial rotary factor of the target is not the
    drafter's, whose Qwen3 layers rotate whole heads."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise UserError("config.json gives no rope_theta (neither at top level nor in rope_parameters): a drafter with "
                        "another theta than its export drafts nothing right; add it")
    if config.get("rope_theta", theta) != theta:
        raise UserError(f"config.json gives two values of rope_theta: {config['rope_theta']} at top level and {theta} in "
                        "rope_parameters; make them agree")
    rope["rope_theta"] = float(theta)
    rope.pop("partial_rotary_factor", None)
    if rope["rope_type"] in _CHANGING_ROPE:
        raise UserError(f"rope_type {rope['rope_type']!r} changes with the sequence length, which a cached drafter cannot "
                        f"follow; use a target with a fixed kind (default, linear, llama3, yarn)")
    return rope
