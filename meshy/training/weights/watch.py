"""Looking after the replicas between publishes: who is there, and serves which version."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from meshy.generation import commands
from meshy.generation.completion import GenerationError, weight_version_of
from meshy.generation.control import Control

log = logging.getLogger("meshy.training.weights")

LOOK_SECONDS = 2.0  # within which a replica that is well says which version it serves
MOST_FAILED_LOADS = 2  # in a row; after them a replica is not asked again before there are other weights to load
SELDOM = 8  # of so many publishes, one goes to a replica that has failed over and over
SOONEST = 0.005  # seconds between two looks when somebody is about to serve a version
WATCHDOG_SECONDS = 60.0  # of waiting, then a line in the log says for what
SHORTEST, LONGEST = 1.0, 5.0  # seconds between two looks: when somebody is behind at first, and when nobody is


class Watch:
    """served: the version that each replica said last, None for one that cannot be reached. unfinished: those whose
    last update did not come to its end; whatever they say, they may be paused. failed_loads: how often in a row each
    was there and did not load new weights, because it refused or hung."""

    def __init__(self, control: Control) -> None:
        self.served: dict[str, int | None] = dict.fromkeys(control.urls, 0)
        self.unfinished: set[str] = set()
        self.failed_loads: Counter[str] = Counter()
        self._control = control

    def behind(self, version: int) -> list[str]:
        """Those that do not serve it, as far as is known."""
        return [url for url, served in self.served.items() if served != version or url in self.unfinished]

    def late(self, version: int) -> list[str]:
        """Those that are there and may load it, but do not serve it."""
        return [url for url in self.behind(version) if self._may_load(url)]

    def _may_load(self, url: str) -> bool:
        return self.served[url] is not None and self.failed_loads[url] < MOST_FAILED_LOADS

    def asked(self, version: int) -> list[str]:
        """Those to which a publish goes: one that failed again and again, ever more seldom, for if it hangs, it costs
        the others half of their deadline each time. Everybody, if nobody else is left."""
        every = {url: min(SELDOM, 2 ** max(0, self.failed_loads[url] - 1)) for url in self.served}
        return [url for url in self.served if version % every[url] == 0] or list(self.served)

    @property
    def out(self) -> list[str]:
        return [url for url, served in self.served.items() if served is None]

    async def look(self, urls: Sequence[str]) -> None:
        outcome = await self._control.give(dict.fromkeys(urls, commands.MODEL_INFO), LOOK_SECONDS, patience=0.0)
        for url in urls:
            self.served[url] = _version(outcome.answers[url], url) if url in outcome.answers else None
            if url in outcome.failures:
                del self.failed_loads[url]  # whoever answers there next is likely to be another process

    async def keep_looking(self, version: int) -> None:
        """Until it is cancelled: often while somebody is behind, and now and then at all, for a replica that died and
        was started again may serve an older version than the one that it served before."""
        wait = SHORTEST if self.behind(version) else LONGEST
        while True:
            await asyncio.sleep(wait)
            await self.look(tuple(self.served))
            if not self.behind(version):
                wait = LONGEST
            elif not self.late(version):
                wait = min(2 * wait, LONGEST)

    async def until(self, urls: Sequence[str], fine: Callable[[int | None], bool], what: str) -> None:
        """Until each of these serves a version that is fine (None: it cannot be reached), to which they come by
        themselves, however long that takes: whoever shares their GPUs works meanwhile. what: it is that they do, for
        the log."""
        began = said = time.monotonic()
        wait = SOONEST
        while True:
            await self.look(urls)
            now = time.monotonic()
            if all(fine(self.served[url]) for url in urls):
                return
            if now - said > WATCHDOG_SECONDS:
                said = now
                told = ", ".join(f"{url} {self.says(url)}" for url in urls)
                log.warning("waiting %.0f s for replicas to %s: %s", now - began, what, told)
            await asyncio.sleep(wait)
            wait = min(1.5 * wait, SHORTEST / 4)

    def says(self, url: str) -> str:
        served = self.served[url]
        return "cannot be reached" if served is None else f"serves v{served}"

    async def wait_for_one(self, seconds: float) -> list[str]:
        """The replicas that can be reached and may load weights, as soon as there is one; none after so many seconds,
        or when every one has failed too often."""
        end = time.monotonic() + seconds
        while True:
            await self.look(tuple(self.served))
            there = [url for url in self.served if self._may_load(url)]
            failed = all(self.failed_loads[url] >= MOST_FAILED_LOADS for url in self.served)
            if there or failed or time.monotonic() > end:
                return there
            await asyncio.sleep(SHORTEST)


def _version(info: object, url: str) -> int | None:
    try:
        return weight_version_of(info, url)
    except GenerationError as error:
        log.warning("%s", error)
        return None
