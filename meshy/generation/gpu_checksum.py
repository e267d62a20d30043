"""The checksum that SGLang computes of a tensor on a GPU, in plain torch, on whatever device the tensor is.

The bytes are seen as 32-bit words, the last one filled up with zeros. Each word is mixed with its place in two ways;
the two sums over 8192 words are mixed with the number of bytes into 64 bits, and those are added up and mixed again.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 8192  # words
_BATCH = 128  # tiles that are mixed at once
_32, _64 = 2**32 - 1, 2**64 - 1
_SEED = 0x243F6A88
# One row for each way: the factor of the place, what is added to it, and how far the place is rotated.
_WAYS = (
    (0x27D4EB2D, _SEED, 15),
    (0x165667B1, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _32, 13),
)


class GpuChecksum:
    """Takes the bytes piece by piece; keeps two numbers for each tile and up to a tile of bytes."""

    def __init__(self) -> None:
        self._rest: Tensor = torch.empty(0, dtype=torch.uint8)
        self._tiles: list[Tensor] = []  # each int64 [2, tiles]
        self._words = 0

    def update(self, raw: Tensor) -> None:
        """raw: uint8 [bytes]."""
        if self._rest.numel():
            raw = torch.cat([self._rest.to(raw.device), raw])
        step = TILE * _BATCH * 4
        whole = raw.numel() // (TILE * 4) * (TILE * 4)
        for start in range(0, whole, step):
            self._mix(raw[start : min(start + step, whole)])
        self._rest = raw[whole:].clone()

    def hexdigest(self) -> str:
        """16 hex digits."""
        if self._rest.numel():
            padding = self._rest.new_zeros(-self._rest.numel() % 4)
            self._mix(torch.cat([self._rest, padding]))
            self._rest = self._rest[:0]
        total = 0
        size = self._words * 4 & _32
        for sums in self._tiles:
            high, low = _avalanche(sums.cpu() ^ size).tolist()
            total += sum((one << 32) + two for one, two in zip(high, low, strict=True))
        return f"{_finish(total):016x}" if self._words else f"{0:016x}"

    def _mix(self, raw: Tensor) -> None:
        """Words of whole tiles, or the last ones."""
        # In 64 bits, of which the lower 32 count.
        words = raw.contiguous().clone().view(torch.int32).to(torch.int64) & _32
        place = torch.arange(self._words, self._words + words.numel(), device=words.device) & _32
        sums = []
        for factor, addend, turn in _WAYS:
            where = (_multiply(place, factor) + addend & _32) ^ ((place << turn | place >> 32 - turn) & _32)
            mixed = _avalanche(words ^ where)
            short = -mixed.numel() % TILE
            sums.append(torch.nn.functional.pad(mixed, (0, short)).view(-1, TILE).sum(1) & _32)
        self._tiles.append(torch.stack(sums))
        self._words += words.numel()


def _multiply(values: Tensor, factor: int) -> Tensor:
    """Modulo 2**32: the product itself may overflow, its lower bits are right."""
    return values * factor & _32


def _avalanche(values: Tensor) -> Tensor:
    values = values ^ values >> 16
    values = _multiply(values, 0x85EBCA6B)
    values = values ^ values >> 13
    values = _multiply(values, 0xC2B2AE35)
    return values ^ values >> 16


def _finish(value: int) -> int:
    value &= _64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _64
    return value ^ value >> 31
