"""The memory of a model and its optimiser given up and taken back, bit for bit: for somebody else's turn on the device.

Storages are emptied, not tensors replaced: FSDP2 keeps views of its own of every shard, and they stay what they are.
"""

import ctypes
import tempfile
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from jaxtyping import UInt8
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshy.device import give_back

Storage = torch.UntypedStorage


class Refuge(Protocol):
    """Where bytes are meanwhile."""

    def keep(self, pieces: list[UInt8[Tensor, " bytes"]]) -> None: ...

    def fill(self, pieces: list[UInt8[Tensor, " bytes"]]) -> None:
        """These, of the same sizes, get what was kept; it is not needed any more."""


class Parking:
    """What a model and its optimisers hold on `device`: parameters, buffers, gradients, optimiser state."""

    def __init__(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
        self._model, self._optimizers, self._device = model, tuple(optimizers), device
        self._refuge: Refuge = Host() if device.type == "cuda" else File()
        self._parked: list[tuple[Storage, int]] = []  # and bytes

    def park(self) -> None:
        """Give their memory back; nothing if it is."""
        if self._parked:
            return
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a root module keeps its gathered parameters after a forward pass alone
        storages = {storage.data_ptr(): storage for storage in self._storages() if storage.nbytes()}.values()
        self._refuge.keep([_bytes(storage) for storage in storages])
        self._parked = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        give_back(self._device)

    def restore(self) -> None:
        """Take it again, if it was given back; everything is as it was."""
        for storage, size in self._parked:
            storage.resize_(size)
        self._refuge.fill([_bytes(storage) for storage, _ in self._parked])
        self._parked = []

    def _storages(self) -> Iterator[Storage]:
        for tensor in self._tensors():
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if local.device.type == self._device.type:
                yield local.untyped_storage()

    def _tensors(self) -> Iterator[Tensor]:
        for parameter in self._model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self._model.buffers()
        for optimizer in self._optimizers:
            for state in optimizer.state.values():  # none before the first step
                yield from (value for value in state.values() if isinstance(value, Tensor))


class File:
    """A temporary file: on a CPU, the tensors' memory and what keeps them would be the same."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="meshy-parked-")  # noqa: SIM115 - as long as this object

    def keep(self, pieces: list[UInt8[Tensor, " bytes"]]) -> None:
        for piece in pieces:
            self._file.write(_buffer(piece))
        self._file.flush()

    def fill(self, pieces: list[UInt8[Tensor, " bytes"]]) -> None:
        self._file.seek(0)
        for piece in pieces:
            count = self._file.readinto(_buffer(piece))
            if count != len(piece):
                raise OSError(f"the file of parked tensors holds {count} bytes where {len(piece)} were written")
        self._file.seek(0)
        self._file.truncate()


class Host:
    """Pinned memory of the host, kept for the next time: to pin it takes far longer than to copy."""

    def __init__(self) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8)

    def keep(self, pieces: list[UInt8[Tensor, " bytes"]]) -> None:
        self._reserve(sum(len(piece) for piece in pieces))
        for place, piece in zip(self._places(pieces), pieces, strict=True):
            place.copy_(piece, non_blocking=True)
        torch.cuda.synchronize()

    def fill(self, pieces: list[UInt8[Tensor, " bytes"]]) -> None:
        for place, piece in zip(self._places(pieces), pieces, strict=True):
            piece.copy_(place, non_blocking=True)
        torch.cuda.synchronize()

    def _places(self, pieces: list[UInt8[Tensor, " bytes"]]) -> tuple[UInt8[Tensor, " bytes"], ...]:
        sizes = [len(piece) for piece in pieces]
        return self._arena[: sum(sizes)].split(sizes)

    def _reserve(self, size: int) -> None:
        """Pinned by hand: torch's own pinned tensors take the next power of two."""
        if size <= len(self._arena):
            return
        runtime = torch.cuda.cudart()
        if len(self._arena):
            torch.cuda.check_error(runtime.cudaHostUnregister(self._arena.data_ptr()))
        self._arena = torch.empty(0, dtype=torch.uint8)  # the smaller one goes first
        self._arena = torch.empty(size, dtype=torch.uint8)
        torch.cuda.check_error(runtime.cudaHostRegister(self._arena.data_ptr(), size, 0))


def _bytes(storage: Storage) -> UInt8[Tensor, " bytes"]:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _buffer(piece: UInt8[Tensor, " bytes"]) -> ctypes.Array[ctypes.c_char]:
    """Of a CPU tensor. Not by way of numpy: a storage that numpy has seen can never be resized again."""
    return (ctypes.c_char * len(piece)).from_address(piece.data_ptr())
