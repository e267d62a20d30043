"""How the replicas come to serve the next version. For the trainer's first rank, which waits meanwhile."""

import concurrent.futures
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from meshy.generation import commands
from meshy.generation.control import Control
from meshy.generation.transport import Transport
from meshy.training.weights import disk
from meshy.training.weights.background import Background
from meshy.training.weights.bracket import Bracket
from meshy.training.weights.buckets import Bucket, Halves, Unpacked, fill
from meshy.training.weights.choice import InFlight
from meshy.training.weights.folder import weight_bytes
from meshy.training.weights.watch import Watch

log = logging.getLogger("meshy.training.weights")


class WrongVersion(RuntimeError):
    """A replica serves another weight version than it should."""


class Carrier(Protocol):
    """One way for buckets to travel. `memory`: what they are packed into, each tensor aligned to `align` bytes;
    `unpacked`: which tensors are not."""

    mode: str
    align: int
    memory: Halves
    unpacked: Unpacked | None

    async def open(self, bracket: Bracket) -> None:
        """Before the first bucket."""

    async def send(self, bracket: Bracket, bucket: Bucket, version: int | None) -> None:
        """Every living replica loads it; who fails is dropped. version: of the weights, with the last bucket."""

    async def close(self) -> None:
        """Nothing is sent any more."""


@dataclass
class Published:
    """What became of a publish. served: the replicas that serve the version now. behind: why each other one does not.

    Seconds: pause, until replicas are ready to load; transfer, until all have loaded; bracket, until they go on and
    have said which version they serve. bytes: of the weights.
    """

    mode: str
    served: list[str] = field(default_factory=list)
    behind: dict[str, str] = field(default_factory=dict)
    pause: float = 0.0
    transfer: float = 0.0
    bracket: float = 0.0
    bytes: int = 0


class Publisher:
    """in_flight: see TrainerConfig.publish_in_flight. deadline: seconds for the next publish; a replica that hangs uses
    up half of what is left of them. carrier: set it before weights are streamed."""

    def __init__(self, urls: Sequence[str], *, in_flight: InFlight = "retract", deadline: float = 300.0) -> None:
        self.carrier: Carrier | None = None
        self.deadline = deadline
        self._in_flight = in_flight
        self._background = Background("publisher")
        self._transport = Transport()
        self._control = Control(urls, self._transport, deadline)
        self.watch = Watch(self._control)
        self._watching: concurrent.futures.Future[None] | None = None

    def start(self, seconds: float, in_turn: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """Waits until every replica answers and returns what each says of itself (`/server_info`). ReplicaError after
        so many seconds, WrongVersion where one does not serve version 0. in_turn: those that are in a ring. They are
        waited for however long it takes, and not asked for `/health`, which needs the GPU."""
        others = [url for url in self._control.urls if url not in in_turn]
        self._background.run(Control(others, self._transport, self.deadline).wait_ready(seconds))
        self._background.run(self.watch.until(in_turn, lambda served: served is not None, "answer"))
        self._background.run(self.watch.look(others))
        if behind := self.watch.behind(0):
            told = ", ".join(f"{url} serves {self.watch.served[url]}" for url in behind)
            raise WrongVersion(f"every inference replica should serve weight version 0, but {told}")
        return self._background.run(self._control.everywhere(commands.SERVER_INFO))

    def stream(
        self, version: int, urls: Sequence[str], tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
    ) -> Published:
        """These replicas get `tensors`, cast to dtype, bucket by bucket. Takes every tensor, also when nobody is left
        to give them to."""
        carrier = self.carrier
        assert carrier is not None
        bracket = Bracket(self._control, urls, self.deadline, self._in_flight)
        report = Published(carrier.mode)
        began = time.monotonic()
        opening = self._background.start(self._open(carrier, bracket))
        for bucket in fill(tensors, dtype, carrier.memory.region, carrier.align, carrier.unpacked):
            if not report.bytes:
                opening.result()
                report.pause = time.monotonic() - began
            report.bytes += bucket.bytes
            carrier.memory.free()  # buckets go out one after another; the next is filled while this one travels
            bracket.expire()
            sending = self._background.start(carrier.send(bracket, bucket, version if bucket.last else None))
            carrier.memory.lend(sending.result)
            del bucket, sending  # nothing holds a segment that is to grow
        carrier.memory.free()
        report.transfer = time.monotonic() - began - report.pause
        self._background.run(bracket.end())
        return self._close(bracket, version, report, began)

    def from_folder(self, version: int, urls: Sequence[str], folder: Path) -> Published:
        """These replicas load a folder that they can read."""
        bracket = Bracket(self._control, urls, self.deadline, self._in_flight)
        report = Published("disk", bytes=weight_bytes(folder))
        began = time.monotonic()
        self._background.run(self._find(bracket))
        report.pause = self._background.run(disk.load(bracket, folder, version))
        report.transfer = time.monotonic() - began - report.pause
        return self._close(bracket, version, report, began)

    def await_served(self, version: int, urls: Sequence[str], report: Published) -> None:
        """Waits until these replicas serve what they load by themselves, however long it takes; adds to report. Whether
        they are alive is their ignitor's business."""
        began = time.monotonic()
        self._background.run(self.watch.until(urls, lambda served: served == version, f"serve weights v{version}"))
        report.served += urls
        report.transfer += time.monotonic() - began

    async def _open(self, carrier: Carrier, bracket: Bracket) -> None:
        await self._find(bracket)
        if bracket.drains:  # the update begins when all that was in flight has ended; what came since is retracted
            await bracket.begin()
            await bracket.pause()
        else:
            await bracket.pause()
            await bracket.begin()
        await carrier.open(bracket)

    async def _find(self, bracket: Bracket) -> None:
        if self.watch.out:
            await bracket.find(self.watch.out)

    def _close(self, bracket: Bracket, version: int, report: Published, began: float) -> Published:
        said = self._background.run(bracket.close())
        watch = self.watch
        for url in [*bracket.living, *bracket.dropped]:
            watch.served[url] = said.get(url)
            if said.get(url) == version:
                report.served.append(url)
                watch.unfinished.discard(url)
                watch.failed_loads[url] = 0
            else:
                watch.unfinished.add(url)
                watch.failed_loads[url] += url not in bracket.absent
                report.behind[url] = bracket.dropped.get(url, f"{url} says that it serves version {said.get(url)}")
        report.bracket = time.monotonic() - began - report.pause - report.transfer
        return report

    # Between publishes ------------------------------------------------------------------------------------------------

    def keep_watch(self, version: int) -> None:
        """Looks after the replicas in the background until `end_watch`; `watch.late` tells whom to publish to."""
        self.end_watch()
        self._watching = self._background.start(self.watch.keep_looking(version))

    def end_watch(self) -> None:
        if self._watching is not None:
            if self._watching.done() and not self._watching.cancelled():
                self._watching.result()  # raises what has ended it
            self._watching.cancel()
            self._watching = None

    def wait_for_one(self, seconds: float) -> list[str]:
        """The replicas that can take weights, as soon as there is one; none after so many seconds."""
        return self._background.run(self.watch.wait_for_one(seconds))

    def look(self, urls: Sequence[str]) -> None:
        """Asks these replicas which version they serve."""
        self._background.run(self.watch.look(urls))

    def checksums(self, urls: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """The `ranks` of `/weights_checker` of each replica that answers."""
        outcome = self._background.run(self._control.give(dict.fromkeys(urls, commands.CHECKSUM)))
        for failure in outcome.failures.values():
            log.warning("a replica's weights could not be checked: %s", failure)
        return {url: answer["ranks"] for url, answer in outcome.answers.items()}

    def close(self) -> None:
        self.end_watch()
        if self.carrier is not None:
            self._background.run(self.carrier.close())
        self._background.run(self._transport.close())
        self._background.close()
