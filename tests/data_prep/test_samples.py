"""A sample's bytes: exact in bf16, half as many in fp8, read without copies, damage is an error."""

import pytest
import torch
from safetensors.torch import load

from data_prep.errors import UserError
from data_prep.fp8 import dequantise, quantise, relative_error
from data_prep.manifest import read_index
from data_prep.samples import anchor_positions, decode_sample, encode_sample, read_sample, token_bytes


def sample(tokens: int = 9):
    hidden = torch.randn(tokens, 3, 8).to(torch.bfloat16)
    return torch.arange(tokens, dtype=torch.int32), (torch.arange(tokens) > 3).to(torch.uint8), {"hidden": hidden}


def test_bfloat16_states_survive_bit_for_bit_also_beyond_the_range_of_float16():
    ids, mask, states = sample()
    hidden = states["hidden"]
    hidden[0, 0] = torch.tensor([7e4, -7e4, 3e38, 1e-38, 0.0, -0.0, 1e-3, 65504.0])
    tensors = decode_sample(bytearray(encode_sample(ids, mask, {"hidden": hidden})))
    assert torch.equal(tensors["hidden"].view(torch.int16), hidden.view(torch.int16))
    assert torch.equal(tensors["input_ids"], ids) and torch.equal(tensors["loss_mask"], mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_states_of_another_dtype_are_refused(dtype):
    ids, mask, states = sample()
    with pytest.raises(UserError, match="bfloat16"):
        encode_sample(ids, mask, {"hidden": states["hidden"].to(dtype)})


def test_decoding_shares_the_buffer_and_agrees_with_safetensors():
    buffer = bytearray(encode_sample(*sample()))
    tensors = decode_sample(buffer)
    expected = load(bytes(buffer))
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)
    start, size = tensors["hidden"].data_ptr(), len(buffer)
    base = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    assert base < start < base + size


@pytest.mark.parametrize(
    "damage", [lambda b: b[:5], lambda b: b[:-1], lambda b: b"\xff" * 8 + b[8:], lambda b: b[:8] + b"{}" + b[10:]]
)
def test_a_damaged_payload_is_an_error_and_never_a_tensor(damage):
    with pytest.raises(UserError, match="verify"):
        decode_sample(bytearray(damage(encode_sample(*sample()))))


def test_rows_that_disagree_are_an_error():
    ids, mask, states = sample()
    with pytest.raises(UserError, match="shapes"):
        decode_sample(bytearray(encode_sample(ids, mask, {"hidden": states["hidden"][:-1]})))


def test_valid_anchors_are_positions_whose_token_and_next_token_are_supervised():
    mask = torch.tensor([1, 1, 1, 0, 1, 0, 1, 1], dtype=torch.uint8)
    assert anchor_positions(mask).tolist() == [0, 1, 6]
    assert anchor_positions(torch.ones(1, dtype=torch.uint8)).tolist() == []


def test_reading_past_the_end_of_a_cut_shard_names_the_shard(dataset, manifest):
    entry = read_index(dataset, manifest)[-1]
    path = dataset / entry.shard
    path.write_bytes(path.read_bytes()[: entry.offset + 10])
    with pytest.raises(UserError, match=f"{entry.shard} ends after 10"):
        read_sample(path, entry.offset, entry.nbytes)



def test_fp8_takes_half_the_bytes_and_errs_by_less_than_a_sixteenth_of_each_row():
    hidden = (torch.randn(40, 3, 512) * torch.logspace(-3, 4, 40)[:, None, None]).bfloat16()
    hidden[5, 1, 7] *= 1000  # an outlier of one row costs the other rows nothing
    ids, mask, _ = sample(40)
    codes, scale = quantise(hidden)
    payload = encode_sample(ids, mask, {"hidden": codes, "hidden_scale": scale})
    assert len(payload) / len(encode_sample(ids, mask, {"hidden": hidden})) == pytest.approx(0.51, abs=0.005)
    assert token_bytes(5, 4096, "fp8") / token_bytes(5, 4096) == pytest.approx(0.5005, abs=1e-4)
    stored = decode_sample(bytearray(payload))["hidden"]
    assert stored.dtype == torch.bfloat16 and torch.equal(stored, dequantise(codes, scale))
    error = relative_error(hidden, stored)
    assert float(error.max()) < 1 / 16 and float(error.median()) == pytest.approx(0.026, abs=0.005)
    # the plain rule, one value at a time: the nearest code of 448 steps of the row's largest value
    row = hidden[3, 2].float()
    plain = torch.stack([(v / (row.abs().max() / 448)).to(torch.float8_e4m3fn).float() for v in row])
    torch.testing.assert_close(stored[3, 2].float(), plain * row.abs().max() / 448, rtol=2**-8, atol=0)


def test_a_row_of_zeros_stays_zero_and_one_that_is_not_finite_has_a_scale_that_is_not():
    hidden = torch.randn(3, 1, 8).bfloat16()
    hidden[0], hidden[1, 0, 2], hidden[2, 0, 3] = 0, float("nan"), float("inf")
    codes, scale = quantise(hidden)
    assert torch.equal(dequantise(codes, scale)[0], hidden[0])
    assert scale.isfinite().flatten().tolist() == [True, False, False]


def test_fp8_states_without_scales_and_foreign_tensors_are_errors():
    ids, mask, states = sample()
    codes, scale = quantise(states["hidden"])
    for bad in ({"hidden": codes}, {"hidden": codes, "hidden_scale": scale[:-1]}, {**states, "hidden_scale": scale}):
        # without scales, with scales of too few rows, and with scales beside states that need none
        with pytest.raises(UserError, match="shapes"):
            decode_sample(bytearray(encode_sample(ids, mask, bad)))
    with pytest.raises(UserError, match="tensors .*extra"):
        decode_sample(bytearray(encode_sample(ids, mask, {**states, "extra": states["hidden"].clone()})))
