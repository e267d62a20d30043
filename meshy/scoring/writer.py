"""What a rank has scored goes into the rows on a thread, while it scores the next."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from meshy.queue.rows import Rows
from meshy.queue.sync import QueueClient


class Writer:
    """Writes of one rank, in their order. What one has raised is raised by the next call."""

    def __init__(self, client: QueueClient) -> None:
        self._client = client
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._writing: list[Future[None]] = []

    def write(self, rows: Rows, columns: Mapping[str, Sequence[Any]]) -> None:
        """Begin to write the columns, and acknowledge the rows."""
        self._raise_failures()
        self._writing.append(self._pool.submit(self._client.write, rows, columns))

    def settle(self) -> None:
        """Returns when everything is written."""
        writing, self._writing = self._writing, []
        for future in writing:
            future.result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _raise_failures(self) -> None:
        done = [future for future in self._writing if future.done()]
        self._writing = [future for future in self._writing if future not in done]
        for future in done:
            future.result()
