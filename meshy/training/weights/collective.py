"""Weights by broadcast: from the trainer's first rank to every rank of every replica, in process groups of them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import TCPStore

from meshy.generation import commands
from meshy.generation.in_thread import in_thread
from meshy.generation.transport import Refused, Unavailable
from meshy.generation.update_group import GroupError, UpdateGroup, join, reach_store, serve_store
from meshy.training.weights.bracket import Bracket
from meshy.training.weights.buckets import Bucket, Halves, Unpacked

GRACE = 2.0  # seconds for others to join after one has failed to
LEAVE_SECONDS = 1.0  # within which a replica that is well has left a group
PROBE_SECONDS = 1.0  # within which one that is well answers


class Collective:
    """host, port: where groups meet; a store listens there for the trainer's life, and groups that follow one another
    are numbered. ranks: how many processes of each replica take part. device: that weights are sent from. size: bytes
    that may be held for that. Raises GroupError where the port is taken.

    Small tensors are packed, a quarter of `size` in two halves: each broadcast costs about as much as sending a
    megabyte. Large ones are sent from where they lie, three eighths of `size` at a time while the next ones come.

    With NCCL, all replicas are in one group. With gloo, each has a group of its own: gloo cannot break a broadcast off,
    and where replicas pass the bytes on to one another, one that hangs would hold up the others.

    A broadcast to a replica that hangs may go on after the replica was dropped, from memory that holds other bytes by
    then. That does no harm: the replica stays paused until it has been given all weights anew.
    """

    mode = "collective"
    align = 1  # receivers take the bytes of a bucket one tensor after another

    def __init__(self, host: str, port: int, ranks: Mapping[str, int], size: int, device: torch.device) -> None:
        self.memory = Halves(lambda size: torch.empty(size, dtype=torch.uint8, device=device), size // 4)
        self.unpacked: Unpacked | None = Unpacked(least=size // 64, most=size * 3 // 8, device=device)
        meetings = _Meetings(host, serve_store(host, port, timeout=60.0), "nccl" if device.type == "cuda" else "gloo")
        shares = [list(ranks)] if device.type == "cuda" else [[url] for url in ranks]
        self._lanes = [_Lane(meetings, {url: ranks[url] for url in share}) for share in shares]

    async def open(self, bracket: Bracket) -> None:
        await asyncio.gather(*(lane.open(bracket) for lane in self._lanes))

    async def send(self, bracket: Bracket, bucket: Bucket, version: int | None) -> None:
        """Every living replica receives and loads the bucket; who fails is dropped."""
        await asyncio.gather(*(lane.send(bracket, bucket, version) for lane in self._lanes))

    async def close(self) -> None:
        for lane in self._lanes:
            lane.close()


class _Lane:
    """Replicas that receive in one group. ranks: of each, by its URL."""

    def __init__(self, meetings: _Meetings, ranks: Mapping[str, int]) -> None:
        self._meetings, self._ranks = meetings, ranks
        self._group: UpdateGroup | None = None
        self._members: tuple[str, ...] = ()

    def _living(self, bracket: Bracket) -> tuple[str, ...]:
        return tuple(url for url in bracket.living if url in self._ranks)

    async def open(self, bracket: Bracket) -> None:
        """A group of exactly the living replicas: the one that is there, or a new one where others are in it."""
        while (living := self._living(bracket)) and (self._group is None or self._members != living):
            await self._leave(bracket)
            await self._meet(bracket, living)

    async def send(self, bracket: Bracket, bucket: Bucket, version: int | None) -> None:
        """If one fails, the group is made anew and the bucket goes out again to those that are well: loading it twice
        does no harm. Who fails twice is dropped, and at once who does not answer at all."""
        failed: set[str] = set()
        while self._living(bracket):
            await self.open(bracket)
            if not self._living(bracket):
                return
            failures = await self._attempt(bracket, bucket, version)
            if not failures:
                return
            await self._leave(bracket)
            for url, failure in failures.items():
                if url in failed or not (isinstance(failure, Refused) or await self._only_held_up(bracket, url)):
                    bracket.drop(url, failure)
                failed.add(url)

    async def _only_held_up(self, bracket: Bracket, url: str) -> bool:
        """Whether a replica that did not get its bytes in time is well, so that another may be to blame."""
        return len(self._members) > 1 and await bracket.one(url, commands.MODEL_INFO, PROBE_SECONDS) is None

    async def _attempt(self, bracket: Bracket, bucket: Bucket, version: int | None) -> dict[str, Exception]:
        """One broadcast; what stood against it, by replica."""
        group = self._group
        assert group is not None
        order = commands.update_from_broadcast(
            [name for name, _ in bucket.tensors],
            [str(bucket.dtype).removeprefix("torch.")] * len(bucket.tensors),
            [tuple(tensor.shape) for _, tensor in bucket.tensors],
            group.name,
            version,
            packed=bucket.packed is not None,
            flush=bracket.flush,
        )
        pieces = [tensor for _, tensor in bucket.tensors] if bucket.packed is None else [bucket.packed]
        seconds = bracket.patience
        sent = asyncio.create_task(in_thread(lambda: _broadcast(group, pieces, seconds)))
        sent.add_done_callback(lambda task: group.close() if task.cancelled() or task.result() else None)
        answers = await asyncio.gather(*(self._told(bracket, url, order, group) for url in self._members))
        failures = {url: failure for url, failure in zip(self._members, answers, strict=True) if failure is not None}
        if failures:
            return failures  # the broadcast itself may wait for one of these until its deadline
        if (broken := await sent) is not None:
            return dict.fromkeys(self._members, Refused(str(broken), 400))
        return {}

    async def _told(self, bracket: Bracket, url: str, order: commands.Command, group: UpdateGroup) -> Exception | None:
        failure = await bracket.one(url, order)
        if failure is not None:
            group.close()
        return failure

    async def _meet(self, bracket: Bracket, members: tuple[str, ...]) -> None:
        """A new group of the living. A replica that cannot join is dropped, and there is no group then."""
        size = 1 + sum(self._ranks[url] for url in members)
        meeting = self._meetings.call(size, bracket.patience)
        mine = asyncio.create_task(meeting.join(0))
        ranks: dict[str, range] = {}
        invited: dict[asyncio.Task[Refused | Unavailable | None], str] = {}
        first = 1
        for url in members:
            ranks[url], first = range(first, first + self._ranks[url]), first + self._ranks[url]
            invited[asyncio.create_task(bracket.one(url, meeting.invitation(ranks[url])))] = url
        pending, failed = set(invited), False
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=GRACE if failed else None, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:  # they wait for one that is gone; they are asked again without it
                break
            for task in done:
                if (failure := task.result()) is not None:
                    failed = True
                    bracket.drop(invited[task], failure)
                    meeting.stand_in(ranks[invited[task]])
        for task in pending:
            task.cancel()
        if failed:
            mine.add_done_callback(_close)
            await self._tell_to_leave(bracket, meeting.name, members)
            return
        try:
            self._group, self._members = await mine, members
        except GroupError as error:
            for url in members:
                bracket.drop(url, error)

    async def _leave(self, bracket: Bracket) -> None:
        """No group any more. Every member is told, whatever becomes of that: also those that take no part in this
        bracket are well, perhaps, and would keep it."""
        if self._group is None:
            return
        group, self._group = self._group, None
        group.close()
        await self._tell_to_leave(bracket, group.name, self._members)

    @staticmethod
    async def _tell_to_leave(bracket: Bracket, group: str, members: tuple[str, ...]) -> None:
        order = commands.leave_group(group)
        await asyncio.gather(*(bracket.one(url, order, LEAVE_SECONDS) for url in members))

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class _Meetings:
    """Calls groups together, each under a name of its own."""

    def __init__(self, host: str, store: TCPStore, backend: str) -> None:
        self._host, self._store, self._backend = host, store, backend
        self._life, self._count = secrets.token_hex(4), 0  # replicas may still know groups of a trainer before

    def call(self, size: int, seconds: float) -> _Meeting:
        self._count += 1
        name = f"weights-{self._life}-{self._count}"
        return _Meeting(self._host, self._store.port, name, size, self._backend, seconds)


class _Meeting:
    """What whoever joins a new group must know. seconds: that it may take."""

    def __init__(self, host: str, port: int, name: str, size: int, backend: str, seconds: float) -> None:
        self.name = name
        self._host, self._port, self._size = host, port, size
        self._backend, self._seconds = backend, seconds
        self._standing_in: set[asyncio.Task[UpdateGroup]] = set()

    def invitation(self, ranks: range) -> commands.Command:
        return commands.join_group(
            self._host,
            self._port,
            first_rank=ranks.start,
            world_size=self._size,
            group=self.name,
            backend=self._backend,
        )

    async def join(self, rank: int) -> UpdateGroup:
        def call() -> UpdateGroup:
            store = reach_store(self._host, self._port, self._size, self._seconds)  # one is for one thread at a time
            return join(
                store, rank=rank, world_size=self._size, name=self.name, backend=self._backend, timeout=self._seconds
            )

        return await in_thread(call)

    def stand_in(self, ranks: range) -> None:
        """Join in the place of a replica that will not come, for others wait until the group is complete."""
        for rank in ranks:
            task = asyncio.create_task(self.join(rank))
            self._standing_in.add(task)
            task.add_done_callback(_close)
            task.add_done_callback(self._standing_in.discard)


def _close(joined: asyncio.Task[UpdateGroup]) -> None:
    """Of no use any more, if it came about at all."""
    if not joined.cancelled() and joined.exception() is None:
        joined.result().close()


def _broadcast(group: UpdateGroup, pieces: Sequence[Tensor], seconds: float) -> GroupError | None:
    """Sends; what stood against it."""
    try:
        for sent in [group.broadcast(piece, seconds) for piece in pieces]:
            sent.wait()
    except GroupError as error:
        return error
    return None
