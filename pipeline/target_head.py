"""The target's embedding table and LM head, frozen: the only two tensors of the target that training reads.

They are plain tensors outside any module, so no checkpoint and no optimizer can ever hold them, and their hashes are
compared with the dataset's manifest at every start.
"""
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data_prep.errors import UserError
from data_prep.manifest import Manifest
from data_prep.target import read_embedding_and_head, tensor_sha256


@dataclass(frozen=True)
class TargetHead:
    embedding_VD: Tensor
    head_VD: Tensor  # the same storage as the embedding where the target ties them

    @classmethod
    def load(cls, folder: Path, manifest: Manifest, device: torch.device, dtype: torch.dtype) -> "TargetHead":
        """Reads both from the target's safetensors; UserError if they are not those the dataset was made with."""
        embedding, head, tied = read_embedding_and_head(folder)
        for name, tensor, expected in (("embedding", embedding, manifest.target.embedding_sha256),
                                       ("head", head, manifest.target.head_sha256)):
            if (found := tensor_sha256(tensor)) != expected:
                raise UserError(f"the {name} of {folder} has sha256 {found[:16]}..., the dataset was made from a target "
                                f"whose {name} has {expected[:16]}...; point target.path at that target "
                                f"({manifest.target.name}) or extract the hidden states again")
        embedding = embedding.to(device, dtype)
        return cls(embedding, embedding if tied else head.to(device, dtype))

    def embed(self, ids: Tensor) -> Tensor:
        """[..., D] rows of the embedding table."""
        return torch.nn.functional.embedding(ids, self.embedding_VD)
