"""Keeping the rotation true: what replicas do and say, brought to the rule in `meshy.generation.rotation`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshy.generation import commands
from meshy.generation.completion import GenerationError, weight_version_of
from meshy.generation.numbers import ReplicaNumbers
from meshy.generation.rotation import Rotation, too_old
from meshy.generation.transport import Refused, Transport, Unavailable

log = logging.getLogger("meshy.generation")

ANSWER_SECONDS = 10.0  # that a replica may take to say which weights it serves
WATCHDOG_SECONDS = 30.0


@dataclass(eq=False, slots=True)
class Call:
    """A request under way. at_least: the weight version that its tokens must have. limit: its deadline."""

    at_least: int
    limit: asyncio.Timeout
    interrupted: str = ""

    def interrupt(self, why: str) -> None:
        if not self.limit.expired():
            self.interrupted = why
            self.limit.reschedule(asyncio.get_running_loop().time())


class Keeper:
    """Takes replicas out of rotation and brings them back.

    on_back: called when one is back. silence: seconds after which a replica that has requests and answers none of them
    is asked whether it is there.
    """

    def __init__(self, urls: Sequence[str], transport: Transport, silence: float, on_back: Callable[[], None]) -> None:
        self.rotation = Rotation(urls)
        self.numbers = {url: ReplicaNumbers() for url in urls}
        self._transport = transport
        self._silence = silence
        self._on_back = on_back
        self._calls: dict[str, set[Call]] = {url: set() for url in urls}
        self._heard = dict.fromkeys(urls, 0.0)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._said = 0.0  # when the watchdog last did

    # What happens -----------------------------------------------------------------------------------------------------

    def require(self, version: int) -> bool:
        """Requests sent from now on are answered by weights v`version` or later; whether that is news. Every replica
        is asked, so that one that has missed an update is found before it answers in vain."""
        news = self.rotation.require(version)
        if news:
            for url in self.rotation.fit:
                self.check(url)
        return news

    @contextmanager
    def call(self, url: str, at_least: int, limit: asyncio.Timeout) -> Iterator[Call]:
        """A request to that replica is under way."""
        if not self._calls[url]:
            self._heard[url] = asyncio.get_running_loop().time()
        self._start("patrol", self._patrol)
        call = Call(at_least, limit)
        self._calls[url].add(call)
        self.numbers[url].sent()
        try:
            yield call
        finally:
            self._calls[url].discard(call)
            self.numbers[url].came_back()

    def answered(self, url: str) -> None:
        """It did what it was asked."""
        self._heard[url] = asyncio.get_running_loop().time()
        self.rotation.answered(url)

    def failed(self, url: str, why: str) -> None:
        """It could not be used."""
        if self.rotation.failed(url, why):
            self.numbers[url].failures += 1
            self._went_out(url, why)

    def shows(self, url: str, version: int, at_least: int) -> bool:
        """A replica serves `version`; whether that will do. If not, its requests that need more are interrupted."""
        was_in = not self.rotation.is_out(url)
        if self.rotation.serves(url, version, at_least):
            return True
        why = too_old(url, version, at_least)
        if was_in:
            self._went_out(url, why)
        self._interrupt(url, why, newer_than=version)
        return False

    def check(self, url: str) -> None:
        """Ask a replica which weights it serves, in the background."""
        self._start(f"check {url}", lambda: self._check(url))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # In the background ------------------------------------------------------------------------------------------------

    def _start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run that in the background, unless it runs already."""
        if name in self._tasks and not self._tasks[name].done():
            return
        task = asyncio.get_running_loop().create_task(work(), name=name)
        self._tasks[name] = task
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._tasks.get(task.get_name()) is task:
            del self._tasks[task.get_name()]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s of the generation client failed", task.get_name(), exc_info=error)

    def _went_out(self, url: str, why: str) -> None:
        log.warning("inference out of rotation: %s", why)
        if not self.rotation.fit:
            self._said = asyncio.get_running_loop().time()
        self._start(f"return of {url}", lambda: self._bring_back(url))

    async def _bring_back(self, url: str) -> None:
        """Ask a replica that is out until it may come back."""
        while True:
            await asyncio.sleep(self.rotation.next_wait(url))
            try:
                version = await self._version(url)
            except Unavailable as error:
                self.rotation.still_out(url, str(error))
            else:
                seconds = self.rotation.comes_back(url, version)
                if seconds is not None:
                    log.info("inference back in rotation: %s with weights v%d, after %.1f s", url, version, seconds)
                    self._on_back()
                    return
            self._watchdog()

    def _watchdog(self) -> None:
        now = asyncio.get_running_loop().time()
        if not self.rotation.fit and now - self._said >= WATCHDOG_SECONDS:
            self._said = now
            log.warning("no inference replica can be used; requests wait: %s", "; ".join(self.rotation.reasons()))

    async def _check(self, url: str) -> None:
        try:
            version = await self._version(url)
        except Unavailable as error:
            self.failed(url, str(error))
            self._interrupt(url, str(error))
            return
        self._heard[url] = asyncio.get_running_loop().time()
        self.shows(url, version, self.rotation.required)

    async def _patrol(self) -> None:
        """Check replicas that have requests and are silent, for as long as there are requests."""
        while any(self._calls.values()):
            await asyncio.sleep(self._silence / 2)
            now = asyncio.get_running_loop().time()
            for url in self.rotation.fit:
                if self._calls[url] and now - self._heard[url] > self._silence:
                    self.check(url)

    async def _version(self, url: str) -> int:
        """The weight version that a replica says it serves. Raises Unavailable."""
        order = commands.MODEL_INFO
        try:
            info = await self._transport.request(order.method, url + order.path, order.body, ANSWER_SECONDS)
            return weight_version_of(info, url)
        except (Refused, GenerationError) as error:
            raise Unavailable(str(error)) from error

    def _interrupt(self, url: str, why: str, newer_than: int | None = None) -> None:
        """End requests at that replica, all or those that need weights newer than it has: they go elsewhere."""
        for call in self._calls[url]:
            if newer_than is None or call.at_least > newer_than:
                call.interrupt(why)
