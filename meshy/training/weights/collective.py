"""Weights by broadcast: the trainer's first rank and every rank of every replica in one process group."""

import asyncio
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import TCPStore

from meshy.generation import commands
from meshy.generation.transport import Refused
from meshy.generation.update_group import GroupError, UpdateGroup, join, serve_store
from meshy.training.weights.bracket import Bracket
from meshy.training.weights.buckets import Bucket, Halves


class Collective:
    """host, port: where the group meets; a store listens there for the trainer's life, and groups that follow one
    another are numbered. ranks: how many processes of each replica take part. device: of the memory that buckets are
    sent from, kept over publishes; size: its bytes. Raises GroupError where the port is taken."""

    mode = "collective"
    align = 1  # receivers take the bytes of a bucket one tensor after another

    def __init__(self, host: str, port: int, ranks: Mapping[str, int], size: int, device: torch.device) -> None:
        self.memory = Halves(lambda size: torch.empty(size, dtype=torch.uint8, device=device), size)
        self._host, self._ranks = host, ranks
        self._store: TCPStore = serve_store(host, port, timeout=60.0)
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._group: UpdateGroup | None = None
        self._members: tuple[str, ...] = ()
        self._count = 0

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
            [entry.name for entry in bucket.entries],
            [str(bucket.dtype).removeprefix("torch.")] * len(bucket.entries),
            [entry.shape for entry in bucket.entries],
            group.name,
            version,
        )
        sent = asyncio.create_task(asyncio.to_thread(_broadcast, group, bucket.data, bracket.patience))
        sent.add_done_callback(lambda task: group.close() if task.result() else None)  # nobody waits in vain for it
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
        """A new group of the living; a replica that cannot join is dropped, and there is no group then."""
        self._count += 1
        name, members = f"weights-{self._count}", tuple(bracket.living)
        firsts, size = {}, 1
        for url in members:
            firsts[url], size = size, size + self._ranks[url]
        seconds = bracket.patience

        async def joined(rank: int) -> UpdateGroup:
            return await asyncio.to_thread(
                join, self._store, rank=rank, world_size=size, name=name, backend=self._backend, timeout=seconds
            )

        async def invited(url: str) -> bool:
            order = commands.join_group(
                self._host, self._store.port, first_rank=firsts[url], world_size=size, group=name, backend=self._backend
            )
            if (failure := await bracket.one(url, order)) is None:
                return True
            bracket.drop(url, failure)
            # The others wait for it. Somebody joins in its place, so that they come free at once.
            places = range(firsts[url], firsts[url] + self._ranks[url])
            for outcome in await asyncio.gather(*map(joined, places), return_exceptions=True):
                if isinstance(outcome, UpdateGroup):
                    outcome.close()
            return False

        joining = asyncio.create_task(joined(0))
        came = await asyncio.gather(*map(invited, members))
        try:
            self._group, self._members = await joining, members
        except GroupError as error:
            for url in (url for url, there in zip(members, came, strict=True) if there):
                bracket.drop(url, error)

    async def _leave(self, bracket: Bracket) -> None:
        """No group any more; who still is in it is told, whatever becomes of that."""
        if self._group is None:
            return
        group, self._group = self._group, None
        group.close()
        still = [url for url in self._members if url in bracket.living]
        await asyncio.gather(*(bracket.one(url, commands.leave_group(group.name)) for url in still))

    async def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def _broadcast(group: UpdateGroup, data: Tensor, seconds: float) -> GroupError | None:
    """Sends; what stood against it."""
    try:
        group.broadcast(data, seconds).wait()
    except GroupError as error:
        return error
    return None
