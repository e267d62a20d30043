"""A replica's place in its ring: a thread that follows the ledger, and `gpu()` for the code of the service."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from meshy.colocation.books import Books
from meshy.colocation.follower import Follower
from meshy.colocation.member import Member
from meshy.colocation.turns import (
    Action,
    Ask,
    Enter,
    Free,
    Give,
    Grant,
    Ledger,
    Press,
    Restore,
    Rule,
    SayFreed,
    grant_of,
)
from meshy.columns import Contract
from meshy.generation.in_thread import in_thread
from meshy.queue.client import WATCHDOG_SECONDS, AsyncQueueClient
from meshy.queue.endpoints import Endpoints

log = logging.getLogger("meshy.colocation")

TOLD_AFTER_SECONDS = 5.0  # of waiting for the token, `/health` says for whom


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the service does for its ring. free: give up everything that it holds on its GPUs, on all ranks. restore:
    bring it back; not called for the first turn, when there is nothing yet. payload: what whoever comes next should
    know; asked of the replica that leads a turn.

    Those of an ON_DEMAND service are called on the thread that uses the GPUs, those of a FALLBACK service on one of
    their own. failed: told once what has ended the agent.
    """

    free: Callable[[], None]
    restore: Callable[[Mapping[str, Any]], None]
    payload: Callable[[], Mapping[str, Any]]
    failed: Callable[[BaseException], None]


@dataclass
class Numbers:
    """Since the service began; seconds."""

    turns: int = 0
    waited: float = 0.0  # code, for the token
    away: float = 0.0  # between two turns
    held: float = 0.0
    restoring: float = 0.0
    freeing: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    since: float | None = field(default=None, repr=False)
    left: float | None = field(default=None, repr=False)


Order = tuple[Literal["restore", "enter", "free", "failed"], Any]


class Agent(Follower):
    """`with agent.gpu(): ...` runs while the ring's token is here. One thread at a time is let in; the same one may go
    in again within. life: of this process, as its ignitor named it. Closing it gives nothing up: that the token is here
    is for the keeper to find out when the process ends."""

    def __init__(
        self,
        ring: str,
        rule: Rule,
        replica: str,
        life: str,
        hooks: Hooks,
        endpoints: Endpoints,
        contract: Contract,
    ) -> None:
        super().__init__(ring, AsyncQueueClient(endpoints, contract, replica, life=life), f"ring {ring}")
        self.member = Member(rule, replica, life)
        self.numbers = Numbers()
        self.ledger = Ledger()
        self._hooks = hooks
        self._payload: dict[str, Any] = {}
        self._loaded = False  # the first code has ended: there is something to free and to restore
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._inside = threading.RLock()
        self._depth = 0
        self._waiting_since: float | None = None
        self._callbacks: set[asyncio.Task[None]] = set()
        self._looked = threading.Condition()

    @property
    def payload(self) -> Mapping[str, Any]:
        """What came with the token the last time."""
        return self._payload

    # The service's side -----------------------------------------------------------------------------------------------

    @contextmanager
    def gpu(self) -> Iterator[None]:
        with self._one_at_a_time():
            if self._depth:
                yield
                return
            self._enter()
            self._depth += 1
            try:
                try:
                    yield
                finally:
                    self._depth -= 1
            except Exception as error:
                self._leave_after(error)
                raise
            self._loaded = True
            self._leave()

    def wanted(self, seconds: float) -> bool:
        """In gpu(): wait until code of another group wants the GPUs, so many seconds at most. Worth it where this one's
        work makes another's, which would ask a moment too late and find the FALLBACK restored."""
        end = time.monotonic() + seconds
        with self._looked:
            while not self.member.rule.wanted_by_others(self.ledger):
                if not self._looked.wait(max(0.0, end - time.monotonic())):
                    return False
            return True

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        began = time.monotonic()
        while not self._inside.acquire(timeout=WATCHDOG_SECONDS):
            log.warning(
                "%s: another thread has been in gpu() for %.0f s", self.member.replica, time.monotonic() - began
            )
        try:
            yield
        finally:
            self._inside.release()

    def _leave_after(self, error: Exception) -> None:
        """What was raised in the block counts, not what comes of it."""
        if not self._loaded:
            log.error(
                "%s has failed in its first use of the GPUs (%s); what it has put there stays until this process ends, "
                "and so does the token",
                self.member.replica,
                error,
            )
            return
        try:
            self._leave()
        except Exception:
            log.exception("%s could not give up its GPUs; the token stays until this process ends", self.member.replica)

    def _enter(self) -> None:
        self._waiting_since = began = time.monotonic()
        self.post(self.member.want)
        try:
            self._obey("enter")
        except BaseException:
            self.post(self.member.give_up)
            raise
        finally:
            self._waiting_since = None
        self.numbers.waited += time.monotonic() - began

    def _leave(self) -> None:
        self.post(self.member.leave)
        if not self.member.fallback:
            self._obey("free")

    def _obey(self, last: str) -> None:
        """Do what the agent orders, up to this order."""
        began = time.monotonic()
        while True:
            try:
                order, detail = self._orders.get(timeout=WATCHDOG_SECONDS)
            except queue.Empty:
                log.warning("%s", self._told(time.monotonic() - began))
                continue
            if order == "failed":
                self._orders.put((order, detail))
                raise RuntimeError(f"the agent of ring {self._ring!r} has failed: {detail}") from detail
            if order == "restore":
                self._restore(detail)
            elif order == "free":
                self._free()
            if order == last:
                return

    @property
    def waiting(self) -> str:
        """For whom code waits now, where it has for a while; else empty."""
        since = self._waiting_since
        if since is None or time.monotonic() - since < TOLD_AFTER_SECONDS:
            return ""
        holder = self.ledger.holder or "nobody yet"
        return f"waits for the token of ring {self._ring!r}, which {holder} has"

    def _told(self, seconds: float) -> str:
        ledger = self.ledger
        holder = ", ".join(row.replica for row in ledger.present if not row.freed) or "nobody yet"
        waiting = ", ".join(row.replica for row in ledger.waiting) or "nobody"
        return (
            f"{self.member.replica} has waited {seconds:.0f} s for the token of ring {self._ring!r} (here it is "
            f"{self.member.phase!r}): turn {ledger.turn} is held by {holder}; waiting: {waiting}"
        )

    def _restore(self, payload: Mapping[str, Any]) -> None:
        began = time.monotonic()
        if self.numbers.left is not None:
            self.numbers.away += began - self.numbers.left
        if self._loaded:
            self._hooks.restore(payload)
        self.numbers.restoring += time.monotonic() - began
        self.numbers.since = time.monotonic()
        self.post(self.member.restored)

    def _free(self) -> None:
        began = time.monotonic()
        self._hooks.free()
        self.numbers.freeing += time.monotonic() - began
        self.numbers.held += self._holding()
        self.numbers.since, self.numbers.left = None, time.monotonic()
        self.post(self.member.freed)

    def _holding(self) -> float:
        """Seconds since the GPUs could be used, in this turn."""
        return 0.0 if self.numbers.since is None else time.monotonic() - self.numbers.since

    # The agent's thread -----------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        if not self._closing:
            log.error("ring %r: the agent of %s has failed", self._ring, self.member.replica, exc_info=error)
            self._hooks.failed(error)
        self._orders.put(("failed", error))

    async def step(self, books: Books) -> bool:
        seen = await books.look()
        with self._looked:
            self.ledger = seen
            self._looked.notify_all()
        action = self.member.decide(self.ledger)
        if action is not None:
            await self._carry_out(action, books)
        return action is not None

    async def rested(self) -> None:
        for task in [task for task in self._callbacks if task.done()]:
            self._callbacks.remove(task)
            task.result()  # raises what a hook has raised

    async def _carry_out(self, action: Action, books: Books) -> None:
        match action:
            case Ask():
                await books.ask(self.member.replica, self.member.life)
            case Press(row):
                await books.press(row)
            case Restore(row):
                self._begin_turn(grant_of(row))
                self._have_done("restore", lambda: self._restore(self._payload))
            case Enter():
                self._orders.put(("enter", None))
            case Free():
                self._have_done("free", self._free)
            case SayFreed(row):
                await books.say_freed(row)
            case Give():
                if action.leader is not None:
                    self._payload |= self._hooks.payload()
                await books.give(action, self.member.replica, self._payload)

    def _begin_turn(self, grant: Grant) -> None:
        self._payload = dict(grant.payload)
        self.numbers.turns += 1
        self.numbers.reasons[grant.reason.partition(" of ")[0]] += 1
        log.debug("ring %r: turn %d is here, from %s (%s)", self._ring, grant.turn, grant.source, grant.reason)

    def _have_done(self, order: Literal["restore", "free"], callback: Callable[[], None]) -> None:
        if not self.member.fallback:
            self._orders.put((order, self._payload))
            return
        task = asyncio.ensure_future(in_thread(callback))
        task.add_done_callback(lambda _: self._kick.set())
        self._callbacks.add(task)

    def metrics(self) -> dict[str, float]:
        numbers = self.numbers
        return {
            "ring/turns": numbers.turns,
            "ring/waited_seconds": numbers.waited,
            "ring/away_seconds": numbers.away,
            "ring/held_seconds": numbers.held + self._holding(),
            "ring/restoring_seconds": numbers.restoring,
            "ring/freeing_seconds": numbers.freeing,
            **{f"ring/turns/{reason.replace(' ', '_')}": count for reason, count in dict(numbers.reasons).items()},
        }

    def health(self) -> dict[str, Any]:
        ledger = self.ledger
        return {
            "ring": self._ring,
            "token": self.member.phase,
            "turn": ledger.turn,
            "holder": ledger.holder or "nobody",
        }
