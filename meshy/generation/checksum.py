"""The checksum by which trainer and inference agree that they hold the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


class CpuChecksum:
    """First 16 hex digits of the SHA-256 of a tensor's bytes, row-major; what SGLang reports for a CPU tensor."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, raw: Tensor) -> None:
        """raw: the bytes that follow, uint8 [bytes]."""
        self._digest.update(raw.cpu().numpy().data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()[:16]


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8 [bytes], row-major."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tensor_checksum(tensor: Tensor) -> str:
    """The CpuChecksum of a whole tensor."""
    checksum = CpuChecksum()
    checksum.update(bytes_of(tensor))
    return checksum.hexdigest()


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
