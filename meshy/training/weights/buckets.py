"""From a stream of tensors to buckets that travel as one. Pure: where packed bytes lie is given from outside."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor


@dataclass(frozen=True)
class Bucket:
    """Some tensors of one dtype that travel together, by name, each contiguous. packed: the piece of memory in which
    they lie one after another; None where each travels from where it lies. last: no bucket follows."""

    tensors: tuple[tuple[str, Tensor], ...]
    dtype: torch.dtype
    packed: UInt8[Tensor, " bytes"] | None
    last: bool

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors) if self.packed is None else len(self.packed)


@dataclass(frozen=True)
class Unpacked:
    """Tensors of at least `least` bytes travel unpacked, up to `most` bytes of them in a bucket, from `device`."""

    least: int
    most: int
    device: torch.device


def fill(
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    region: Callable[[int], UInt8[Tensor, " bytes"]],
    align: int = 1,
    unpacked: Unpacked | None = None,
) -> Iterator[Bucket]:
    """Makes buckets of `tensors`, cast to dtype, each as full as it can be; all but the large ones are copied.

    region(n): memory for the next packed bucket, at least n bytes; called when its first tensor is known. align: of
    every packed tensor's first byte; 1 leaves no gap. A bucket is handed out when the first tensor of the next one of
    its kind is there, or none comes any more, so that it is known whether it is the last.
    """
    large: list[tuple[str, Tensor]] = []
    large_bytes = 0
    small: list[tuple[str, Tensor]] = []
    data = torch.empty(0, dtype=torch.uint8)
    used = 0
    for name, tensor in tensors:
        size = tensor.numel() * dtype.itemsize
        if unpacked is not None and size >= unpacked.least:
            if large and large_bytes + size > unpacked.most:
                yield Bucket(tuple(large), dtype, None, last=False)
                large, large_bytes = [], 0
            large.append((name, tensor.detach().to(unpacked.device, dtype).contiguous()))
            large_bytes += size
            continue
        start = -(-used // align) * align
        if small and start + size > len(data):
            yield Bucket(tuple(small), dtype, data[:used], last=False)
            small, data = [], data[:0].clone()  # memory that grows can be given back first
        if not small:
            data, start = region(size), 0
        used = start + size
        small.append((name, data[start:used].view(dtype).view(tensor.shape)))
        small[-1][1].copy_(tensor.detach())
    if large:
        yield Bucket(tuple(large), dtype, None, last=not small)
        large = []
    if small:
        yield Bucket(tuple(small), dtype, data[:used], last=True)


class Halves:
    """One segment of memory in two halves: one is filled while the other is read. A tensor too large for a half takes
    the whole segment, and one too large for that makes it grow.

    allocate(n): memory of n bytes. size: bytes of the segment.
    """

    def __init__(self, allocate: Callable[[int], UInt8[Tensor, " bytes"]], size: int) -> None:
        self._allocate = allocate
        self._size = size
        self._segment: Tensor | None = None
        self._reader: Callable[[], object] | None = None
        self._next = 0  # where the next half begins
        self._undivided = False  # the region given last was the whole segment

    @property
    def size(self) -> int:
        return self._size

    def region(self, size: int) -> UInt8[Tensor, " bytes"]:
        """Memory for a bucket whose first tensor has so many bytes. Waits for whoever still reads it."""
        half = self._size // 2 // 64 * 64
        if size > half or self._undivided:  # else what is being read is the other half
            self.free()
        self._undivided = size > half
        if size > self._size:
            self._segment, self._size = None, -(-size // 128) * 128
        if self._segment is None:
            self._segment = self._allocate(self._size)
        if self._undivided:
            self._next = 0
            return self._segment
        start, self._next = self._next, half - self._next
        return self._segment[start : start + half]

    def lend(self, done: Callable[[], object]) -> None:
        """The region given last is being read until `done` returns. Waits for whoever read the one before."""
        self.free()
        self._reader = done

    def free(self) -> None:
        """Waits until nobody reads the segment any more."""
        if self._reader is not None:
            reader, self._reader = self._reader, None
            reader()
