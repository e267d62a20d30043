"""The work of a service that is one event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any

from meshy.service.base import Service


async def until_stopped(service: Service, work: Coroutine[Any, Any, None]) -> None:
    """The work, until it is done or SIGTERM asks the service to end. An exception raised by a signal handler could be
    lost in an event loop, so here the signal cancels."""
    working = asyncio.create_task(work)

    def stop() -> None:
        service.stopping.set()
        service.tell("stopping", "asked to end")
        working.cancel()

    if threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    try:
        await working
    except asyncio.CancelledError:
        if not service.stopping.is_set():
            raise
