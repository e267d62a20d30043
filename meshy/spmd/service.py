"""The base class of SPMD roles: the trainer, a teacher, any model spread over several GPUs."""

import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from meshy.service import Context, Service
from meshy.spmd.crew import Crew
from meshy.spmd.groups import Place, ProcessGroups
from meshy.spmd.orders import EnterGpu, FreeGpu, GoOn, LeaveGpu, RestoreGpu, Stop

# Seconds that a failed rank may take to print its traceback and unwind, before it is ended for good.
FAILURE_GRACE = 5.0


class SpmdService(Service):
    """One process a GPU. Rank 0 leads: it decides what is to be done next (from the queue, from its admin endpoint) and
    gives it as a command to all ranks, itself included; every rank executes the same commands in the same order.

    A role fills:
        setup()            every rank: call super().setup() first, then build the engine (collective).
        execute(command)   every rank: do it; collectives are allowed. The leader gets the result.
        aside(order)       every rank, on another thread, whatever it is busy with: begin what needs no collectives.
        lead()             rank 0 only: the loop that calls `self.command(...)`. Its return ends the replica.
        admin_routes(app), health(), metrics()   as in every service.
        free_rank(), restore_rank(payload)       every rank, in a ring: give up what is on its GPU, bring it back.
    `with self.gpu():` stands in `setup` on every rank, for all go in together, and in `lead` round `self.command(...)`.
    A rank that raises ends the whole replica, each rank saying why.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._crew: Crew | None = None
        self._groups: ProcessGroups | None = None
        self._commanding = threading.RLock()  # in a ring, a FALLBACK service frees on a thread of the agent's
        self._inside = 0
        self._failed_inside = False
        self._following = False

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
        self._crew = Crew(self.rank, self.world_size, replica.host, self.groups.store, on_aside=self.aside)

    def execute(self, command: Any) -> Any:
        """Do what the leader has decided; on every rank."""
        raise NotImplementedError(f"{type(self).__name__} has no execute()")

    def lead(self) -> None:
        """The leader's loop."""
        raise NotImplementedError(f"{type(self).__name__} has no lead()")

    def alone(self, work: Callable[[], None]) -> None:
        """In `setup`, every rank: the leader does this work, and the others wait for it, not in a collective, so that
        it may take long; a leader that fails or dies ends them."""
        assert self._crew is not None, "call super().setup() first"
        if self.rank == 0:
            work()
            self._crew.send(GoOn())
        else:
            self._obey(GoOn)

    def command(self, command: Any) -> Any:
        """Leader: have every rank execute `command` (small and picklable); returns this rank's result."""
        assert self._crew is not None
        with self._commanding:
            self._crew.send(command)
            return self.execute(command)

    def aside(self, order: Any) -> None:
        """Begin what the leader has told aside; on every rank, on another thread. It must be quick."""
        raise NotImplementedError(f"{type(self).__name__} has no aside()")

    def tell_aside(self, order: Any) -> None:
        """Leader, from any thread: have every rank, this one included, begin `order` (small and picklable)."""
        assert self._crew is not None
        self._crew.send_aside(order)
        self.aside(order)

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
        self._following = True
        self._obey(Stop)

    def _obey(self, last: type[Any]) -> None:
        """Other ranks: do what the leader tells, up to an order of this kind."""
        assert self._crew is not None
        while not isinstance(order := self._crew.receive(), last):
            match order:
                case FreeGpu():
                    self.free_rank()
                    self._crew.confirm()
                case RestoreGpu(payload):
                    self.restore_rank(payload)
                    self._crew.confirm()
                case EnterGpu() | LeaveGpu():
                    pass  # for ranks that stand at a block of their own
                case _:
                    self.execute(order)

    # In a ring --------------------------------------------------------------------------------------------------------

    def free_rank(self) -> None:
        """In a ring: give up all memory on this rank's GPU. No collectives."""
        raise NotImplementedError(f"{type(self).__name__} is in a ring, but does not say how to free its GPUs")

    def restore_rank(self, payload: Mapping[str, Any]) -> None:
        """In a ring: bring back what `free_rank` gave up. payload: of the ring's token. No collectives."""
        raise NotImplementedError(f"{type(self).__name__} is in a ring, but does not say how to use its GPUs again")

    def free_gpu(self) -> None:
        """Returns when every rank has freed: the token may go on then."""
        if self._failed_inside and self.world_size > 1:
            raise RuntimeError(
                "the GPUs of this replica are not freed: its leader has failed while all ranks used them, and others "
                "may be stuck; they are free when the replica has ended"
            )
        self._everywhere(FreeGpu(), self.free_rank, "free their GPUs")

    def restore_gpu(self, payload: Mapping[str, Any]) -> None:
        """Returns when every rank can compute."""
        self._everywhere(
            RestoreGpu(dict(payload)), lambda: self.restore_rank(payload), "restore what was on their GPUs"
        )

    def _everywhere(self, order: FreeGpu | RestoreGpu, mine: Callable[[], None], what: str) -> None:
        assert self._crew is not None, "call super().setup() before gpu()"
        with self._commanding:
            self._crew.send(order)
            mine()
            self._crew.wait_for_all(what)

    @contextmanager
    def gpu(self) -> Iterator[None]:
        """In a ring: the leader waits for the token and lets the other ranks in, and nobody goes on before all of them
        have freed. Outside, nothing happens."""
        if self.context.replica.ring is None:
            yield
        elif self.rank == 0:
            yield from self._gpu_of_leader()
        elif self._following:
            raise RuntimeError(f"rank {self.rank}: it is the leader who enters gpu(), before it gives a command")
        else:
            yield from self._gpu_of_others()

    def _gpu_of_leader(self) -> Iterator[None]:
        assert self._crew is not None, "call super().setup() before gpu()"
        with super().gpu():
            outermost = not self._inside
            if outermost:
                self._crew.send(EnterGpu())
            self._inside += 1
            try:
                yield
            except Exception:
                self._failed_inside = True
                raise
            finally:
                self._inside -= 1
        if outermost:
            self._crew.send(LeaveGpu())

    def _gpu_of_others(self) -> Iterator[None]:
        if not self._inside:
            self._obey(EnterGpu)
        self._inside += 1
        yield
        self._inside -= 1
        if not self._inside:
            self._obey(LeaveGpu)

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
