"""The inference replicas as the trainer sees them: who must serve which weight version."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from meshy.generation import GenerationClient

Result = TypeVar("Result")


class WrongVersion(RuntimeError):
    """A replica serves another weight version than it was told to."""


class Replicas:
    """Blocking commands to all inference replicas, run in an event loop of their own thread."""

    def __init__(self, urls: Sequence[str], deadline: float) -> None:
        self.urls = tuple(urls)
        self._deadline = deadline
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="replicas", daemon=True)
        self._thread.start()
        self._client = self._run(self._connect())

    async def _connect(self) -> GenerationClient:
        return GenerationClient(self.urls, deadline=self._deadline)

    def wait_ready(self, seconds: float) -> None:
        """Until every replica answers; ReplicaError, naming those that do not, after so many seconds."""
        self._run(self._client.wait_ready(seconds))

    def publish(self, path: Path, version: int) -> None:
        """Every replica loads `path` and reports `version`; requests in flight are retracted and go on with it.

        Raises ReplicaError for a replica that cannot, WrongVersion for one that says it serves another version."""
        self._run(self._client.publish_from_disk(path, version))
        self.check(version)

    def check(self, version: int) -> None:
        """Raises WrongVersion unless every replica serves `version`."""
        wrong = {url: served for url, served in self._run(self._client.versions()).items() if served != version}
        if wrong:
            told = ", ".join(f"{url} serves {served}" for url, served in wrong.items())
            raise WrongVersion(f"every inference replica should serve weight version {version}, but {told}")

    def close(self) -> None:
        if not self._loop.is_closed():
            self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, call: Coroutine[Any, Any, Result]) -> Result:
        future: concurrent.futures.Future[Result] = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
