"""From a stream of tensors to buckets of bytes that travel as one. Pure: where the bytes lie is given from outside."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """One tensor of a bucket. offset: bytes from the bucket's start."""

    name: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Some tensors of one dtype, row-major, in one piece of memory. last: no bucket follows."""

    entries: tuple[Entry, ...]
    dtype: torch.dtype
    data: UInt8[Tensor, " bytes"]
    last: bool

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """Views into `data`, by name."""
        return [(entry.name, _view(self.data, entry.offset, entry.shape, self.dtype)) for entry in self.entries]


def fill(
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    region: Callable[[int], UInt8[Tensor, " bytes"]],
    align: int = 1,
) -> Iterator[Bucket]:
    """Copies `tensors`, cast to dtype, into buckets, each as full as it can be.

    region(n): memory for the next bucket, at least n bytes; called when the first tensor of the bucket is known. align:
    of every tensor's first byte; 1 leaves no gap. A bucket is handed out when the first tensor of the next one is
    there, so that it is known whether it is the last.
    """
    entries: list[Entry] = []
    data = torch.empty(0, dtype=torch.uint8)
    used = 0
    for name, tensor in tensors:
        size = tensor.numel() * dtype.itemsize
        start = -(-used // align) * align
        if entries and start + size > len(data):
            yield Bucket(tuple(entries), dtype, data[:used], last=False)
            entries, data = [], data[:0].clone()  # memory that grows can be given back first
        if not entries:
            data, start = region(size), 0
        _view(data, start, tuple(tensor.shape), dtype).copy_(tensor.detach())
        entries.append(Entry(name, tuple(tensor.shape), start))
        used = start + size
    if entries:
        yield Bucket(tuple(entries), dtype, data[:used], last=True)


def _view(data: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return data[offset : offset + size].view(dtype).view(shape)


class Halves:
    """One segment of memory in two halves: one is filled while the other is read. A tensor too large for a half takes
    the whole segment, and one too large for that makes it grow.

    allocate(n): memory of n bytes. size: bytes of the segment.
    """

    def __init__(self, allocate: Callable[[int], UInt8[Tensor, " bytes"]], size: int) -> None:
        self._allocate = allocate
        self._size = size
        self._segment: Tensor | None = None
        self._busy: list[Callable[[], object]] = []
        self._next = 0  # where the next half begins
        self._undivided = False  # the region given last was the whole segment

    @property
    def size(self) -> int:
        return self._size

    def region(self, size: int) -> UInt8[Tensor, " bytes"]:
        """Memory for a bucket whose first tensor has so many bytes. Waits for whoever still reads it."""
        half = self._size // 2 // 64 * 64
        self._wait(0 if size > half or self._undivided else 1)  # what was lent last may be the other half
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
        """The region given last is being read until `done` returns."""
        self._busy.append(done)

    def free(self) -> None:
        """Waits until nobody reads the segment any more."""
        self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self._busy) > left:
            self._busy.pop(0)()
