"""The checksum by which trainer and inference agree that they hold the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def tensor_checksum(tensor: Tensor) -> str:
    """First 16 hex digits of the SHA-256 of the tensor's bytes, row-major; what SGLang reports for a CPU tensor."""
    raw = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).hexdigest()[:16]


def checksums(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The checksum of each named tensor."""
    return {name: tensor_checksum(tensor) for name, tensor in named}


def combined_checksum(sums: dict[str, str]) -> str:
    """One checksum of a whole set: the SHA-256 of names and checksums in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(sums):
        digest.update(name.encode())
        digest.update(sums[name].encode())
    return digest.hexdigest()
