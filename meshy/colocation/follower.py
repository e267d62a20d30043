"""A thread that follows the ledger of a ring: looks, acts, and looks again when something has changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from meshy.colocation.books import Books
from meshy.colocation.columns import partition_of
from meshy.queue.client import POLL_SECONDS, AsyncQueueClient

CLOSING_SECONDS = 1.0
"""For what must not stay half done in the queue, which may be gone."""


class Follower:
    """Fill `step` and `failed`. name: of the thread."""

    def __init__(self, ring: str, client: AsyncQueueClient, name: str) -> None:
        self._ring = ring
        self._client = client
        self._closing = False
        self._broken: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._kick = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)

    async def step(self, books: Books) -> bool:
        """Look and act, on the thread; whether there was anything to do."""
        raise NotImplementedError(f"{type(self).__name__} has no step()")

    async def rested(self) -> None:
        """Called, on the thread, when something may have changed."""

    async def ended(self) -> None:
        """Called, on the thread, when it has been closed."""

    def failed(self, error: BaseException) -> None:
        """Told, on the thread, what has ended it."""
        raise NotImplementedError(f"{type(self).__name__} has no failed()")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Follow the ledger no more. A request that is under way is not waited for."""
        if not self._closing:
            self._closing = True
            self.post(self._stop_following)
        if self._thread.is_alive():
            self._thread.join(10)

    def _stop_following(self) -> None:
        if self._following is not None:
            self._following.cancel()

    def post(self, event: Callable[[], None]) -> None:
        """Have something happen on the thread, which looks again then."""

        def happen() -> None:
            try:
                event()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where it ends the thread
                self._broken = error
            self._kick.set()

        with suppress(RuntimeError):  # the thread has ended, and `failed` or `close` said so
            self._loop.call_soon_threadsafe(happen)

    def _follow(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        except BaseException as error:  # noqa: BLE001 - whatever it is, nobody follows the ring any more
            self.failed(error)
        finally:
            self._loop.close()

    async def _live(self) -> None:
        if self._closing:
            return
        self._following = asyncio.current_task()
        try:
            await self._client.connect()
            books = Books(self._client, self._ring)
            while not self._closing:
                bell = await self._client.watch(partition_of(self._ring))
                self._kick.clear()
                if not await self.step(books):
                    await self._rest(bell)
                    await self.rested()
        except asyncio.CancelledError:
            if not self._closing:
                raise
        finally:
            await self._client.close(CLOSING_SECONDS)
        await self.ended()

    async def _rest(self, bell: asyncio.Event) -> None:
        """Until the ledger changes, or something is posted."""
        waits = [asyncio.ensure_future(event.wait()) for event in (bell, self._kick)]
        try:
            await asyncio.wait(waits, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._broken is not None:
            raise self._broken
