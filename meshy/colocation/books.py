"""The ledger of a ring in the queue: looking at it and writing into it. A thin shell round `turns`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshy.colocation.columns import FREED, GRANT, PRESSES, REQUEST, partition_of
from meshy.colocation.turns import Clear, Give, Grant, Ledger, Row
from meshy.queue.client import AsyncQueueClient
from meshy.queue.errors import QueueTimeout, Refused, StaleRows
from meshy.queue.rows import Rows

TURN = GRANT[0].name


class Books:
    """Use it in the client's event loop. What a call writes can be seen by the next `look`."""

    def __init__(self, client: AsyncQueueClient, ring: str) -> None:
        self.partition = partition_of(ring)
        self._client = client
        self._known: dict[str, Row] = {}
        self._handles: dict[str, Rows] = {}
        self._taken: dict[str, Rows] = {}

    async def look(self) -> Ledger:
        """All rows as they are now; only what has changed is read."""
        while True:
            seen = await self._client.look(self.partition)
            try:
                await self._read(seen)
            except StaleRows:
                continue  # cleared since; the next look does not show them
            return Ledger(self._known[rows.uids[0]] for rows, _ in seen)

    async def _read(self, seen: Sequence[tuple[Rows, frozenset[str]]]) -> None:
        self._handles = {rows.uids[0]: rows for rows, _ in seen}
        self._known = {uid: row for uid, row in self._known.items() if uid in self._handles}
        fresh = [rows for rows, _ in seen if rows.uids[0] not in self._known]
        if fresh:
            for uid, told in (await self._columns(fresh, REQUEST)).items():
                self._known[uid] = Row(**told)
        granted = [rows for rows, columns in seen if TURN in columns and self._known[rows.uids[0]].grant is None]
        if granted:
            for uid, told in (await self._columns(granted, GRANT)).items():
                told["payload"] = json.loads(told["payload"])
                self._known[uid] = replace(self._known[uid], grant=Grant(at=told.pop("granted"), **told))
        for rows, columns in seen:
            row = self._known[rows.uids[0]]
            self._known[row.uid] = replace(row, presses=PRESSES.name in columns, freed=FREED.name in columns)

    async def _columns(self, rows: Sequence[Rows], wanted: Sequence[Any]) -> dict[str, dict[str, Any]]:
        whole = Rows.concat(rows)
        columns = await self._client.read(whole, [column.name for column in wanted])
        plain = {name: values if isinstance(values, list) else values.tolist() for name, values in columns.items()}
        return {uid: {name: values[i] for name, values in plain.items()} for i, uid in enumerate(whole.uids)}

    # Writing: False where a row is gone or was changed meanwhile; then nothing was written. ---------------------------

    async def ask(self, replica: str, life: str) -> None:
        row = {"uid": f"{replica}-{uuid.uuid4().hex[:12]}", "replica": replica, "life": life, "asked": time.time()}
        await self._client.put(self.partition, {name: [value] for name, value in row.items()})

    async def press(self, row: Row) -> bool:
        return await self._write([row], {PRESSES.name: [True]})

    async def say_freed(self, row: Row) -> bool:
        return await self._write([row], {FREED.name: [True]})

    async def give(self, give: Give, source: str, payload: Mapping[str, Any]) -> bool:
        count = len(give.rows)
        return await self._write(
            give.rows,
            {
                TURN: [give.turn] * count,
                "leads": [row is give.leader for row in give.rows],
                "source": [source] * count,
                "reason": [give.reason] * count,
                "granted": [time.time()] * count,
                "payload": [json.dumps(dict(payload))] * count,
            },
        )

    async def _write(self, rows: Sequence[Row], columns: Mapping[str, Sequence[Any]]) -> bool:
        try:
            await self._client.write(Rows.concat([self._handles[row.uid] for row in rows]), columns)
        except StaleRows:
            return False
        return True

    async def clear(self, clear: Clear) -> bool:
        """For the keeper only."""
        if any(row.uid not in self._taken for row in clear.rows):
            try:
                taken = await self._client.take(self.partition, timeout=0)
                self._taken |= {uid: taken.select([i]) for i, uid in enumerate(taken)}
            except QueueTimeout:
                return False
        try:
            rows = Rows.concat([self._taken[row.uid] for row in clear.rows])
            await self._client.clear(rows, TURN if clear.unless_granted else None)
        except (StaleRows, Refused):
            return False
        for row in clear.rows:
            del self._taken[row.uid]
        return True
