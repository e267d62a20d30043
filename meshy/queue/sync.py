"""The blocking client: `AsyncQueueClient` in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from meshy.columns import Contract
from meshy.queue.client import AsyncQueueClient
from meshy.queue.endpoints import Endpoints
from meshy.queue.errors import QueueClosed
from meshy.queue.rows import Rows

Result = TypeVar("Result")


class QueueClient:
    """`AsyncQueueClient`, blocking, for any number of threads; the methods are described there.

    The constructor reaches every process of the queue, or raises within the deadline. An interrupted call (Ctrl-C) is
    cancelled; `close` from another thread makes calls that are waiting raise QueueClosed.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        contract: Contract,
        caller: str,
        deadline: float = 30.0,
        life: str = "",
        former: Sequence[str] = (),
    ) -> None:
        self._client = AsyncQueueClient(endpoints, contract, caller, deadline, life, former)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"queue client {caller}", daemon=True)
        self._thread.start()
        try:
            self._run(self._client.connect())
        except BaseException:
            self.close()
            raise

    @property
    def caller(self) -> str:
        return self._client.caller

    def put(self, partition: str, columns: Mapping[str, Sequence[Any]]) -> Rows:
        return self._run(self._client.put(partition, columns))

    def write(self, rows: Rows, columns: Mapping[str, Sequence[Any]], ack: bool = True) -> None:
        self._run(self._client.write(rows, columns, ack))

    def ack(self, rows: Rows) -> None:
        self._run(self._client.ack(rows))

    def take(
        self,
        partition: str,
        consumer: str | None = None,
        at_least: int = 1,
        at_most: int | None = None,
        timeout: float | None = None,
        alive: int = 0,
    ) -> Rows:
        return self._run(self._client.take(partition, consumer, at_least, at_most, timeout, alive))

    def read(
        self, rows: Rows, columns: Sequence[str] | None = None, optional: Sequence[str] = ()
    ) -> dict[str, list[Tensor] | Tensor | list[Any]]:
        return self._run(self._client.read(rows, columns, optional))

    def clear(self, rows: Rows) -> None:
        self._run(self._client.clear(rows))

    def table(self) -> dict[str, Any]:
        return self._run(self._client.table())

    def close(self) -> None:
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _shut(self) -> None:
        await self._client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _run(self, call: Coroutine[Any, Any, Result]) -> Result:
        if self._loop.is_closed():
            call.close()
            raise QueueClosed(f"{self.caller}: the queue client is closed")
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise QueueClosed(f"{self.caller}: the queue client was closed while a call was waiting") from None
        except BaseException:
            future.cancel()
            raise

    def __enter__(self) -> QueueClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
