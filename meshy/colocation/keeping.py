"""The keeper of a ring as a thread of an ignitor: clears the ledger, stands in for the dead, writes the history."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshy.colocation.books import Books
from meshy.colocation.columns import keeper_of, partition_of
from meshy.colocation.keeper import Keeper
from meshy.colocation.turns import Action, Clear, Give, Ledger, Row, Rule, SayFreed, grant_of
from meshy.columns import Contract
from meshy.queue.client import POLL_SECONDS, AsyncQueueClient
from meshy.queue.endpoints import Endpoints

log = logging.getLogger("meshy.colocation")


class History:
    """Who held the token, from when to when, and why: one line of JSON a turn, written when the next one begins.

    asked, began, ended: unix seconds. granted_by, reason: of the row that leads the turn.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._turns: dict[int, tuple[Row, ...]] = {}  # not written down yet

    def see(self, ledger: Ledger) -> None:
        """Before anything of it is cleared."""
        for turn, rows in ledger.turns.items():
            if turn >= max(self._turns, default=0):
                self._turns[turn] = rows
        for turn in sorted(self._turns)[:-1]:
            self._write(self._turns.pop(turn), grant_of(self._turns[turn + 1][0]).at)

    def end(self) -> None:
        """The run is over: so is the present turn."""
        for rows in self._turns.values():
            self._write(rows, time.time())
        self._turns.clear()

    def _write(self, rows: tuple[Row, ...], ended: float) -> None:
        first = grant_of(rows[0])
        line = {
            "turn": first.turn,
            "holder": rows[0].group,
            "replicas": [row.replica for row in rows],
            "granted_by": first.source,
            "reason": first.reason,
            "asked": min(row.asked for row in rows),
            "began": first.at,
            "ended": ended,
            "seconds": round(ended - first.at, 6),
        }
        with self._file.open("a") as out:
            out.write(json.dumps(line) + "\n")


class RingKeeper:
    """history: a file of the run folder. failed: told once what has ended the keeper."""

    def __init__(
        self,
        ring: str,
        rule: Rule,
        endpoints: Endpoints,
        contract: Contract,
        history: Path,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._ring, self._keeper, self._failed = ring, Keeper(rule), failed
        self._client = AsyncQueueClient(endpoints, contract, keeper_of(ring))
        self._history = History(history)
        self._deaths: list[tuple[str, str]] = []
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._kick = asyncio.Event()
        self._thread = threading.Thread(target=self._follow, name=f"keeper of ring {ring}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def died(self, replica: str, life: str) -> None:
        """A member's process, and all that it had started, has ended."""
        self._post(lambda: self._deaths.append((replica, life)))

    def close(self) -> None:
        self._closing = True
        if self._thread.is_alive():
            self._post(lambda: None)
            self._thread.join(10)

    def _post(self, event: Callable[[], None]) -> None:
        def happen() -> None:
            event()
            self._kick.set()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(happen)

    def _follow(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        except BaseException as error:
            if not self._closing:
                log.exception("the keeper of ring %r has failed", self._ring)
                self._failed(error)
        finally:
            self._loop.close()

    async def _live(self) -> None:
        async with self._client:
            books = Books(self._client, self._ring)
            while not self._closing:
                bell = await self._client.watch(partition_of(self._ring))
                self._kick.clear()
                while self._deaths:
                    replica, life = self._deaths.pop(0)
                    await self._client.banish(replica, life)
                    self._keeper.died(life)
                ledger = await books.look()
                self._history.see(ledger)
                action = self._keeper.decide(ledger)
                if action is None:
                    await self._rest(bell)
                else:
                    await self._carry_out(action, books, ledger)
            self._history.end()

    async def _rest(self, bell: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (bell, self._kick)]
        _, pending = await asyncio.wait(waits, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()

    async def _carry_out(self, action: Action, books: Books, ledger: Ledger) -> None:
        match action:
            case SayFreed(row):
                await books.say_freed(row)
            case Give():
                log.warning("ring %r: turn %d is granted %s", self._ring, action.turn, action.reason)
                await books.give(action, keeper_of(self._ring), _payload(ledger))
            case Clear():
                await books.clear(action)


def _payload(ledger: Ledger) -> dict[str, Any]:
    """What travelled with the token until its holder died."""
    return dict(grant_of(ledger.present[0]).payload) if ledger.present else {}
