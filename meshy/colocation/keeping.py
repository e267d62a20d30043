"""The keeper of a ring as a thread of an ignitor: clears the ledger, stands in for the dead, writes the history."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshy.colocation.books import Books
from meshy.colocation.columns import keeper_of
from meshy.colocation.follower import Follower
from meshy.colocation.keeper import Keeper
from meshy.colocation.turns import Action, Clear, Give, Ledger, Row, Rule, SayFreed, grant_of
from meshy.columns import Contract
from meshy.queue.client import AsyncQueueClient
from meshy.queue.endpoints import Endpoints

log = logging.getLogger("meshy.colocation")


class History:
    """Who held the token, from when to when, and why: one line of JSON a turn, written when the next one begins.

    asked, began, ended: unix seconds. granted_by, reason: of the row that leads the turn.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._turns: dict[int, dict[str, Row]] = {}  # not written down yet; by uid, the leader's first

    def see(self, ledger: Ledger) -> None:
        """Before anything of it is cleared."""
        for turn, rows in ledger.turns.items():
            if turn >= max(self._turns, default=0):
                self._turns.setdefault(turn, {}).update((row.uid, row) for row in rows)
        for turn in sorted(self._turns)[:-1]:
            following = next(iter(self._turns[turn + 1].values()))
            self._write(list(self._turns.pop(turn).values()), grant_of(following).at)

    def end(self) -> None:
        """The run is over: so is the present turn."""
        for rows in self._turns.values():
            self._write(list(rows.values()), time.time())
        self._turns.clear()

    def _write(self, rows: Sequence[Row], ended: float) -> None:
        first = grant_of(rows[0])
        line = {
            "turn": first.turn,
            "holder": rows[0].group,
            "replicas": sorted({row.replica for row in rows}),
            "granted_by": first.source,
            "reason": first.reason,
            "asked": min(row.asked for row in rows),
            "began": first.at,
            "ended": ended,
            "seconds": round(ended - first.at, 6),
        }
        with self._file.open("a") as out:
            out.write(json.dumps(line) + "\n")


class RingKeeper(Follower):
    """history: a file of the run folder. on_failure: told once what has ended the keeper."""

    def __init__(
        self,
        ring: str,
        rule: Rule,
        endpoints: Endpoints,
        contract: Contract,
        history: Path,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        super().__init__(ring, AsyncQueueClient(endpoints, contract, keeper_of(ring)), f"keeper of ring {ring}")
        self._keeper, self._on_failure = Keeper(rule), on_failure
        self._history = History(history)
        self._deaths: list[tuple[str, str]] = []

    def died(self, replica: str, life: str) -> None:
        """A member's process, and all that it had started, has ended."""
        self.post(lambda: self._deaths.append((replica, life)))

    def failed(self, error: BaseException) -> None:
        if not self._closing:
            log.error("the keeper of ring %r has failed", self._ring, exc_info=error)
            self._on_failure(error)

    async def step(self, books: Books) -> bool:
        while self._deaths:
            replica, life = self._deaths.pop(0)
            await self._client.banish(replica, life)
            self._keeper.died(life)
        ledger = await books.look()
        self._history.see(ledger)
        action = self._keeper.decide(ledger)
        if action is not None:
            await self._carry_out(action, books, ledger)
        return action is not None

    async def ended(self) -> None:
        self._history.end()

    async def _carry_out(self, action: Action, books: Books, ledger: Ledger) -> None:
        match action:
            case SayFreed(row):
                await books.say_freed(row)
            case Give():
                level = logging.DEBUG if action.turn == 1 else logging.WARNING
                group = action.rows[0].group
                log.log(level, "ring %r: %s has turn %d, %s", self._ring, group, action.turn, action.reason)
                await books.give(action, keeper_of(self._ring), _payload(ledger))
            case Clear():
                await books.clear(action)


def _payload(ledger: Ledger) -> dict[str, Any]:
    """What travelled with the token until its holder died."""
    return dict(grant_of(ledger.present[0]).payload) if ledger.present else {}
