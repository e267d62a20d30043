"""Commands to all replicas at once: pause, update weights, ask for checksums."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from meshy.generation.completion import version_number
from meshy.generation.transport import Refused, Transport, Unavailable

PauseMode = Literal["abort", "retract", "in_place"]
CONNECT_PATIENCE = 5.0  # seconds for which a command is repeated to a replica that cannot be reached


class ReplicaError(RuntimeError):
    """A command that some replicas did not carry out. failures: URL -> what happened there."""

    def __init__(self, command: str, failures: dict[str, str], count: int) -> None:
        lines = "\n".join(f"  {message}" for message in failures.values())
        super().__init__(f"{command} failed on {len(failures)} of {count} inference replicas:\n{lines}")
        self.failures = failures


class Control:
    """Every call goes to all replicas together and returns {url: answer}; ReplicaError names those that failed."""

    def __init__(self, urls: Sequence[str], transport: Transport, deadline: float) -> None:
        self.urls = tuple(urls)
        self.deadline = deadline
        self._transport = transport

    async def everywhere(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        results = await asyncio.gather(
            *(self._one(method, url, path, body) for url in self.urls), return_exceptions=True
        )
        failures: dict[str, str] = {}
        for url, result in zip(self.urls, results, strict=True):
            if isinstance(result, (Refused, Unavailable)):
                failures[url] = str(result)
            elif isinstance(result, BaseException):
                raise result
        if failures:
            raise ReplicaError(path, failures, len(self.urls))
        return dict(zip(self.urls, results, strict=True))

    async def _one(self, method: str, url: str, path: str, body: Any) -> Any:
        """Repeat while the replica cannot be reached, for a short while: every command here may be given twice."""
        began, patience = time.monotonic(), 0.0
        wait = 0.05
        while True:
            try:
                return await self._transport.request(method, url + path, body, self.deadline)
            except Unavailable:
                now = time.monotonic()
                patience = patience or now + CONNECT_PATIENCE  # from the first failure: a stall may come before it
                if now + wait > patience or now - began > self.deadline:
                    raise
            await asyncio.sleep(wait)
            wait = min(2 * wait, 1.0)

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating. `retract` goes on with what is written after `continue_`; `abort` answers with it now."""
        await self.everywhere("POST", "/pause_generation", {"mode": mode})

    async def continue_(self) -> None:
        await self.everywhere("POST", "/continue_generation", {})

    async def flush(self) -> None:
        """Drop prefix caches. Refused (ReplicaError) while requests run."""
        await self.everywhere("POST", "/flush_cache")

    async def update_weights_from_disk(
        self, path: str | Path, version: int, *, flush_cache: bool = True, abort_all_requests: bool = False
    ) -> None:
        """Load a model folder as weight `version`: at once when paused, else when the running requests have ended."""
        body = {
            "model_path": str(path),
            "weight_version": str(version),
            "flush_cache": flush_cache,
            "abort_all_requests": abort_all_requests,
        }
        await self.everywhere("POST", "/update_weights_from_disk", body)

    async def publish_from_disk(self, path: str | Path, version: int, *, drain: bool = False) -> None:
        """Bring all replicas to `version`. Running requests are retracted and go on with the new weights, or,
        with `drain`, end first. Every replica goes on generating, also when another one has failed.
        """
        if drain:
            await self.update_weights_from_disk(path, version)
            return
        try:
            await self.pause("retract")
            await self.update_weights_from_disk(path, version)
        finally:
            await self.continue_()

    async def checksums(self) -> dict[str, dict[str, str]]:
        """{url: {tensor name: checksum of the live tensor}}; see `meshy.generation.checksum`."""
        answers = await self.everywhere("POST", "/weights_checker", {"action": "checksum"})
        return {url: answer["ranks"][0]["checksums"] for url, answer in answers.items()}

    async def model_info(self) -> dict[str, dict[str, Any]]:
        return await self.everywhere("GET", "/model_info")

    async def versions(self) -> dict[str, int]:
        """{url: weight version that it serves}."""
        return {url: version_number(info["weight_version"], url) for url, info in (await self.model_info()).items()}

    async def loads(self) -> dict[str, dict[str, Any]]:
        """{url: its first `loads` entry: num_running_reqs, num_waiting_reqs, ...}."""
        return {url: answer["loads"][0] for url, answer in (await self.everywhere("GET", "/v1/loads")).items()}

    async def release_memory(self, tags: Iterable[str] = ("kv_cache", "weights")) -> None:
        await self.everywhere("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Iterable[str] = ("kv_cache", "weights")) -> None:
        await self.everywhere("POST", "/resume_memory_occupation", {"tags": list(tags)})

    async def health(self) -> dict[str, str | None]:
        """{url: None if it is healthy, else what it says}; raises nothing."""
        results = await asyncio.gather(
            *(self._transport.request("GET", url + "/health", None, CONNECT_PATIENCE) for url in self.urls),
            return_exceptions=True,
        )
        told = (str(result) if isinstance(result, BaseException) else None for result in results)
        return dict(zip(self.urls, told, strict=True))

    async def wait_ready(self, timeout: float) -> None:
        """Until every replica is healthy. Raises ReplicaError when that takes longer than `timeout` seconds."""
        end = time.monotonic() + timeout
        while failures := {url: message for url, message in (await self.health()).items() if message is not None}:
            if time.monotonic() > end:
                raise ReplicaError("/health", failures, len(self.urls))
            await asyncio.sleep(0.1)
