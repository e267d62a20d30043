"""A replica's place in its ring: a thread that follows the ledger, and `gpu()` for the code of the service."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from meshy.colocation.books import Books
from meshy.colocation.columns import partition_of
from meshy.colocation.member import Member
from meshy.colocation.turns import Action, Ask, Enter, Free, Give, Grant, Ledger, Restore, Rule, SayFreed, grant_of
from meshy.columns import Contract
from meshy.generation.in_thread import in_thread
from meshy.queue.client import POLL_SECONDS, AsyncQueueClient
from meshy.queue.endpoints import Endpoints

log = logging.getLogger("meshy.colocation")

WATCHDOG_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the service does for its ring. free: give up everything that it holds on its GPUs, on all ranks. restore:
    bring it back; not called for the first turn, when there is nothing yet. payload: what whoever comes next should
    know.

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
    waited: float = 0.0
    held: float = 0.0
    restoring: float = 0.0
    freeing: float = 0.0
    since: float = field(default=0.0, repr=False)


Order = tuple[Literal["restore", "enter", "free", "failed"], Any]


class Agent:
    """`with agent.gpu(): ...` runs while the ring's token is here. One thread at a time is let in; the same one may go
    in again within. life: of this process, as its ignitor named it."""

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
        self.member = Member(rule, replica, life)
        self.numbers = Numbers()
        self.ledger = Ledger()
        self._ring, self._hooks = ring, hooks
        self._client = AsyncQueueClient(endpoints, contract, replica, life=life)
        self._payload: dict[str, Any] = {}
        self._loaded = False  # something was there when the GPUs were freed last
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._inside = threading.RLock()
        self._depth = 0
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._kick = asyncio.Event()
        self._callbacks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._follow, name=f"ring {ring}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Follow the ledger no more. Whether the token is here is for the keeper to find out when the process ends."""
        self._closing = True
        if self._thread.is_alive():
            self._post(lambda: None)
            self._thread.join(10)

    @property
    def payload(self) -> Mapping[str, Any]:
        """What came with the token the last time."""
        return self._payload

    # The service's side -----------------------------------------------------------------------------------------------

    @contextmanager
    def gpu(self) -> Iterator[None]:
        with self._inside:
            if self._depth:
                yield
                return
            self._enter()
            self._depth += 1
            try:
                yield
            except Exception:
                self._leave()
                raise
            finally:
                self._depth -= 1
            self._leave()

    def _enter(self) -> None:
        began = time.monotonic()
        self._post(self.member.want)
        try:
            self._obey("enter")
        except BaseException:
            self._post(self.member.give_up)
            raise
        self.numbers.waited += time.monotonic() - began

    def _leave(self) -> None:
        self._post(self.member.leave)
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
        if self._loaded:
            self._hooks.restore(payload)
        self.numbers.restoring += time.monotonic() - began
        self.numbers.since = time.monotonic()
        self._post(self.member.restored)

    def _free(self) -> None:
        began = time.monotonic()
        self._hooks.free()
        self._loaded = True
        self.numbers.freeing += time.monotonic() - began
        self.numbers.held += time.monotonic() - self.numbers.since
        self._post(self.member.freed)

    # The agent's thread -----------------------------------------------------------------------------------------------

    def _post(self, event: Callable[[], None]) -> None:
        """Tell the member something, on the agent's thread."""

        def happen() -> None:
            event()
            self._kick.set()

        with suppress(RuntimeError):  # the agent has ended; whoever waits for it is told
            self._loop.call_soon_threadsafe(happen)

    def _follow(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        except BaseException as error:
            log.exception("ring %r: the agent of %s has failed", self._ring, self.member.replica)
            self._orders.put(("failed", error))
            self._hooks.failed(error)
        finally:
            self._loop.close()

    async def _live(self) -> None:
        async with self._client:
            books = Books(self._client, self._ring)
            while not self._closing:
                bell = await self._client.watch(partition_of(self._ring))
                self._kick.clear()
                self.ledger = await books.look()
                action = self.member.decide(self.ledger)
                if action is None:
                    await self._rest(bell)
                else:
                    await self._carry_out(action, books)

    async def _rest(self, bell: asyncio.Event) -> None:
        """Until the ledger or the member changes."""
        waits = [asyncio.ensure_future(event.wait()) for event in (bell, self._kick)]
        _, pending = await asyncio.wait(waits, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        for task in [task for task in self._callbacks if task.done()]:
            self._callbacks.remove(task)
            task.result()  # raises what a hook has raised

    async def _carry_out(self, action: Action, books: Books) -> None:
        match action:
            case Ask():
                await books.ask(self.member.replica, self.member.life)
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
            "ring/held_seconds": numbers.held,
            "ring/restoring_seconds": numbers.restoring,
            "ring/freeing_seconds": numbers.freeing,
        }

    def health(self) -> dict[str, Any]:
        ledger = self.ledger
        return {
            "ring": self._ring,
            "token": self.member.phase,
            "turn": ledger.turn,
            "holder": ledger.holder or "nobody",
        }
