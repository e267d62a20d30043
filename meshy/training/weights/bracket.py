"""One publish as the replicas see it: pause, take the new weights, go on. Whoever fails drops out of it."""

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from meshy.generation import commands
from meshy.generation.commands import Command, PauseMode
from meshy.generation.completion import GenerationError, weight_version_of
from meshy.generation.control import Control
from meshy.generation.transport import Refused, Unavailable
from meshy.training.weights.choice import InFlight

log = logging.getLogger("meshy.training.weights")

PATIENCE = 1.0  # seconds for which a command is repeated to a replica that took part until now
LEAST_PATIENCE = 0.5  # seconds for an answer, however late it is
PROBE_SECONDS = 1.0  # within which a replica that was out answers if it is well
TORN = -1  # the version of weights that are partly new: none that anybody asks for


class Bracket:
    """living: the replicas that take part. dropped: why each other one does not; absent: those of them that were not
    there to begin with; refused: those that said no, and so are there. deadline: seconds for the whole; one answer may
    take half of what is left of it, so that one replica that hangs does not use up the others' time."""

    def __init__(
        self, control: Control, replicas: Iterable[str], deadline: float, in_flight: InFlight = "retract"
    ) -> None:
        self.living = list(replicas)
        self.dropped: dict[str, str] = {}
        self.absent: set[str] = set()
        self.refused: set[str] = set()
        self._control, self._in_flight = control, in_flight
        self._end = time.monotonic() + deadline

    @property
    def patience(self) -> float:
        """Seconds that the next answer may take."""
        return max(LEAST_PATIENCE, (self._end - time.monotonic()) / 2)

    def expire(self) -> None:
        """Nobody takes part any more, if the deadline has passed: buckets may be many, and each asks for patience."""
        if time.monotonic() > self._end:
            for url in list(self.living):
                self.drop(url, Unavailable(f"{url} had not got all new weights within the deadline of a publish"))

    async def each(self, orders: Mapping[str, Command]) -> dict[str, Any]:
        """Each replica its own command; the answers of those that carried it out."""
        outcome = await self._control.give(orders, self.patience, PATIENCE)
        for url, failure in outcome.failures.items():
            self.drop(url, failure)
        return outcome.answers

    async def all(self, order: Command) -> dict[str, Any]:
        return await self.each(dict.fromkeys(self.living, order))

    async def one(self, url: str, order: Command, seconds: float | None = None) -> Refused | Unavailable | None:
        """Tells one replica, which stays in whatever comes of it; returns what stood against it. seconds: for its
        answer (`patience`)."""
        return (await self._control.give({url: order}, seconds or self.patience, 0.0)).failures.get(url)

    def drop(self, url: str, failure: Exception) -> None:
        if url in self.living:
            self.living.remove(url)
            self.dropped[url] = str(failure)
            if isinstance(failure, Refused) and url not in self.absent:
                self.refused.add(url)
            log.warning("a replica does not get the new weights now: %s", failure)

    async def find(self, out: Iterable[str]) -> None:
        """Drops those of `out` that do not answer at once: they were not there before."""
        asked = [url for url in out if url in self.living]
        outcome = await self._control.give(dict.fromkeys(asked, commands.MODEL_INFO), PROBE_SECONDS, 0.0)
        self.absent.update(outcome.failures)
        for url, failure in outcome.failures.items():
            self.drop(url, failure)

    @property
    def drains(self) -> bool:
        """Whether what is in flight ends before the update begins."""
        return self._in_flight == "drain"

    @property
    def flush(self) -> bool:
        """Whether nothing that is cached of the old weights is used any more."""
        return self._in_flight != "keep"

    async def pause(self) -> None:
        """Nothing is generated any more; what is being written goes on after `close`, or ends now."""
        modes: dict[InFlight, PauseMode] = {"keep": "in_place", "abort": "abort"}
        await self.all(commands.pause(modes.get(self._in_flight, "retract")))

    async def begin(self) -> None:
        """Opens the update: at once when paused, else when the requests in flight have ended. One that was left open by
        a publish that broke off is closed first."""
        outcome = await self._control.give(dict.fromkeys(self.living, commands.BEGIN_UPDATE), self.patience, PATIENCE)
        again = [url for url, failure in outcome.failures.items() if _already_open(failure)]
        for url, failure in outcome.failures.items():
            if url not in again:
                self.drop(url, failure)
        await self.each(dict.fromkeys(again, commands.END_UPDATE))
        await self.each({url: commands.BEGIN_UPDATE for url in again if url in self.living})

    async def end(self) -> None:
        await self.all(commands.END_UPDATE)

    async def close(self) -> dict[str, int]:
        """Generation goes on. Returns the version that each living replica reports."""
        await self.all(commands.CONTINUE)
        served: dict[str, int] = {}
        for url, told in (await self.all(commands.MODEL_INFO)).items():
            try:
                served[url] = weight_version_of(told, url)
            except GenerationError as error:
                self.drop(url, error)
        await self._disown()
        return served

    async def _disown(self) -> None:
        """A replica that refused is there and would go on. Its weights may be partly new, so it says so first: its
        requests are aborted, and whoever asks it again sees a version that nobody wants. (SGLang's way back from a
        folder that it could not load reads the new files again.) One that cannot be reached stays paused, should it
        come back, until it is brought up to date."""
        for url in self.refused:
            if (failure := await self.one(url, commands.set_version(TORN))) is not None:
                log.warning("%s stays paused: its weights are partly new, and it cannot be told (%s)", url, failure)
            else:
                await self.one(url, commands.CONTINUE)


def _already_open(failure: Exception) -> bool:
    return isinstance(failure, Refused) and "already open" in str(failure)
