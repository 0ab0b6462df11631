"""A tiny random target with a real tokenizer and chat template, made on the spot in a second: for smoke runs and
tests.
"""

from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
CORPUS = [
    "user system assistant What is the sum of two numbers? Explain how the function sorts a list of words and returns "
    "it.",
    "Write a short story about the sea, then translate the sentence and give three reasons why it is so.",
]
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def make_tiny_tokenizer(size: int, chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `size` (>= 259) tokens: any text round-trips; eos and pad are special
    tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_target(
    folder: str | Path,
    *,
    tied: bool = True,
    layers: int = 6,
    vocab: int = 300,
    hidden: int = 64,
    seed: int = 0,
    family: Literal["llama", "qwen3"] = "llama",
) -> Path:
    """Save a random causal LM (fp32) and its tokenizer as a Hugging Face folder; returns `folder`.

    `vocab` embedding rows, at least 262, of which the last 3 lie past the tokenizer: the first is the mask token's.
    Weights are drawn from N(0, 0.08) by `seed`, so that greedy text varies; norm weights lie in [0.5, 1.5], so that a
    forgotten or doubled norm shows.
    """
    folder = Path(folder)
    tokenizer = make_tiny_tokenizer(vocab - 3)
    config_class, model_class = MODELS[family]
    stop = tokenizer.eos_token_id
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=4096,
        initializer_range=0.08,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=stop,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.uniform_(0.5, 1.5)
        # like a trained target, this one never says the ids past its tokenizer; small rows keep their direction
        model.get_output_embeddings().weight.data[len(tokenizer) :] *= 0.1
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
