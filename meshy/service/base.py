"""The base class of every role."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from meshy.lifetime import former_lives, own_life
from meshy.observe.timeline import Timeline
from meshy.service.context import Context

if TYPE_CHECKING:
    import torch
    from fastapi import FastAPI

    from meshy.colocation.agent import Agent
    from meshy.queue.sync import QueueClient

State = Literal["starting", "waiting", "ready", "stopping", "failed"]


class Service:
    """One process of a role. Subclass it and fill `setup` and `run`; everything else has a sensible default.

    The life of a service: construction, `setup` (load what is heavy), the groups in `wait_for` become ready, `run`
    (until the work is done or `stopping` is set), `close`. Whatever `run` raises ends the run with its traceback.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.recipe = context.recipe
        self.config: Any = context.group.config
        self.log = logging.getLogger(f"meshy.{context.group.id}")
        self.stopping = threading.Event()
        self.timeline = Timeline(context.folder.timeline_of(context.name))
        self.state: State = "starting"
        self.since = time.time()
        self.detail = ""
        self.ring: Agent | None = None  # in a ring, of the process that speaks for the replica

    # Hooks ------------------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Load what the role needs. Other services are not yet known to be ready."""

    def run(self) -> None:
        """Do the work. Returning ends this service in good order."""
        self.stopping.wait()

    def close(self) -> None:
        """Let go of what `setup` and `run` took. Called once, also after a failure."""

    def health(self) -> dict[str, Any]:
        """More for `/health`: small JSON values that say how the service is."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Numbers for `/metrics`, by name."""
        return {}

    def admin_routes(self, app: FastAPI) -> None:
        """Add routes of the role's own to the admin endpoint."""

    def free_gpu(self) -> None:
        """In a ring: give up all memory on this replica's GPUs, on every rank."""
        raise NotImplementedError(f"{type(self).__name__} is in a ring, but does not say how to free its GPUs")

    def restore_gpu(self, payload: Mapping[str, Any]) -> None:
        """In a ring: bring back what `free_gpu` gave up. payload: what has travelled with the token."""
        raise NotImplementedError(f"{type(self).__name__} is in a ring, but does not say how to use its GPUs again")

    def gpu_payload(self) -> dict[str, Any]:
        """In a ring: small JSON values that whoever uses the GPUs next should know; they travel on until changed."""
        return {}

    def disconnect(self) -> None:
        """Let go of what this base class holds."""
        if self.ring is not None:
            self.ring.close()
        if "queue" in self.__dict__:
            self.queue.close()
        self.timeline.close()

    # What a role can use ----------------------------------------------------------------------------------------------

    @cached_property
    def queue(self) -> QueueClient:
        """The client of the queue, which knows this role's declared columns. Connects when first used; what a former
        life of this process had taken and not finished is given to whoever asks next then."""
        from meshy.queue.sync import QueueClient

        return QueueClient(
            self.context.endpoints,
            self.context.topology.contract,
            self.context.replica.name,
            life=own_life(),
            former=former_lives(),
        )

    @cached_property
    def device(self) -> torch.device:
        """The device that this process computes on; the ignitor shows each process only its own GPUs."""
        import torch

        from meshy.device import device_kind

        return torch.device("cuda", 0) if device_kind() == "cuda" and self.context.process.gpus else torch.device("cpu")

    @contextmanager
    def gpu(self) -> Iterator[None]:
        """Use the GPUs of this service: `with self.gpu(): ...`. In a ring this waits for the token and passes it on
        afterwards; outside, they are its own and nothing happens."""
        if self.ring is None:
            yield
            return
        with self.ring.gpu():
            yield

    def tell(self, state: State, detail: str = "") -> None:
        """Say what the service is doing; seen in `/health` and `meshy status`. ValueError for no such state."""
        if state not in get_args(State):
            raise ValueError(
                f"{self.context.process.name} tells state {state!r}; there are {', '.join(get_args(State))}"
            )
        if state != self.state:
            self.log.info("%s%s", state, f": {detail}" if detail else "")
            self.since = time.time()
        self.state, self.detail = state, detail
