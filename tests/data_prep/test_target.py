"""Facts read from a target's folder: feature layers, mask token, embedding and head."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from data_prep.errors import UserError
from data_prep.target import (
    check_layer_ids,
    config_sha256,
    feature_layer_ids,
    mask_token_id,
    read_embedding_and_head,
    target_facts,
    tensor_sha256,
)
from data_prep.tiny_target import SPECIALS, make_tiny_target, make_tiny_tokenizer


def test_feature_layers_are_those_of_the_public_drafters():
    assert feature_layer_ids(36) == [1, 9, 17, 25, 33]
    assert feature_layer_ids(32) == [1, 8, 15, 22, 29]
    assert feature_layer_ids(8) == [1, 2, 3, 4, 5]
    assert feature_layer_ids(6, 3) == [1, 2, 3]


@pytest.mark.parametrize(
    "ids, message", [([6], "0..5"), ([-1], "-1"), ([1, 1], "twice"), ([1, 5], "last layer"), ([], "at least one")]
)
def test_layer_ids_that_are_missing_negative_double_or_last_are_rejected(ids, message):
    with pytest.raises(UserError, match=message):
        check_layer_ids(ids, 6)


def test_too_few_layers_for_five_distinct_features_is_an_error_with_the_remedy():
    with pytest.raises(UserError, match="at most 3.*--layer-ids"):
        feature_layer_ids(6)


def test_an_explicit_mask_id_wins():
    tokenizer = make_tiny_tokenizer(297)
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    assert mask_token_id(tokenizer, 300, 299) == 299
    assert mask_token_id(tokenizer, 300) == tokenizer.mask_token_id == 297


def test_without_a_mask_token_the_first_row_past_the_tokenizer_is_taken():
    tokenizer = make_tiny_tokenizer(297)
    assert mask_token_id(tokenizer, 300) == len(tokenizer) == 297


def test_without_a_free_row_an_unused_special_token_is_taken_reserved_ones_first():
    tokenizer = make_tiny_tokenizer(290)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<repo>", "<|reserved_0|>"]})
    assert mask_token_id(tokenizer, len(tokenizer)) == tokenizer.convert_tokens_to_ids("<|reserved_0|>")
    assert mask_token_id(tokenizer, len(tokenizer) - 1) == tokenizer.convert_tokens_to_ids("<repo>")


def test_a_tokenizer_that_uses_every_row_needs_an_explicit_mask_id():
    tokenizer = make_tiny_tokenizer(297)
    with pytest.raises(UserError, match="--mask-token-id"):
        mask_token_id(tokenizer, 297)


@pytest.mark.parametrize("name", ["eos", "pad", "stop", "row 300", "row -1"])
def test_a_mask_id_that_is_eos_pad_a_stop_token_or_past_the_table_is_refused_by_number(name):
    tokenizer = make_tiny_tokenizer(297)
    number = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id, "stop": 77, "row 300": 300, "row -1": -1}[
        name
    ]
    with pytest.raises(UserError, match=rf"mask token id {number} .*--mask-token-id"):
        mask_token_id(tokenizer, 300, number, stop_ids=[77])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_those_of_the_running_model(tmp_path, family, tied):
    folder = make_tiny_target(tmp_path, family=family, tied=tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    embedding, head, is_tied = read_embedding_and_head(folder)
    assert is_tied is tied
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(head, model.get_output_embeddings().weight)
    assert torch.equal(embedding, head) is tied
    facts = target_facts(folder, "float32")
    assert facts["vocab_size"] == 300 and (facts["embedding_sha256"] == facts["head_sha256"]) is tied


def _change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def test_a_missing_head_of_an_untied_target_is_an_error(tmp_path):
    folder = make_tiny_target(tmp_path, tied=True)
    _change_config(folder, tie_word_embeddings=False)
    with pytest.raises(UserError, match="stores no LM head"):
        read_embedding_and_head(folder)


def test_a_head_that_contradicts_the_tied_flag_is_an_error(tmp_path):
    folder = make_tiny_target(tmp_path, tied=False)
    _change_config(folder, tie_word_embeddings=True)
    with pytest.raises(UserError, match="differs from the embedding"):
        read_embedding_and_head(folder)


def test_a_language_model_nested_in_a_multimodal_one_is_found(tmp_path):
    folder = make_tiny_target(tmp_path, tied=True)
    tensors = load_file(folder / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(nested, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "vlm", "text_config": config}))
    embedding, _, tied = read_embedding_and_head(folder)
    assert tied and torch.equal(embedding, tensors["model.embed_tokens.weight"])
    assert target_facts(folder, "float32")["num_hidden_layers"] == 6


def test_the_config_hash_ignores_key_order_and_library_version_and_nothing_else(tmp_path):
    folder = make_tiny_target(tmp_path)
    before = config_sha256(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(dict(reversed(config.items())) | {"transformers_version": "9"}))
    assert config_sha256(folder) == before
    _change_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 1.0})
    assert config_sha256(folder) != before


def test_a_tensor_hash_covers_dtype_and_shape_as_well_as_bytes():
    tensor = torch.arange(6, dtype=torch.int16)
    hashes = {tensor_sha256(t) for t in (tensor, tensor.view(2, 3), tensor.view(torch.bfloat16), tensor + 1)}
    assert len(hashes) == 4


def test_the_tiny_target_leaves_rows_past_its_tokenizer_and_norms_that_are_not_one(tmp_path):
    folder = make_tiny_target(tmp_path)
    tokenizer = make_tiny_tokenizer(297)
    assert len(tokenizer) == 297 and tokenizer.convert_ids_to_tokens([0, 1, 2]) == SPECIALS
    assert tokenizer.decode(tokenizer("naïve £5 – 漢字")["input_ids"]) == "naïve £5 – 漢字"
    norm = load_file(folder / "model.safetensors")["model.norm.weight"]
    assert norm.std() > 0.1
