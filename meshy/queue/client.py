"""The typed client of the queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from torch import Tensor

from meshy.columns import Contract, ack_column
from meshy.queue.codec import empty, pack, unpack, unpack_sparse
from meshy.queue.doorbell import Doorbell
from meshy.queue.endpoints import Endpoints
from meshy.queue.errors import ColumnError, QueueClosed, QueueError, QueueTimeout, QueueUnreachable, Refused
from meshy.queue.rights import Rights
from meshy.queue.rows import Rows
from meshy.queue.wire import Wire, sender_of

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""How often a waiter looks although the doorbell has not rung."""

WATCHDOG_SECONDS = 60.0
"""How often a waiter says in the log what it waits for."""

UID = "uid"


class AsyncQueueClient:
    """One caller's access to the queue. Use it in one event loop; `QueueClient` is the same for threads.

    contract: every partition's columns and consumers; the queue must have been started with the same one.
    caller: `<group>.<replica>`, such as `rollout.1`; it says which columns may be written and which consumer takes.
    deadline: seconds within which the queue's processes must answer, else QueueUnreachable names the one that did not.
    life: of the calling process; once another has banished it, everything that this client asks for is Refused.
    former: lives of dead processes that were this caller. They are banished before anything else is asked for.

    Every call may raise QueueUnreachable; what else it raises is said with it (see errors.py).
    """

    def __init__(
        self,
        endpoints: Endpoints,
        contract: Contract,
        caller: str,
        deadline: float = 30.0,
        life: str = "",
        former: Sequence[str] = (),
    ) -> None:
        self.rights = Rights(contract, caller)
        self._life = life
        self._former = tuple(former)
        self.caller = caller
        self._endpoints = endpoints
        self._contract = contract
        self._deadline = deadline
        self._wire: Wire | None = None
        self._doorbell: Doorbell | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._unfinished: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def connect(self) -> None:
        """Reach every process of the queue. Any other call does it first; call it to fail early.

        The queue may still be starting: there is the deadline's time for that. Raises WrongRun where another run's
        queue listens, and Refused where the queue has another contract.
        """
        if self._closed:
            raise QueueClosed(f"{self.caller}: the queue client is closed")
        if self._connecting is None or (self._connecting.done() and self._failed(self._connecting)):
            self._connecting = asyncio.create_task(self._connect())
        await asyncio.shield(self._connecting)

    async def _connect(self) -> None:
        if self._wire is None:
            self._wire = Wire(self._endpoints, self.caller, self._deadline, self._life)
            self._doorbell = Doorbell(self._endpoints, self._wire)
        for life in self._former:
            await self._wire.banish(sender_of(self.caller, life))
        theirs = (await self._wire.controller("hello"))["contract"]
        mine = self._contract.to_json()
        if theirs != mine:
            names = sorted(theirs["partitions"].keys() | mine["partitions"].keys())
            differ = [name for name in names if theirs["partitions"].get(name) != mine["partitions"].get(name)]
            where = f"partitions {', '.join(differ)}" if differ else "capacity"
            raise Refused(f"{self.caller}: the queue was started with another contract; they differ in {where}")
        await self._wire.ping_storage()

    @staticmethod
    def _failed(task: asyncio.Task[None]) -> bool:
        return task.cancelled() or task.exception() is not None

    async def _wired(self) -> Wire:
        await self.connect()
        assert self._wire is not None
        return self._wire

    # Writing ----------------------------------------------------------------------------------------------------------

    async def put(self, partition: str, columns: Mapping[str, Sequence[Any]]) -> Rows:
        """Create rows: one entry a row in every column, `uid` among them. Put whole groups: a call costs milliseconds.

        Scalars: a 1-D tensor, array or list; jagged: a sequence of [L] tensors or lists; jagged2d: of [L, K] tensors;
        str and object: a sequence. Raises UnknownName, ColumnError, QueueFull or DuplicateUid before anything is
        written. When it returns, the rows are recorded and can be taken.
        """
        self.rights.check_writable(partition, columns)
        if UID not in columns:
            raise ColumnError(f"{self.caller}: rows of {partition!r} need a column {UID!r}")
        uids = list(self._pack(partition, {UID: columns[UID]})[UID].values)
        if not uids:
            self._pack(partition, columns)
            return Rows(partition, (), ())
        wire = await self._wired()
        reserving = asyncio.create_task(wire.controller("reserve", partition=partition, uids=uids))
        try:
            await asyncio.sleep(0)  # the request leaves now, and we pack while it is answered
            packed = self._pack(partition, columns)
            reserved = await asyncio.shield(reserving)
            indexes: list[int] = reserved["indexes"]
            await wire.put(indexes, uids, packed, reserved["serial"])
            await wire.controller("commit", partition=partition, indexes=indexes, uids=uids, columns=list(packed))
        except BaseException as error:  # cancellation too: rows that were not recorded must not count as alive
            undone = self._undo(self._release(wire, reserving, partition, uids))
            if not isinstance(error, (asyncio.CancelledError, QueueUnreachable)):
                await asyncio.wait([undone])
            raise
        return Rows(partition, tuple(uids), tuple(indexes))

    @staticmethod
    async def _release(wire: Wire, reserving: asyncio.Task[dict[str, Any]], partition: str, uids: list[str]) -> None:
        try:
            reserved = await reserving
        except QueueError:
            return  # nothing was reserved; the put itself raises this
        await wire.controller("release", partition=partition, indexes=reserved["indexes"], uids=uids)

    async def write(self, rows: Rows, columns: Mapping[str, Sequence[Any]], ack: bool = True) -> None:
        """Add columns to rows, or replace them. ack: also acknowledge the rows if they were taken, which is what a
        reader that scores rows wants.

        Raises StaleRows, and writes nothing, if a row was cleared meanwhile.
        """
        acks = {}
        if ack and rows.consumer is not None and not self._is_end(rows):
            acks[ack_column(rows.consumer)] = [1] * len(rows)
        self.rights.check_writable(rows.partition, [*columns, *acks])
        if UID in columns:
            raise ColumnError(f"{self.caller}: the {UID!r} of a row cannot be changed")
        for name, values in columns.items():
            if len(values) != len(rows):
                raise ColumnError(f"{self.caller}: column {name!r} has {len(values)} entries for {len(rows)} rows")
        packed = self._pack(rows.partition, {**columns, **acks})
        if not packed or not rows:
            return
        wire = await self._wired()
        uids, indexes = list(rows.uids), list(rows.indexes)
        await wire.put(indexes, uids, packed)
        await wire.controller("commit", partition=rows.partition, indexes=indexes, uids=uids, columns=list(packed))

    async def ack(self, rows: Rows) -> None:
        """Say that this consumer is done with rows that it took: they may be cleared."""
        if rows.consumer is None or self._is_end(rows):
            raise Refused(f"{self.caller}: only rows taken by a consumer that does not clear them are acknowledged")
        await self.write(rows, {})

    def _pack(self, partition: str, columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        try:
            return pack(self.rights.partition(partition).columns, columns)
        except ColumnError as error:
            raise ColumnError(f"{self.caller}, partition {partition!r}: {error}") from error

    def _is_end(self, rows: Rows) -> bool:
        consumers = self.rights.partition(rows.partition).consumers
        return rows.consumer is not None and rows.consumer in consumers and consumers[rows.consumer].end

    # Taking -----------------------------------------------------------------------------------------------------------

    async def take(
        self,
        partition: str,
        consumer: str | None = None,
        at_least: int = 1,
        at_most: int | None = None,
        timeout: float | None = None,
        alive: int = 0,
    ) -> Rows:
        """Wait for rows that are complete for the consumer, and take them: nobody else gets them under this name,
        unless this client's life is banished before they are acknowledged.

        Returns as soon as `at_least` are there, oldest first, never more than `at_most`. alive: wait, too, until the
        partition holds so many rows, of whatever consumers, taken or not. timeout: seconds to wait (0: only look), None
        for ever, with a line in the log every minute. Raises QueueTimeout naming what is missing.
        """
        name = self.rights.consumer(partition, consumer)
        if at_least < 1 or (at_most is not None and at_most < at_least):
            raise ValueError(f"take needs 1 <= at_least <= at_most, but got at_least={at_least}, at_most={at_most}")
        if alive > self._contract.capacity[partition]:
            raise ValueError(f"{partition!r} never holds alive={alive} rows, but {self._contract.capacity[partition]}")
        await self.connect()
        assert self._doorbell is not None
        if timeout != 0:
            await self._doorbell.subscribe(partition)
        clock = asyncio.get_running_loop().time
        started = clock()
        warned = started
        while True:
            rung = self._doorbell.armed(partition)
            rows = await self._try_take(partition, name, at_least, at_most, alive)
            if rows:
                return rows
            waited = clock() - started
            if timeout is not None and waited >= timeout:
                raise QueueTimeout(await self._waiting_for(partition, name, at_least, alive, waited))
            if clock() - warned >= WATCHDOG_SECONDS:
                warned = clock()
                logger.warning("%s", await self._waiting_for(partition, name, at_least, alive, waited))
            pause = POLL_SECONDS if timeout is None else min(POLL_SECONDS, timeout - waited)
            await _wait(rung, pause)

    async def _try_take(self, partition: str, consumer: str, at_least: int, at_most: int | None, alive: int) -> Rows:
        """Look once. If we are cancelled while the answer is on its way, the rows go back."""
        wire = await self._wired()
        wanted = {"at_least": at_least, "at_most": at_most, "alive": alive}
        asked = asyncio.create_task(wire.controller("take", partition=partition, consumer=consumer, **wanted))
        try:
            answer = await asyncio.shield(asked)
        except asyncio.CancelledError:
            self._undo(self._give_back(asked, partition, consumer))
            raise
        return Rows(partition, tuple(answer["uids"]), tuple(answer["indexes"]), consumer)

    async def _give_back(self, asked: asyncio.Task[dict[str, Any]], partition: str, consumer: str) -> None:
        answer = await asked
        if answer["uids"]:
            rows = {"indexes": answer["indexes"], "uids": answer["uids"]}
            await (await self._wired()).controller("give_back", partition=partition, consumer=consumer, **rows)

    async def _waiting_for(self, partition: str, consumer: str, at_least: int, alive: int, waited: float) -> str:
        books = (await self.table())[partition]
        reader = books["consumers"][consumer]
        route = self.rights.partition(partition).consumers[consumer].route
        missing = ", ".join(f"{column} in {rows}" for column, rows in reader["missing"].items())
        if books["rows"] < alive:
            why = f"only {books['rows']} are alive"
        elif missing:
            why = f"{reader['waiting']} rows are incomplete, missing {missing}"
        else:
            more = f"more rows with {route}" if route else "more rows"
            why = f"nobody has put {more} ({books['rows']} alive, {reader['taken']} of them taken already)"
        return (
            f"{self.caller}: {consumer!r} has waited {waited:.1f} s for {at_least} rows of {partition!r}"
            f"{f' while {alive} are alive' if alive else ''}; {reader['ready']} are ready; {why}"
        )

    # Reading and clearing ---------------------------------------------------------------------------------------------

    async def read(
        self, rows: Rows, columns: Sequence[str] | None = None, optional: Sequence[str] = ()
    ) -> dict[str, list[Tensor] | Tensor | list[Any]]:
        """The rows' columns; by default those that the consumer declared, without acknowledgements and its route; what
        it waits for only in rows of some routes is optional then.

        Scalars: a 1-D tensor [n]; jagged: a list of n tensors [L]; jagged2d: of [L, K]; str and object: a list. Raises
        StaleRows if a row was cleared meanwhile, MissingColumn for a column that is not there yet.

        optional: columns, of these or more, that rows may lack: always a list, with None for such rows; scalars are
        Python numbers in it.
        """
        partition = self.rights.partition(rows.partition)
        if columns is None:
            consumer = None if rows.consumer is None else partition.consumers[rows.consumer]
            wanted = partition.columns if consumer is None else consumer.columns
            route = None if consumer is None else consumer.route
            columns = [name for name in wanted if not name.startswith("ack.") and name != route]
            routed = () if consumer is None else consumer.routed
            optional = [*optional, *(name for name in columns if name in routed)]
        names = list(dict.fromkeys([*columns, *optional]))
        self.rights.check_readable(rows.partition, names)
        if not rows or not names:
            return {name: [] if name in optional else empty(partition.columns[name]) for name in names}
        required = [name for name in names if name not in optional]
        wire = await self._wired()
        packed, sparse = await wire.get(rows.indexes, rows.uids, required, [n for n in names if n in optional])
        read: dict[str, Any] = {name: unpack(partition.columns[name], packed[name]) for name in required}
        read |= {name: unpack_sparse(partition.columns[name], values) for name, values in sparse.items()}
        return {name: read[name] for name in names}

    async def clear(self, rows: Rows, unless: str | None = None) -> None:
        """Delete rows that this caller's end consumer took, and whose memory and indexes are free again.

        Raises Refused for anybody else, and where a row has column `unless`; StaleRows for rows that are cleared
        already; then nothing is deleted.
        """
        if not rows:
            return
        if not self._is_end(rows) or rows.consumer != self.rights.consumer(rows.partition, rows.consumer):
            end = self.rights.partition(rows.partition).end_consumer.name
            raise Refused(
                f"{self.caller}: only {end!r}, the end consumer of {rows.partition!r}, clears rows that it took"
            )
        clearing = asyncio.create_task(self._clear(await self._wired(), rows, unless))  # all of it, or none
        self._unfinished.add(clearing)
        clearing.add_done_callback(self._unfinished.discard)
        await asyncio.shield(clearing)

    @staticmethod
    async def _clear(wire: Wire, rows: Rows, unless: str | None) -> None:
        which = {"partition": rows.partition, "indexes": list(rows.indexes), "uids": list(rows.uids)}
        await wire.controller("mark_clearing_rows", consumer=rows.consumer, unless=unless, **which)
        await wire.clear(rows.indexes, rows.uids)
        await wire.controller("clear", **which)

    async def watch(self, partition: str) -> asyncio.Event:
        """An event that the partition's next change sets. Take it before a `look`, wait for it after, and look now and
        then all the same: a ring of the doorbell can be lost."""
        self.rights.partition(partition)
        await self.connect()
        assert self._doorbell is not None
        await self._doorbell.subscribe(partition)
        return self._doorbell.armed(partition)

    async def look(self, partition: str) -> list[tuple[Rows, frozenset[str]]]:
        """Every row of a partition, oldest first, taken or not, and the columns that it has."""
        self.rights.partition(partition)
        seen = await (await self._wired()).controller("look", partition=partition)
        return [
            (Rows(partition, (uid,), (index,)), frozenset(columns))
            for uid, index, columns in zip(seen["uids"], seen["indexes"], seen["columns"], strict=True)
        ]

    async def banish(self, caller: str, life: str) -> None:
        """That client's process has ended: nothing that it had sent, and is still on its way, is done any more, and
        rows that it took without acknowledging them can be taken again."""
        await (await self._wired()).banish(sender_of(caller, life))

    async def table(self) -> dict[str, Any]:
        """JSON-able: per partition the rows alive, ready per column; per consumer: taken, ready, waiting, missing."""
        return await (await self._wired()).controller("table")

    # The end ----------------------------------------------------------------------------------------------------------

    def _undo(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Take something back in the background, because the call that did it has failed or was cancelled."""

        def done(task: asyncio.Task[Any]) -> None:
            self._unfinished.discard(task)
            if not task.cancelled() and task.exception() is not None:
                logger.warning("%s: could not take back what a failed call had done: %s", self.caller, task.exception())

        task = asyncio.create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(done)
        return task

    async def close(self, patience: float | None = None) -> None:
        """Finish what must not stay half done, then close every socket. Later calls raise QueueClosed. patience:
        seconds for that (the deadline)."""
        if self._closed:
            return
        if self._unfinished:
            _, late = await asyncio.wait(self._unfinished, timeout=self._deadline if patience is None else patience)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._wire is not None and self._doorbell is not None:
            await self._doorbell.close()
            self._wire.close()

    async def __aenter__(self) -> AsyncQueueClient:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):  # wait_for loses a cancellation that comes together with the event
            await event.wait()
    except TimeoutError:
        return
