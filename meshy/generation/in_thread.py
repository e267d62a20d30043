"""Code that blocks, for an event loop."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(function: Callable[[], Result]) -> Result:
    """Its result, from a thread of its own. Whoever does not wait for it any more leaves the thread to itself; it keeps
    neither the process alive nor others from having a thread."""
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(result)

    threading.Thread(target=run, name=f"in-thread {getattr(function, '__name__', '')}", daemon=True).start()
    return await asyncio.wrap_future(future)
