"""The books of one partition: which rows live, who has them, who may have them next, what they wait for. No I/O.

What is produced and consumed stands in TransferQueue's own `DataPartitionStatus`; this adds the uid of every row, the
order in which rows were created, and the bound on live rows. Rows are handed out oldest first: row indexes are used
again, so their order says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from meshy.columns import UID, Consumer, PartitionContract, ack_column
from meshy.queue.errors import DuplicateUid, QueueFull, Refused, StaleRows, UnknownName

RESERVATION_SECONDS = 300.0
"""A row that was reserved and never written (its producer died in between) is free again after this time. Longer than
any deadline, and even a later write would be refused."""


class Reservation(NamedTuple):
    """since: by the controller's clock, seconds. sender: who is to write the row."""

    since: float
    sender: str


class Taken(NamedTuple):
    """What a `take` got: nothing while too few are ready, or alive."""

    indexes: list[int]
    uids: list[str]
    ready: int


class Ledger:
    """status: TransferQueue's DataPartitionStatus of the partition."""

    def __init__(self, contract: PartitionContract, capacity: int, status: Any) -> None:
        self.contract = contract
        self.capacity = capacity
        self.status = status
        self.uids: dict[int, str] = {}
        """Row index -> uid, of rows that are written or reserved, oldest first."""
        self.reserved: dict[int, Reservation] = {}
        """Row index -> by whom it was reserved, of rows that are not written yet."""
        self._holders: dict[str, dict[int, str]] = {c.name: {} for c in contract.consumers.values() if not c.end}
        """Reader that acknowledges -> row index -> the sender that took the row and has not acknowledged it."""
        self._live: set[str] = set()
        self._order: dict[int, int] = {}
        self._next = 0

    # Creating rows ----------------------------------------------------------------------------------------------------

    def check_room(self, uids: Sequence[str]) -> None:
        """Raise QueueFull or DuplicateUid if these rows may not be created."""
        if len(self.uids) + len(uids) > self.capacity:
            raise QueueFull(
                f"partition {self.contract.name!r} holds {len(self.uids)} rows of at most {self.capacity}; {len(uids)} "
                "more were not written. Let the producer wait for its budget, or declare more in its live_rows()"
            )
        twice = len(set(uids)) < len(uids) or not self._live.isdisjoint(uids)
        if twice:
            seen: set[str] = set()
            uid = next(uid for uid in uids if uid in self._live or uid in seen or seen.add(uid))  # type: ignore[func-returns-value]
            raise DuplicateUid(f"partition {self.contract.name!r} has a row {uid!r} already; nothing was written")

    def reserve(self, indexes: Sequence[int], uids: Sequence[str], now: float, sender: str) -> None:
        for index, uid in zip(indexes, uids, strict=True):
            self.uids[index] = uid
            self.reserved[index] = Reservation(now, sender)
            self._order[index] = self._next
            self._next += 1
        self._live.update(uids)

    def lapsed(self, now: float) -> list[int]:
        """Reservations too old to be kept."""
        return [index for index, it in self.reserved.items() if now - it.since > RESERVATION_SECONDS]

    def reserved_by(self, sender: str) -> list[int]:
        return [index for index, reservation in self.reserved.items() if reservation.sender == sender]

    def forget(self, indexes: Sequence[int]) -> None:
        """Strike rows out: cleared, or reserved in vain."""
        for index in indexes:
            self._live.discard(self.uids.pop(index))
            self.reserved.pop(index, None)
            self._order.pop(index)
        for held in self._holders.values():
            for index in indexes:
                held.pop(index, None)

    def fence(self, indexes: Sequence[int], uids: Sequence[str], what: str) -> None:
        """Raise StaleRows unless these rows live and carry these uids."""
        for index, uid in zip(indexes, uids, strict=True):
            held = self.uids.get(index)
            if held != uid:
                now = "is empty" if held is None else f"holds {held!r}"
                raise StaleRows(
                    f"{what} of {uid!r} in {self.contract.name!r} refused: row {index} was cleared and now {now}"
                )

    # Handing rows out -------------------------------------------------------------------------------------------------

    def consumer(self, name: str) -> Consumer:
        if name not in self.contract.consumers:
            raise UnknownName(f"partition {self.contract.name!r} has no consumer {name!r}")
        return self.contract.consumers[name]

    def take(self, consumer: str, at_least: int, at_most: int | None, alive: int, sender: str) -> Taken:
        """The oldest rows that are complete for the consumer and that it has not had, marked as consumed."""
        ready = self._ready(self.consumer(consumer))
        if len(ready) < at_least or (alive and int(self._produced(UID.name).sum()) < alive):
            return Taken([], [], len(ready))
        taken = sorted(ready, key=self._order.__getitem__)[:at_most]
        self.status.mark_consumed(consumer, taken)
        if consumer in self._holders:
            self._holders[consumer].update(dict.fromkeys(taken, sender))
        return Taken(taken, [self.uids[index] for index in taken], len(ready))

    def _ready(self, consumer: Consumer) -> list[int]:
        everywhere = [column for column in consumer.columns if column not in consumer.routed]
        ready: list[int] = self.status.scan_data_status(everywhere or [UID.name], consumer.name)
        if not ready or not consumer.routed:
            return ready
        complete = torch.ones(len(ready), dtype=torch.bool)
        for column, routes in consumer.routed.items():
            complete &= self._produced(column)[ready] | ~self._has_any(routes)[ready]
        return [index for index, whole in zip(ready, complete.tolist(), strict=True) if whole]

    def give_back(self, consumer: str, indexes: Iterable[int], uids: Iterable[str]) -> None:
        """Undo a take that nobody received."""
        self.consumer(consumer)
        self._return(consumer, [index for index, uid in zip(indexes, uids, strict=True) if self.uids.get(index) == uid])

    def _return(self, consumer: str, indexes: Sequence[int]) -> None:
        self.status.consumption_status[consumer][list(indexes)] = 0
        for index in indexes:
            self._holders.get(consumer, {}).pop(index, None)

    def acknowledged(self, indexes: Sequence[int], columns: Sequence[str]) -> None:
        """These columns were written; where one is an acknowledgement, its reader has the rows in its hands no more."""
        for consumer, held in self._holders.items():
            if ack_column(consumer) in columns:
                for index in indexes:
                    held.pop(index, None)

    def return_from(self, sender: str) -> int:
        """A dead sender's rows that it took and had not acknowledged are ready again. How many these are."""
        count = 0
        for consumer, held in self._holders.items():
            if rows := [index for index, holder in held.items() if holder == sender]:
                self._return(consumer, rows)
                count += len(rows)
        return count

    def check_clear(
        self, consumer: str, indexes: Sequence[int], uids: Sequence[str], unless: str | None = None
    ) -> None:
        """Raise Refused unless the consumer is the one who clears and has taken these rows; also if one of them has
        column `unless`."""
        if not self.consumer(consumer).end:
            end = self.contract.end_consumer.name
            raise Refused(
                f"{consumer!r} may not clear partition {self.contract.name!r}: {end!r} does; acknowledge instead"
            )
        self.fence(indexes, uids, "clear")
        consumed = self.status.consumption_status.get(consumer)
        if consumed is None or not bool(consumed[list(indexes)].all()):
            raise Refused(f"{consumer!r} may clear only rows of {self.contract.name!r} that it has taken")
        if unless is not None and bool(self._produced(unless)[list(indexes)].any()):
            raise Refused(f"a row of {self.contract.name!r} has got column {unless!r} meanwhile; none is cleared")

    # Looking ----------------------------------------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """All rows that are written, oldest first, each with the columns that it has."""
        live = sorted((index for index in self.uids if index not in self.reserved), key=self._order.__getitem__)
        there = {name: self._produced(name)[live].tolist() for name in self.contract.columns}
        columns = [[name for name, has in there.items() if has[i]] for i in range(len(live))]
        return {"indexes": live, "uids": [self.uids[index] for index in live], "columns": columns}

    # The table --------------------------------------------------------------------------------------------------------

    def table(self) -> dict[str, Any]:
        """Rows ready per column; per consumer, rows taken, ready to take, and waiting for which columns."""
        live = torch.tensor([index for index in self.uids if index not in self.reserved], dtype=torch.int64)
        there = {name: self._produced(name)[live] for name in self.contract.columns}
        return {
            "rows": len(live),
            "reserved": len(self.reserved),
            "capacity": self.capacity,
            "columns": {name: int(produced.sum()) for name, produced in there.items()},
            "consumers": {c.name: self._waiting(c, live, there) for c in self.contract.consumers.values()},
        }

    def _produced(self, column: str) -> Bool[Tensor, " indexes"]:
        status = self.status.production_status
        position = self.status.field_name_mapping.get(column)
        return torch.zeros(len(status), dtype=torch.bool) if position is None else status[:, position] == 1

    def _has_any(self, columns: Sequence[str]) -> Bool[Tensor, " indexes"]:
        return torch.stack([self._produced(column) for column in columns]).any(dim=0)

    def _waiting(self, consumer: Consumer, live: Tensor, there: dict[str, Tensor]) -> dict[str, Any]:
        consumed = self.status.consumption_status.get(consumer.name)
        taken = torch.zeros(len(live), dtype=torch.bool) if consumed is None else consumed[live] == 1
        to_come = ~taken if consumer.route is None else ~taken & there[consumer.route]
        complete = torch.ones(len(live), dtype=torch.bool)
        missing = {}
        for column in consumer.columns:
            lacks = ~there[column]
            if column in consumer.routed:
                lacks &= self._has_any(consumer.routed[column])[live]
            complete &= ~lacks
            lacking = int((lacks & to_come).sum())
            if lacking:
                missing[column] = lacking
        return {
            "end": consumer.end,
            "taken": int(taken.sum()),
            "ready": int((complete & to_come).sum()),
            "waiting": int((~complete & to_come).sum()),
            "missing": missing,
        }
