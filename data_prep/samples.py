"""One sample as bytes: the safetensors payload that a shard holds under KEY.safetensors.

input_ids int32 [S], loss_mask uint8 [S], hidden [S, F, D]: bfloat16, or float8_e4m3fn codes with hidden_scale float32
[S, F]; with `--last-hidden` also last_hidden bfloat16 [S, D], the state after the final norm.
"""

import json
import os
import struct
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save

from .errors import UserError
from .fp8 import CODES, dequantise

Storage = Literal["bf16", "fp8"]
DTYPES = {
    "I32": torch.int32,
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F8_E4M3": CODES,
    "F32": torch.float32,
}
# name -> the dtypes it may have; the first three are always there
TENSORS = {
    "input_ids": ("I32",),
    "loss_mask": ("U8",),
    "hidden": ("BF16", "F8_E4M3"),
    "hidden_scale": ("F32",),
    "last_hidden": ("BF16",),
}
REMEDY = "run `python -m data_prep verify` on the dataset"


def token_bytes(features: int, hidden_size: int, storage: Storage = "bf16", last_hidden: bool = False) -> int:
    """Bytes of one token: its states, int32 id and uint8 mask."""
    state = 2 * hidden_size if storage == "bf16" else hidden_size + 4
    return features * state + (2 * hidden_size if last_hidden else 0) + 5


def anchor_positions(loss_mask_S: torch.Tensor) -> torch.Tensor:
    """Positions (int64 [A], ascending) whose token and next token are both supervised: the valid anchors (spec 2)."""
    return (loss_mask_S[:-1].bool() & loss_mask_S[1:].bool()).nonzero().flatten()


def encode_sample(input_ids_S: torch.Tensor, loss_mask_S: torch.Tensor, states: dict[str, torch.Tensor]) -> bytes:
    """The bytes of KEY.safetensors; `states`: hidden, with hidden_scale if it is fp8, and last_hidden if it is stored.

    UserError for other dtypes than the format's: float16 would lose range, float32 disk.
    """
    codes = states["hidden"].dtype == CODES
    for name, tensor in states.items():
        expected = torch.float32 if name == "hidden_scale" else CODES if name == "hidden" and codes else torch.bfloat16
        if tensor.dtype != expected:
            raise UserError(
                f"{name} is {tensor.dtype}, shards store {expected}: float16 overflows at 65504, which hidden states "
                "exceed; convert with .to(torch.bfloat16)."
            )
    tensors = {"input_ids": input_ids_S.to(torch.int32), "loss_mask": loss_mask_S.to(torch.uint8), **states}
    return save({name: tensor.contiguous() for name, tensor in tensors.items()})


def decode_sample(buffer: bytearray | memoryview) -> dict[str, torch.Tensor]:
    """The tensors of a KEY.safetensors payload, sharing memory with `buffer`: nothing is copied but fp8 states.

    Returns input_ids int32 [S], loss_mask uint8 [S], hidden bf16 [S, F, D] whatever the storage, and last_hidden bf16
    [S, D] where it was stored. UserError when the payload is anything else.
    """
    view = memoryview(buffer)
    if len(view) < 8:
        raise UserError(f"a sample of {len(view)} bytes is no safetensors payload; {REMEDY}.")
    (header_size,) = struct.unpack("<Q", view[:8])
    try:
        header = json.loads(bytes(view[8 : 8 + header_size]))
        header.pop("__metadata__", None)
        if not set(list(TENSORS)[:3]) <= set(header) <= set(TENSORS):
            raise ValueError(f"tensors {sorted(header)}")
        start = 8 + header_size
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if entry["dtype"] not in TENSORS[name]:
                raise ValueError(f"{name} is {entry['dtype']}, expected {' or '.join(TENSORS[name])}")
            if start + end > len(view):
                raise ValueError(f"{name} ends at byte {start + end} of {len(view)}")
            dtype = DTYPES[entry["dtype"]]
            count = (end - begin) // dtype.itemsize
            flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=start + begin)
            tensors[name] = flat.view(entry["shape"])
    except (ValueError, KeyError, TypeError, RuntimeError, RecursionError, AttributeError) as error:  # damaged bytes
        raise UserError(f"a sample's payload is damaged ({error}); {REMEDY}.") from error
    _check_shapes(tensors)
    if tensors["hidden"].dtype == CODES:
        tensors["hidden"] = dequantise(tensors["hidden"], tensors.pop("hidden_scale"))
    return tensors


def _check_shapes(tensors: dict[str, torch.Tensor]) -> None:
    """UserError unless the tensors have one length and the shapes of the contract."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    ids, hidden = tensors["input_ids"], tensors["hidden"]
    S = ids.numel()
    expected = {"input_ids": [S], "loss_mask": [S], "hidden": [S, *hidden.shape[-2:]]}
    if hidden.dtype == CODES:
        expected["hidden_scale"] = expected["hidden"][:2]
    if "last_hidden" in tensors:
        expected["last_hidden"] = [S, *hidden.shape[-1:]]
    if shapes != expected:
        raise UserError(
            f"a sample has shapes {shapes}, expected [S], [S], [S, F, D], scales [S, F] where the states are fp8 and "
            f"last_hidden [S, D]; {REMEDY}."
        )


def read_range(path: str | Path, begin: int, nbytes: int) -> bytearray:
    """Bytes begin..begin+nbytes-1 of a file, read straight into the memory that is returned; fewer where it ends before."""
    buffer = bytearray(nbytes)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < nbytes:  # Linux returns at most 2 GiB a call
            count = os.preadv(descriptor, [memoryview(buffer)[done:]], begin + done)
            if count == 0:
                break
            done += count
    finally:
        os.close(descriptor)
    del buffer[done:]
    return buffer


def read_sample(path: str | Path, offset: int, nbytes: int) -> dict[str, torch.Tensor]:
    """The tensors of the sample at byte `offset` of the shard `path`, in the memory that was read into."""
    buffer = read_range(path, offset, nbytes)
    if len(buffer) < nbytes:
        raise UserError(
            f"shard {path} ends after {len(buffer)} of the {nbytes} bytes of the sample at {offset}: it is cut short; "
            f"{REMEDY}."
        )
    return decode_sample(buffer)
