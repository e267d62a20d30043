"""An event loop in a thread of its own, for code that blocks."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Background:
    """`run` waits for what a coroutine gives; `start` returns at once, with a future."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, call: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        future = self.start(call)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """What still runs is cancelled. May be called twice."""
        if not self._loop.is_closed():
            self.run(self._cancel())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _cancel(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
