"""Commands to replicas, many at once: pause, update weights, ask for checksums."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshy.generation import commands
from meshy.generation.commands import Command
from meshy.generation.transport import Refused, Transport, Unavailable

CONNECT_PATIENCE = 5.0  # seconds for which a command is repeated to a replica that cannot be reached


class ReplicaError(RuntimeError):
    """A command that some replicas did not carry out. failures: URL -> what happened there."""

    def __init__(self, command: str, failures: dict[str, str], count: int) -> None:
        lines = "\n".join(f"  {message}" for message in failures.values())
        super().__init__(f"{command} failed on {len(failures)} of {count} inference replicas:\n{lines}")
        self.failures = failures


@dataclass(frozen=True)
class Outcome:
    """What became of a command: the answers by URL, and what stood against it elsewhere."""

    answers: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, Refused | Unavailable] = field(default_factory=dict)


class Control:
    """`give` tells each replica its own command. Everything else goes to all replicas together and returns
    {url: answer}; ReplicaError names those that failed."""

    def __init__(self, urls: Sequence[str], transport: Transport, deadline: float) -> None:
        self.urls = tuple(urls)
        self.deadline = deadline
        self._transport = transport

    async def give(
        self, orders: Mapping[str, Command], seconds: float | None = None, patience: float = CONNECT_PATIENCE
    ) -> Outcome:
        """Each URL its command, all together. seconds: for each answer (`deadline`). patience: seconds for which a
        command is repeated to a replica that cannot be reached; every command here may be given twice."""
        results = await asyncio.gather(
            *(self._one(url, order, seconds or self.deadline, patience) for url, order in orders.items()),
            return_exceptions=True,
        )
        outcome = Outcome()
        for url, result in zip(orders, results, strict=True):
            if isinstance(result, (Refused, Unavailable)):
                outcome.failures[url] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                outcome.answers[url] = result
        return outcome

    async def _one(self, url: str, order: Command, seconds: float, patience: float) -> Any:
        end, until, wait = time.monotonic() + seconds, 0.0, 0.05
        while True:
            try:
                left = max(0.0, end - time.monotonic())
                return await self._transport.request(order.method, url + order.path, order.body, left)
            except Unavailable:
                now = time.monotonic()
                until = until or now + patience  # from the first failure: a stall may come before it
                if now + wait > min(until, end):
                    raise
            await asyncio.sleep(wait)
            wait = min(2 * wait, 1.0)

    async def everywhere(self, order: Command) -> dict[str, Any]:
        outcome = await self.give(dict.fromkeys(self.urls, order))
        if outcome.failures:
            told = {url: str(failure) for url, failure in outcome.failures.items()}
            raise ReplicaError(order.path, told, len(self.urls))
        return outcome.answers

    async def health(self) -> dict[str, str | None]:
        """{url: None if it is healthy, else what it says}; raises nothing."""
        outcome = await self.give(dict.fromkeys(self.urls, commands.HEALTH), CONNECT_PATIENCE, patience=0.0)
        return {url: str(outcome.failures[url]) if url in outcome.failures else None for url in self.urls}

    async def wait_ready(self, timeout: float) -> None:
        """Until every replica is healthy. Raises ReplicaError when that takes longer than `timeout` seconds."""
        end = time.monotonic() + timeout
        while failures := {url: message for url, message in (await self.health()).items() if message is not None}:
            if time.monotonic() > end:
                raise ReplicaError("/health", failures, len(self.urls))
            await asyncio.sleep(0.1)
