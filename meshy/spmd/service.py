"""The base class of SPMD roles: the trainer, a teacher, any model spread over several GPUs."""

import os
import threading
import traceback
from typing import Any

from meshy.service import Context, Service
from meshy.spmd.crew import Crew
from meshy.spmd.groups import Place, ProcessGroups

# Seconds that a failed rank may take to print its traceback and unwind, before it is ended for good.
FAILURE_GRACE = 5.0


class Stop:
    """The command that ends every rank's `run`."""


class SpmdService(Service):
    """One process a GPU. Rank 0 leads: it decides what is to be done next (from the queue, from its admin endpoint) and
    gives it as a command to all ranks, itself included; every rank executes the same commands in the same order.

    A role fills:
        setup()            every rank: call super().setup() first, then build the engine (collective).
        execute(command)   every rank: do it; collectives are allowed. The leader gets the result.
        lead()             rank 0 only: the loop that calls `self.command(...)`. Its return ends the replica.
        admin_routes(app), health(), metrics()   as in every service.
    A rank that raises ends the whole replica, each rank saying why.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._crew: Crew | None = None
        self._groups: ProcessGroups | None = None

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    @property
    def groups(self) -> ProcessGroups:
        """The replica's process groups; there once `setup` of this base class has run."""
        assert self._groups is not None, "call super().setup() first"
        return self._groups

    def setup(self) -> None:
        replica = self.context.replica
        place = Place(rank=self.rank, world_size=self.world_size, host=replica.host, port=replica.distributed_port)
        timeout = getattr(self.config, "collective_timeout", 600.0)
        self._groups = ProcessGroups(place, collective_timeout=timeout)
        self._crew = Crew(self.rank, self.world_size, replica.host, self.groups.store)

    def execute(self, command: Any) -> Any:
        """Do what the leader has decided; on every rank."""
        raise NotImplementedError(f"{type(self).__name__} has no execute()")

    def lead(self) -> None:
        """The leader's loop."""
        raise NotImplementedError(f"{type(self).__name__} has no lead()")

    def command(self, command: Any) -> Any:
        """Leader: have every rank execute `command` (small and picklable); returns this rank's result."""
        assert self._crew is not None
        self._crew.send(command)
        return self.execute(command)

    def run(self) -> None:
        assert self._crew is not None
        try:
            if self.rank == 0:
                self.lead()
                self._crew.send(Stop())
            else:
                self._follow()
        except Exception:
            self.report_failure()
            raise

    def _follow(self) -> None:
        assert self._crew is not None
        while not isinstance(command := self._crew.receive(), Stop):
            self.execute(command)

    def report_failure(self) -> None:
        """Tell the other ranks, and make sure that this one ends even if something will not unwind."""
        watchdog = threading.Timer(FAILURE_GRACE, os._exit, (1,))
        watchdog.daemon = True
        watchdog.start()
        if self._crew is not None:
            self._crew.fail(traceback.format_exc())

    def close(self) -> None:
        if self._crew is not None and self.state == "failed":
            self._crew.fail("it raised; its own log says what")  # also where `setup` has raised
        elif self._crew is not None:
            self._crew.close()
        if self._groups is not None and self.state not in ("failed", "stopping"):
            self._groups.close()
