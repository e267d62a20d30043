"""The process group over which one trainer broadcasts new weights to the ranks of the engines.

It is wire-compatible with the group that SGLang makes on `/init_weights_update_group` (its ranks come after the
trainer's rank 0), stands beside torch's default group, and needs none. Rank 0 holds the store:

    store = serve_store(host, port, timeout)                       # once in the trainer's life
    group = join(store, rank=0, world_size=n, name="weights-1", backend="gloo", timeout=30)
    sent = group.broadcast(flat, deadline=60)                      # flat: uint8 [bytes]; returns at once
    sent.wait()                                                    # GroupError when a rank is gone or too slow
    group.close()                                                  # always; after a GroupError it is of no more use

`join` returns when every rank has joined, so the engines must be asked to at the same time, from another thread. A name
is used once in a store's life.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, Store, TCPStore

POLL = 0.001  # seconds between two looks at a broadcast on a GPU, whose end cannot be awaited with a deadline
# Device names under which torch files the keys of a backend; part of what all ranks must agree on.
_STORE_KEY = {"gloo": "cpu", "nccl": "cuda"}


class GroupError(RuntimeError):
    """Ranks did not come together, or a broadcast broke off. The group is broken: close it and join a new one."""


def serve_store(host: str, port: int, timeout: float) -> TCPStore:
    """The store where ranks meet, served by this process as long as the object lives; port 0: any, see `.port`.

    Raises GroupError where the port is taken. timeout: seconds that reading from it may take.
    """
    try:
        return TCPStore(host, port, None, is_master=True, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    except RuntimeError as error:
        raise GroupError(f"Cannot serve the store of the update group on {host}:{port}: {plain(error)}") from error


def reach_store(host: str, port: int, world_size: int, timeout: float) -> TCPStore:
    """The same store from another process. Raises GroupError when nobody serves it for `timeout` seconds."""
    try:
        return TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise GroupError(f"Cannot reach the store of the update group on {host}:{port}: {plain(error)}") from error


def join(store: Store, *, rank: int, world_size: int, name: str, backend: str, timeout: float) -> UpdateGroup:
    """Meet all other ranks. backend: gloo for tensors on the host, nccl on CUDA devices. timeout: seconds.

    Raises GroupError when a rank does not come in time.
    """
    if backend not in _STORE_KEY:
        raise GroupError(f"The update group can use the backends {sorted(_STORE_KEY)}, not {backend!r}.")
    # The names under which torch itself, called as SGLang calls it, files what the ranks tell each other.
    mine = PrefixStore(f"{_STORE_KEY[backend]}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    make = _gloo if backend == "gloo" else _nccl
    try:
        return UpdateGroup(make(mine, rank, world_size, timedelta(seconds=timeout)), rank, world_size, name, backend)
    except RuntimeError as error:
        who = f"Rank {rank} of {world_size} could not join the update group {name!r} within {timeout:.0f} s"
        raise GroupError(f"{who}: {plain(error)}") from error


def _gloo(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, world_size, timeout=timeout)


def _nccl(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    # By default torch's watchdog ends the process when a peer is lost; here the deadline of the broadcast decides.
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        return ProcessGroupNCCL(store, rank, world_size, options)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Broadcast:
    """One broadcast on its way. The tensor must not be touched before `wait` has returned."""

    def __init__(self, work: Any, flat: Tensor, deadline: float, where: str) -> None:
        self._work: Any = work  # None once it has ended: connections stay open as long as somebody holds it
        self._flat = flat
        self._end = time.monotonic() + deadline
        self._what = f"The broadcast of {flat.nbytes} bytes in {where}"
        self._failure: str | None = None

    def wait(self) -> None:
        """Until this rank has sent or received all. Raises GroupError when it failed or its deadline has passed."""
        work = self._work
        if work is not None:
            try:
                if self._flat.is_cuda:
                    self._poll(work)
                else:
                    work.wait()
            except RuntimeError as error:
                self._failure = plain(error)
            self._work = None
        if self._failure is not None:
            raise GroupError(f"{self._what} failed: {self._failure}")

    def _poll(self, work: Any) -> None:
        while not work.is_completed():
            if time.monotonic() > self._end:
                raise RuntimeError("it did not end before its deadline")
            time.sleep(POLL)
        if (failure := work.exception()) is not None:
            raise RuntimeError(str(failure))

    @property
    def ended(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def settle(self) -> None:
        """`wait` for those who do not ask for the outcome."""
        with suppress(GroupError):  # raised again to whoever waits
            self.wait()


class UpdateGroup:
    """A group whose rank 0 sends. Not to be used by two threads at once."""

    def __init__(self, backend: Any, rank: int, world_size: int, name: str, backend_name: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.name = name
        self.on_gpu = backend_name == "nccl"
        self._running: list[Broadcast] = []
        self._backend: list[Any] = [backend]  # empty once closed
        weakref.finalize(self, _drop, self._backend, self._running)

    def broadcast(self, flat: Tensor, deadline: float) -> Broadcast:
        """Start sending (rank 0) or receiving (all others) a contiguous tensor; other ranks may see it as another
        type of as many bytes. Several may be on their way, in the same order on all ranks. deadline: seconds until it
        fails.
        """
        if not self._backend:
            raise GroupError(f"The update group {self.name!r} is closed.")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=deadline)
        where = f"the update group {self.name!r} (rank {self.rank} of {self.world_size})"
        try:
            work = self._backend[0].broadcast([flat], options)
        except RuntimeError as error:
            raise GroupError(f"A broadcast in {where} could not be started: {plain(error)}") from error
        for one in [one for one in self._running if one.ended]:
            one.settle()
            self._running.remove(one)
        self._running.append(Broadcast(work, flat, deadline, where))
        return self._running[-1]

    def close(self) -> None:
        """Leave. Returns at once, and what other ranks still await from this one fails at once; where a broadcast is
        held up by another rank, both end at its deadline, in the background. May be called twice.
        """
        if self._backend and self.on_gpu:
            self._backend[0].abort()
        # The connections close with the last reference to backend and works, which waits for what is on its way.
        if not _drop(self._backend, self._running):
            held = list(self._backend), list(self._running)
            threading.Thread(target=_outlive, args=held, name="update-group-end", daemon=True).start()
            self._backend.clear()


def _drop(backend: list[Any], running: list[Broadcast]) -> bool:
    """Let go of a backend whose broadcasts have all ended. Whether they have. Also done when Python ends: torch would
    abort the process if a backend were left then.
    """
    if not all(one.ended for one in running):
        return False
    for one in running:
        one.settle()
    running.clear()
    backend.clear()
    return True


def _outlive(backend: list[Any], running: list[Broadcast]) -> None:
    """Hold the backend until all its broadcasts have ended, with whatever outcome."""
    for one in running:
        one.settle()
    backend.clear()


def plain(error: RuntimeError) -> str:
    """The message of an error of torch's C++ code, without the place in its source and the stack."""
    message = str(error).partition("\nException raised from")[0].partition(" This is typically caused")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", message).strip()
