"""One sample as bytes: the safetensors payload that a shard holds under KEY.safetensors.

input_ids int32 [S], loss_mask uint8 [S], hidden [S, F, D]: bfloat16, or float8_e4m3fn codes with hidden_scale float32
[S, F]; with `--last-hidden` also last_hidden bfloat16 [S, D], the state after the final norm.
"""

import json
import math
import os
import struct
from pathlib import Path
from typing import Literal, NamedTuple

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


class Place(NamedTuple):
    """Where a tensor lies in its payload: bytes begin..end-1 behind the header."""

    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int


def tensor_places(header: bytes) -> dict[str, Place]:
    """The tensors that the JSON header of a safetensors payload names. UserError unless their names, types, sizes and
    shapes are the format's.
    """
    places = {}
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        if not set(list(TENSORS)[:3]) <= set(entries) <= set(TENSORS):
            raise ValueError(f"tensors {sorted(entries)}")
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            if entry["dtype"] not in TENSORS[name]:
                raise ValueError(f"{name} is {entry['dtype']}, expected {' or '.join(TENSORS[name])}")
            place = Place(DTYPES[entry["dtype"]], entry["shape"], begin, end)
            if min(begin, *place.shape) < 0 or end - begin != math.prod(place.shape) * place.dtype.itemsize:
                raise ValueError(f"{name} takes bytes {begin} to {end} and is {entry['dtype']} {place.shape}")
            places[name] = place
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:  # damaged bytes
        raise _damaged(error) from error
    _check_shapes(places)
    return places


def decode_sample(buffer: bytearray | memoryview) -> dict[str, torch.Tensor]:
    """The tensors of a KEY.safetensors payload, sharing memory with `buffer`: nothing is copied but fp8 states.

    Returns input_ids int32 [S], loss_mask uint8 [S], hidden bf16 [S, F, D] whatever the storage, and last_hidden bf16
    [S, D] where it was stored. UserError when the payload is anything else.
    """
    view = memoryview(buffer)
    if len(view) < 8:
        raise UserError(f"a sample of {len(view)} bytes is no safetensors payload; {REMEDY}.")
    (header_size,) = struct.unpack("<Q", view[:8])
    places = tensor_places(bytes(view[8 : 8 + header_size]))
    start = 8 + header_size
    tensors = {}
    for name, place in places.items():
        if start + place.end > len(view):
            raise _damaged(f"{name} ends at byte {start + place.end} of {len(view)}")
        count = math.prod(place.shape)
        try:
            flat = torch.frombuffer(buffer, dtype=place.dtype, count=count, offset=start + place.begin)
            tensors[name] = flat.view(place.shape)
        except (ValueError, TypeError, RuntimeError) as error:
            raise _damaged(error) from error
    if tensors["hidden"].dtype == CODES:
        tensors["hidden"] = dequantise(tensors["hidden"], tensors.pop("hidden_scale"))
    return tensors


def _damaged(what: object) -> UserError:
    return UserError(f"a sample's payload is damaged ({what}); {REMEDY}.")


def _check_shapes(places: dict[str, Place]) -> None:
    """UserError unless the tensors have one length and the shapes of the contract."""
    shapes = {name: place.shape for name, place in places.items()}
    S, hidden = math.prod(shapes["input_ids"]), shapes["hidden"]
    expected = {"input_ids": [S], "loss_mask": [S], "hidden": [S, *hidden[-2:]]}
    if places["hidden"].dtype == CODES:
        expected["hidden_scale"] = expected["hidden"][:2]
    if "last_hidden" in places:
        expected["last_hidden"] = [S, *hidden[-1:]]
    if shapes != expected:
        raise UserError(
            f"a sample has shapes {shapes}, expected [S], [S], [S, F, D], scales [S, F] where the states are fp8 and "
            f"last_hidden [S, D]; {REMEDY}."
        )


def read_into(descriptor: int, begin: int, view: memoryview) -> int:
    """Fills `view` with the bytes of a file from `begin` on; returns how many there were, fewer where the file ends."""
    done = 0
    while done < len(view):  # Linux returns at most 2 GiB a call
        count = os.preadv(descriptor, [view[done:]], begin + done)
        if count == 0:
            break
        done += count
    return done


def read_sample(path: str | Path, offset: int, nbytes: int) -> dict[str, torch.Tensor]:
    """The tensors of the sample at byte `offset` of the shard `path`, in the memory that was read into."""
    buffer = bytearray(nbytes)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        count = read_into(descriptor, offset, memoryview(buffer))
    finally:
        os.close(descriptor)
    if count < nbytes:
        raise UserError(
            f"shard {path} ends after {count} of the {nbytes} bytes of the sample at {offset}: it is cut short; "
            f"{REMEDY}."
        )
    return decode_sample(buffer)
