"""Weights by broadcast: the trainer's first rank and every rank of every replica in one process group."""

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


class Collective:
    """host, port: where the group meets; a store listens there for the trainer's life, and groups that follow one
    another are numbered. ranks: how many processes of each replica take part. device: that weights are sent from.
    size: bytes that may be held for that. Raises GroupError where the port is taken.

    Small tensors are packed, a quarter of `size` in two halves: each broadcast costs about as much as sending a
    megabyte. Large ones are sent from where they lie, three eighths of `size` at a time while the next ones come."""

    mode = "collective"
    align = 1  # receivers take the bytes of a bucket one tensor after another

    def __init__(self, host: str, port: int, ranks: Mapping[str, int], size: int, device: torch.device) -> None:
        self.memory = Halves(lambda size: torch.empty(size, dtype=torch.uint8, device=device), size // 4)
        self.unpacked: Unpacked | None = Unpacked(least=size // 64, most=size * 3 // 8, device=device)
        self._host, self._ranks = host, ranks
        self._store: TCPStore = serve_store(host, port, timeout=60.0)
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._group: UpdateGroup | None = None
        self._members: tuple[str, ...] = ()
        self._life, self._count = secrets.token_hex(4), 0  # replicas may still know groups of a trainer before

    async def open(self, bracket: Bracket) -> None:
        """A group of exactly the living replicas: the one that is there, or a new one where others are in it."""
        while bracket.living and (self._group is None or self._members != tuple(bracket.living)):
            await self._leave(bracket)
            await self._meet(bracket)

    async def send(self, bracket: Bracket, bucket: Bucket, version: int | None) -> None:
        """Every living replica receives and loads the bucket. If one fails meanwhile, the group is made anew and the
        bucket goes out again to those that are well: loading it twice does no harm. One that refuses twice is dropped.
        """
        refused: set[str] = set()
        while bracket.living:
            await self.open(bracket)
            if not bracket.living:
                return
            failures = await self._attempt(bracket, bucket, version)
            if not failures:
                return
            await self._leave(bracket)
            for url, failure in failures.items():
                if not isinstance(failure, Refused) or url in refused:
                    bracket.drop(url, failure)
                refused.add(url)

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
        )
        pieces = [tensor for _, tensor in bucket.tensors] if bucket.packed is None else [bucket.packed]
        seconds = bracket.patience
        sent = asyncio.create_task(in_thread(lambda: _broadcast(group, pieces, seconds)))
        sent.add_done_callback(lambda task: group.close() if task.cancelled() or task.result() else None)
        answers = await asyncio.gather(*(self._told(bracket, url, order, group) for url in bracket.living))
        failures = {url: failure for url, failure in zip(bracket.living, answers, strict=True) if failure is not None}
        if failures:
            return failures  # the broadcast itself may wait for one of these until its deadline
        if (broken := await sent) is not None:
            return dict.fromkeys(bracket.living, Refused(str(broken), 400))
        return {}

    async def _told(self, bracket: Bracket, url: str, order: commands.Command, group: UpdateGroup) -> Exception | None:
        failure = await bracket.one(url, order)
        if failure is not None:
            group.close()
        return failure

    async def _meet(self, bracket: Bracket) -> None:
        """A new group of the living. A replica that cannot join is dropped, and there is no group then."""
        self._count += 1
        members = tuple(bracket.living)
        size = 1 + sum(self._ranks[url] for url in members)
        meeting = _Meeting(
            self._host, self._store.port, f"weights-{self._life}-{self._count}", size, self._backend, bracket.patience
        )
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
        order = commands.leave_group(group.name)
        await asyncio.gather(*(bracket.one(url, order, LEAVE_SECONDS) for url in self._members))

    async def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class _Meeting:
    """What whoever joins a new group must know. seconds: that it may take."""

    def __init__(self, host: str, port: int, name: str, size: int, backend: str, seconds: float) -> None:
        self._host, self._port, self._name, self._size = host, port, name, size
        self._backend, self._seconds = backend, seconds
        self._standing_in: set[asyncio.Task[UpdateGroup]] = set()

    def invitation(self, ranks: range) -> commands.Command:
        return commands.join_group(
            self._host,
            self._port,
            first_rank=ranks.start,
            world_size=self._size,
            group=self._name,
            backend=self._backend,
        )

    async def join(self, rank: int) -> UpdateGroup:
        def call() -> UpdateGroup:
            store = reach_store(self._host, self._port, self._size, self._seconds)  # one is for one thread at a time
            return join(
                store, rank=rank, world_size=self._size, name=self._name, backend=self._backend, timeout=self._seconds
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
