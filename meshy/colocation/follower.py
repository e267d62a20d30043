"""A thread that follows the ledger of a ring: looks, acts, and looks again when something has changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from meshy.colocation.books import Books
from meshy.colocation.columns import partition_of
from meshy.queue.client import POLL_SECONDS, AsyncQueueClient


class Follower:
    """Fill `step` and `failed`. name: of the thread."""

    def __init__(self, ring: str, client: AsyncQueueClient, name: str) -> None:
        self._ring = ring
        self._client = client
        self._closing = False
        self._broken: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._kick = asyncio.Event()
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)

    async def step(self, books: Books) -> bool:
        """Look and act, on the thread; whether there was anything to do."""
        raise NotImplementedError

    async def rested(self) -> None:
        """Called, on the thread, when something may have changed."""

    async def ended(self) -> None:
        """Called, on the thread, when it has been closed."""

    def failed(self, error: BaseException) -> None:
        """Told, on the thread, what has ended it."""
        raise NotImplementedError

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Follow the ledger no more."""
        self._closing = True
        if self._thread.is_alive():
            self.post(lambda: None)
            self._thread.join(10)

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
        async with self._client:
            books = Books(self._client, self._ring)
            while not self._closing:
                bell = await self._client.watch(partition_of(self._ring))
                self._kick.clear()
                if not await self.step(books):
                    await self._rest(bell)
                    await self.rested()
            await self.ended()

    async def _rest(self, bell: asyncio.Event) -> None:
        """Until the ledger changes, or something is posted."""
        waits = [asyncio.ensure_future(event.wait()) for event in (bell, self._kick)]
        _, pending = await asyncio.wait(waits, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        if self._broken is not None:
            raise self._broken
