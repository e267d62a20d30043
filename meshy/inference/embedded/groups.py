"""Receiving weights that a trainer broadcasts. Everything here blocks: it is called in threads made for it."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from meshy.generation.shared_tensors import DTYPES
from meshy.generation.update_group import GroupError, UpdateGroup, join, reach_store
from meshy.inference.embedded.request import RequestError

JOIN_SECONDS = 60.0
# The last resort: a trainer that goes away or gives up ends a broadcast at once.
RECEIVE_SECONDS = 300.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Incoming:
    """A tensor that will be broadcast."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def incoming(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[Incoming]:
    """From the three lists of a request. Raises RequestError."""
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise RequestError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes must be equally many.")
    tensors = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if dtype not in DTYPES:
            raise RequestError(f"{name} has the unknown dtype {dtype!r}; known are {sorted(DTYPES)}.")
        if any(type(size) is not int or size < 0 for size in shape):
            raise RequestError(f"{name} has the impossible shape {list(shape)}.")
        tensors.append(Incoming(name, DTYPES[dtype], tuple(shape)))
    return tensors


class UpdateGroups:
    """The groups that were joined, by name, and the memory into which they receive. device: the model's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[str, UpdateGroup] = {}
        self._buffer: Tensor | None = None

    def join(self, name: str, address: str, port: int, rank: int, world_size: int, backend: str) -> None:
        """Until all have joined. Raises GroupError."""
        if not name:
            raise GroupError("Group name cannot be empty")
        if name in self._groups:
            raise GroupError("The specified group name has already been created, please use a different group name")
        if backend == "nccl" and self._device.type != "cuda":
            raise GroupError(f"NCCL cannot broadcast to {self._device}; use backend gloo")
        store = reach_store(address, port, world_size, JOIN_SECONDS)
        self._groups[name] = join(
            store, rank=rank, world_size=world_size, name=name, backend=backend, timeout=JOIN_SECONDS
        )

    def receive(self, group: str, tensors: Sequence[Incoming], flattened: bool) -> list[tuple[str, Tensor]]:
        """The tensors, as views that are valid until the next call. Raises GroupError.

        flattened: they come as one broadcast of all their bytes, in order; else one by one.
        """
        if group not in self._groups:
            raise GroupError(
                f"Group {group} not in {list(self._groups)}. Please call `init_weights_update_group` first."
            )
        joined = self._groups[group]
        # Each tensor begins where its dtype may; what comes as one piece must have been put together like that.
        step = 1 if flattened else 64
        places, size = [], 0
        for tensor in tensors:
            start = -(-size // step) * step
            if start % tensor.dtype.itemsize:
                raise GroupError(f"Unaligned received tensor {tensor.name}: byte offset {start}, dtype {tensor.dtype}")
            places.append((start, start + tensor.bytes))
            size = start + tensor.bytes
        room = self._room(size, joined.on_gpu)
        parts = [(0, size)] if flattened else places
        try:
            sent = [joined.broadcast(room[start:stop], RECEIVE_SECONDS) for start, stop in parts]
            for one in sent:
                one.wait()
        except GroupError:
            self._buffer = None  # somebody may still be writing to it
            raise
        return [
            (tensor.name, room[start:stop].view(tensor.dtype).view(tensor.shape))
            for tensor, (start, stop) in zip(tensors, places, strict=True)
        ]

    def _room(self, size: int, on_gpu: bool) -> Tensor:
        device = self._device if on_gpu else torch.device("cpu")
        if self._buffer is None or self._buffer.numel() < size or self._buffer.device != device:
            self._buffer = None
            try:
                self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
            except RuntimeError as error:
                raise GroupError(f"There is no memory for {size} bytes: {error}") from error
        return self._buffer

    def leave(self, name: str) -> bool:
        """Whether there was such a group."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()
        return group is not None


async def in_thread(function: Callable[[], T]) -> T:
    """Its result, from a thread of its own that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever awaits
            future.set_exception(error)

    threading.Thread(target=run, name="weight-updates", daemon=True).start()
    return await asyncio.wrap_future(future)
