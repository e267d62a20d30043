"""Tensors in a shared memory segment, described to another process on this host in the words that SGLang takes.

    segment = SharedSegment(64 * 2**20)                                      # the sender's
    view = segment.view(offset, (4, 8), torch.float32); view.copy_(weight)
    text = segment.payload([("model.norm.weight", view)], receivers=2)       # only names and places are in it
    named = SegmentReader().read(text)                                       # the receiver's: views, nothing is copied

The payload is what `torch.multiprocessing` writes under its sharing strategy "file_system", in base64: a pickle, so
the receiver reads it with an exact list of the names that may stand in it. No setting of torch is touched.

Two processes stand by a segment, each in a session of its own. A shell removes the segment's name when its owner ends,
however it ends. torch_shm_manager, which torch starts and SGLang wants to be connected to, would do so only when the
last receiver has ended too; until then it stays, and keeps open what the owner had as standard output.
"""

from __future__ import annotations

import base64
import binascii
import io
import mmap
import os
import pickle
import shutil
import subprocess
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

ALIGNMENT = 64  # views at multiples of it are fast and fit every dtype
KEPT_SEGMENTS = 2  # that a reader keeps mapped: a sender's current one, and the one it had before it grew
SHARED_MEMORY = "/dev/shm"
# Each receiver gives up one count of the segment's header when it opens it, and the one that comes to zero removes the
# name. `payload` adds them; these are for a payload that is delivered again.
SPARE_COUNTS = 10_000
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip

Named = Sequence[tuple[str, Tensor]]


class PayloadError(ValueError):
    """A payload that cannot be read, or whose segment is not (or no longer) on this host. Says why."""


class SegmentError(RuntimeError):
    """A shared memory segment that cannot be had. Says why."""


def align(offset: int) -> int:
    """The next offset at which a view may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


# Sending --------------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """Stands in a pickle for `function(*arguments)`, evaluated where it is read."""

    function: Any
    arguments: tuple[Any, ...]


class _Writer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return (value.function, value.arguments) if isinstance(value, _Call) else NotImplemented


class SharedSegment:
    """`size` bytes that other processes of this host can read while this object lives; `bytes` is all of them.

    Raises SegmentError where shared memory has no room for them.
    """

    def __init__(self, size: int) -> None:
        try:
            self._storage: Any = torch.UntypedStorage._new_using_filename_cpu(size)
        except RuntimeError as error:
            room = shutil.disk_usage(SHARED_MEMORY)
            raise SegmentError(
                f"Cannot have a shared segment of {size} bytes; {SHARED_MEMORY} has {room.free} of {room.total} bytes "
                f"free: {error}. Make it larger (containers: --shm-size), or send smaller buckets."
            ) from error
        path = SHARED_MEMORY + self._storage._share_filename_cpu_()[1].decode()
        # `read` returns when this process has closed the pipe, or has ended.
        script = 'read -r end; exec rm -f -- "$0"'
        guard = subprocess.Popen(
            ["sh", "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        weakref.finalize(self, _remove, guard)
        for _ in range(SPARE_COUNTS):
            self._storage._shared_incref()
        self.size = size
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(self._storage)

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of that shape from byte `offset` on, which `align` has given."""
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[offset:end].view(dtype).view(torch.Size(shape))

    def payload(self, named: Named, receivers: int) -> str:
        """What `receivers` processes (replicas times their tp) are sent, each once; every tensor is a `view`."""
        for _ in range(receivers):
            self._storage._shared_incref()
        arguments = (torch.UntypedStorage, *self._storage._share_filename_cpu_())
        storage = _Call(reductions.rebuild_storage_filename, arguments)
        typed = {tensor.dtype: _Call(reductions.rebuild_typed_storage, (storage, tensor.dtype)) for _, tensor in named}
        items = []
        for name, tensor in named:
            if tensor.untyped_storage().data_ptr() != self._storage.data_ptr():
                raise ValueError(f"{name} does not lie in the shared segment.")
            place = (tensor.storage_offset(), tensor.size(), tensor.stride(), False)
            items.append((name, _Call(reductions.rebuild_tensor, (Tensor, typed[tensor.dtype], place))))
        buffer = io.BytesIO()
        _Writer(buffer).dump(items)
        return base64.b64encode(buffer.getvalue()).decode()


def _remove(guard: subprocess.Popen[bytes]) -> None:
    assert guard.stdin is not None
    guard.stdin.close()
    guard.wait()


# Receiving ------------------------------------------------------------------------------------------------------------


class SegmentReader:
    """Reads payloads. The last segments stay mapped, so that a sender who uses one again and again has it mapped once.
    The tensors are views: they show what the sender writes until it is told that they are no longer needed.
    """

    def __init__(self) -> None:
        self._mapped: OrderedDict[tuple[str, int], Tensor] = OrderedDict()

    def read(self, payload: str) -> list[tuple[str, Tensor]]:
        """The named tensors. Raises PayloadError."""
        try:
            value = _Reader(base64.b64decode(payload, validate=True), self._segment).load()
        except PayloadError:
            raise
        except (binascii.Error, pickle.UnpicklingError, EOFError, ValueError) as error:
            raise PayloadError(f"The payload cannot be read: {error}") from error
        except Exception as error:  # a pickle can make any call fail in any way
            raise PayloadError(f"The payload cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(value, list) or not all(_is_named(item) for item in value):
            raise PayloadError("The payload must be a list of pairs of a name and a tensor.")
        return [(name, tensor) for name, tensor in value]

    def _segment(self, name: str, size: int) -> Tensor:
        """uint8 [size]: the bytes of a segment, which torch precedes by a header."""
        path = SHARED_MEMORY + name
        if not name.startswith("/") or "/" in name[1:]:
            raise PayloadError(f"{name!r} does not name a shared memory segment.")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise PayloadError(
                f"The shared memory segment {path} is not on this host, or no longer: {error.strerror}"
            ) from error
        try:
            status = os.fstat(descriptor)
            key = (name, status.st_ino)
            if status.st_size < size:
                raise PayloadError(f"The shared memory segment {path} has {status.st_size} bytes, not {size}.")
            if key not in self._mapped:
                self._mapped[key] = torch.frombuffer(mmap.mmap(descriptor, status.st_size), dtype=torch.uint8)
        finally:
            os.close(descriptor)
        self._mapped.move_to_end(key)
        while len(self._mapped) > KEPT_SEGMENTS:
            self._mapped.popitem(last=False)
        return self._mapped[key][status.st_size - size :]


def _is_named(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor)


class _Reader(pickle.Unpickler):
    """Knows the few names that describe tensors in shared memory, and does for each only what is meant by it."""

    def __init__(self, data: bytes, segment: Any) -> None:
        super().__init__(io.BytesIO(data))
        self._segment = segment
        self._meanings: dict[tuple[str, str], Any] = {
            ("torch.multiprocessing.reductions", "rebuild_storage_filename"): self._storage,
            ("torch.multiprocessing.reductions", "rebuild_typed_storage"): self._typed,
            ("torch.multiprocessing.reductions", "rebuild_tensor"): self._tensor,
            ("torch", "Size"): self._size,
            # Types that are only passed on to the above.
            ("torch", "Tensor"): None,
            ("torch", "UntypedStorage"): None,
            ("torch.storage", "UntypedStorage"): None,
            ("torch.nn.parameter", "Parameter"): None,
            **{("torch", name): dtype for name, dtype in DTYPES.items()},
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._meanings:
            raise PayloadError(
                f"{module}.{name} may not stand in a payload; tensors must be shared by name: call "
                'torch.multiprocessing.set_sharing_strategy("file_system") before they are serialised.'
            )
        return self._meanings[module, name]

    def _storage(self, kind: None, manager: bytes, name: bytes, size: int) -> Tensor:
        segment: Tensor = self._segment(name.decode(), size)
        return segment

    def _typed(self, storage: Tensor, dtype: torch.dtype) -> tuple[Tensor, torch.dtype]:
        return storage, dtype

    def _size(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def _tensor(self, kind: None, typed: tuple[Tensor, torch.dtype], metadata: tuple[Any, ...]) -> Tensor:
        storage, dtype = typed
        offset, shape, stride, _ = metadata
        whole = storage[: storage.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(shape, stride, offset + whole.storage_offset())
