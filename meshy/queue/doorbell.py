"""The client's end of the doorbell: a subscription per partition that wakes whoever waits for its rows.

A ring carries nothing: it says "look again". Whoever waits arms an event before looking, so that a ring between the
look and the wait is not lost; a subscription is used only once it is known to stand. Should a ring be lost on the way
all the same, the waiter's slow poll is the net beneath it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

import zmq

from meshy.queue.endpoints import Endpoints
from meshy.queue.errors import QueueUnreachable
from meshy.queue.transferqueue import create_socket, tcp_address
from meshy.queue.wire import Wire

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.05
"""How long a fresh subscription is given before its echo is asked for again."""


class Doorbell:
    """Belongs to the event loop in which it is used."""

    def __init__(self, endpoints: Endpoints, wire: Wire) -> None:
        self._wire = wire
        self._address = tcp_address(endpoints.controller.host, endpoints.controller.doorbell)
        self._socket = create_socket(wire.context, zmq.SUB, endpoints.controller.host)
        self._socket.connect(self._address)
        self._events: dict[str, asyncio.Event] = {}
        self._subscriptions: dict[str, asyncio.Task[None]] = {}
        self._listener: asyncio.Task[None] | None = None

    def armed(self, partition: str) -> asyncio.Event:
        """An event that the partition's next ring sets. Take it before looking, wait for it after."""
        return self._events.setdefault(partition, asyncio.Event())

    async def subscribe(self, partition: str) -> None:
        """Return once every later ring for the partition will be heard.

        Raises QueueUnreachable if the doorbell stays silent for the client's deadline.
        """
        if partition not in self._subscriptions:
            self._subscriptions[partition] = asyncio.create_task(self._subscribe(partition))
        task = self._subscriptions[partition]
        try:
            await asyncio.shield(task)
        except BaseException:
            if task.done():  # failed for good; while it goes on, only this waiter was cancelled
                self._subscriptions.pop(partition, None)
            raise

    async def _subscribe(self, partition: str) -> None:
        """Subscribe, then to a topic of our own; hearing the second proves the first, for they arrive in order."""
        if self._listener is None:
            self._listener = asyncio.create_task(self._listen())
        echo = f"{partition}/{uuid.uuid4().hex}"
        self._socket.subscribe(topic(partition))
        self._socket.subscribe(topic(echo))
        heard = self.armed(echo)
        give_up = asyncio.get_running_loop().time() + self._wire.deadline
        while not heard.is_set():
            await self._wire.controller("ring", name=echo)
            try:
                async with asyncio.timeout(RETRY_SECONDS):
                    await heard.wait()
            except TimeoutError:
                if asyncio.get_running_loop().time() > give_up:
                    raise QueueUnreachable(
                        f"{self._wire.caller}: the queue's doorbell ({self._address}) is silent although the "
                        "controller answers; is its port reachable?"
                    ) from None
        self._socket.unsubscribe(topic(echo))

    async def _listen(self) -> None:
        while True:
            rung = (await self._socket.recv())[:-1].decode()
            event = self._events.pop(rung, None)
            if event is not None:
                event.set()

    async def close(self) -> None:
        tasks = [task for task in (self._listener, *self._subscriptions.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close(linger=0)


def topic(partition: str) -> bytes:
    """What the doorbell sends. Ends with a byte that no name has: `train` must not ring for `train2`."""
    return partition.encode() + b"\0"
