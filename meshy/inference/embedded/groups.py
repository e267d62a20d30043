"""Receiving weights that a trainer broadcasts. Everything here blocks: it is called in threads made for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshy.generation.shared_tensors import DTYPES
from meshy.generation.update_group import Broadcast, GroupError, UpdateGroup, join, reach_store
from meshy.inference.embedded.request import RequestError
from meshy.inference.embedded.session import Named

JOIN_SECONDS = 60.0
# The last resort: a trainer that goes away ends a broadcast at once.
RECEIVE_SECONDS = 300.0


def incoming(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> Named:
    """The tensors that will come, without their values, from the three lists of a request. Raises RequestError."""
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise RequestError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes must be equally many.")
    tensors = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if dtype not in DTYPES:
            raise RequestError(f"{name} has the unknown dtype {dtype!r}; known are {sorted(DTYPES)}.")
        if any(type(size) is not int or size < 0 for size in shape):
            raise RequestError(f"{name} has the impossible shape {list(shape)}.")
        tensors.append((name, torch.empty(shape, dtype=DTYPES[dtype], device="meta")))
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

    def receive(self, group: str, coming: Named, places: Mapping[str, Tensor], packed: bool) -> Named:
        """The tensors that `coming` tells of: those that have a place, there, the others as views that are valid until
        the next call. Raises GroupError; nothing is written any more then, and the group is left.

        packed: they come as one broadcast of all their bytes, in order, and none has a place; else one by one.
        """
        if group not in self._groups:
            raise GroupError(
                f"Group {group} not in {list(self._groups)}. Please call `init_weights_update_group` first."
            )
        joined = self._groups[group]
        places = {name: place for name, place in places.items() if place.is_cuda == joined.on_gpu}
        whole, views = self._room([(name, one) for name, one in coming if name not in places], packed, joined.on_gpu)
        tensors = [(name, places[name] if name in places else views[name]) for name, _ in coming]
        sent: list[Broadcast] = []
        try:
            for tensor in [whole] if packed else [tensor for _, tensor in tensors]:
                sent.append(joined.broadcast(tensor, RECEIVE_SECONDS))
            for one in sent:
                one.wait()
        except GroupError:
            self.leave(group)
            for one in sent:
                one.settle()
            self._buffer = None
            raise
        return tensors

    def _room(self, tensors: Named, packed: bool, on_gpu: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Memory for these tensors, kept for the next time, and each one's part of it, by name."""
        # Each tensor begins where its dtype may; what comes as one piece must have been put together like that.
        step = 1 if packed else 64
        begins, size = [], 0
        for name, tensor in tensors:
            begin = -(-size // step) * step
            if begin % tensor.dtype.itemsize:
                raise GroupError(f"Unaligned received tensor {name}: byte offset {begin}, dtype {tensor.dtype}")
            begins.append(begin)
            size = begin + tensor.nbytes
        device = self._device if on_gpu else torch.device("cpu")
        if self._buffer is None or self._buffer.numel() < size or self._buffer.device != device:
            self._buffer = None
            try:
                self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
            except RuntimeError as error:
                raise GroupError(f"There is no memory for {size} bytes: {error}") from error
        room = self._buffer[:size]
        return room, {
            name: room[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), begin in zip(tensors, begins, strict=True)
        }

    def leave(self, name: str) -> bool:
        """Whether there was such a group."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()
        return group is not None
