"""Watching a host's processes: what the death of one means, who is started again, and when the run is over."""

from __future__ import annotations

import logging
import queue
import signal
import sys
import threading
import time
from types import FrameType

from meshy.ignitor.agreement import Run
from meshy.ignitor.children import Buried, Child, Children
from meshy.ignitor.discover import Seat
from meshy.ignitor.ending import Ending, count_restart, hear, say
from meshy.ignitor.restarts import Restart, Restarts
from meshy.ignitor.rings import Rings
from meshy.observe.logs import last_traceback
from meshy.service.readiness import await_ready
from meshy.topology import Process

log = logging.getLogger(__name__)

QUEUE = "queue"
LISTEN_SECONDS = 0.5


class Interrupts:
    """SIGINT and SIGTERM as events of the watch loop; a second one cuts the orderly end short."""

    def __init__(self, children: Children) -> None:
        self.count = 0
        self._children = children
        self.events: queue.SimpleQueue[Child | Buried | signal.Signals | Ending] = children.exits
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._heard)

    def _heard(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        self.events.put(signal.Signals(signum))
        if self.count > 1:
            self._children.kill_now()


class Watch:
    """The events of one ignitor: its children's exits, signals, and what other ignitors have said."""

    def __init__(self, seat: Seat, run: Run, children: Children, interrupts: Interrupts) -> None:
        self._seat, self._run, self._children, self._interrupts = seat, run, children, interrupts
        self._rings = Rings(seat.rank, run, seat.store, self._ring_failed)
        self._restarts = Restarts(restart_limits(run), clock=time.monotonic)
        self._due: dict[str, float] = {}
        self._restarting: list[tuple[float, Child]] = []
        self._over: dict[str, threading.Event] = {}
        for child in children.all:
            self._await_ready(child, "")

    def until_the_end(self) -> Ending:
        """Wait for the run's end: a child's exit here, a signal, or what another ignitor has said."""
        try:
            while (ending := self._next()) is None:
                self._start_what_is_due()
                self._rings.listen()
            return ending
        finally:
            self._rings.close()
            for over in self._over.values():
                over.set()

    def _next(self) -> Ending | None:
        wait = min([LISTEN_SECONDS, *(due - time.monotonic() for due, _ in self._restarting)])
        try:
            event = self._interrupts.events.get(timeout=max(0.0, wait))
        except queue.Empty:
            return hear(self._seat.store)
        if isinstance(event, Ending):
            return say(self._seat.store, event)
        if isinstance(event, signal.Signals):
            ending = Ending("interrupted", "ignitor", f"{event.name} was received", self._seat.gpu.host)
            return say(self._seat.store, ending)
        if isinstance(event, Buried):
            self._buried(event.child)
            return None
        died = self._ending_of(event)
        return None if died is None else say(self._seat.store, died)

    def _ending_of(self, child: Child) -> Ending | None:
        """What the exit of a child means for the run; None where it goes on."""
        if over := self._over.pop(child.name, None):
            over.set()
        group = child.name.partition(".")[0]
        code = child.process.returncode
        failed = code != 0 or group == QUEUE
        if not failed and self._run.recipe.group(group).config.ends_run:
            return Ending("finished", child.name, "it has done its work", self._seat.gpu.host)
        if not failed:
            log.info("%s has done its work", child.name)
            self._children.bury(child)
            return None
        heard = hear(self._seat.store)
        if heard is not None and heard.status != "failed":
            return heard  # it ended in the wake of the run's own end
        restart = self._restarts.after_death(child.name, code)
        self._report(child, restart)
        if restart is None:
            reason = child.how_it_ended + self._restarts.told(child.name)
            return Ending("failed", child.name, reason, self._seat.gpu.host, str(child.log))
        count_restart(self._seat.store, child.name)
        self._due[child.name] = time.monotonic() + restart.wait
        self._children.bury(child)
        return None

    def _buried(self, child: Child) -> None:
        """The run goes on without a child of which nothing is left: its GPUs are free, and so are its ports."""
        self._rings.ended(child.name, child.life)
        if (due := self._due.pop(child.name, None)) is not None:
            self._restarting.append((due, child))

    def _ring_failed(self, ring: str, error: BaseException) -> None:
        reason = f"the keeper of ring {ring!r} has failed: {error}"
        self._children.exits.put(Ending("failed", "ignitor", reason, self._seat.gpu.host))

    def _report(self, child: Child, restart: Restart | None) -> None:
        """Its last words, and what becomes of it."""
        trace = last_traceback(child.log, since=child.log_start) or "(it has written nothing)"
        lines = [f"meshy: {child.name} on {self._seat.gpu.host} {child.how_it_ended}. The end of {child.log}:", ""]
        lines += [f"    {line}" for line in trace.splitlines()]
        if restart is not None:
            lines += ["", f"meshy: {child.name} is started again in {restart.wait:.0f} s ({restart})"]
        print("\n" + "\n".join(lines), file=sys.stderr, flush=True)

    def _start_what_is_due(self) -> None:
        now = time.monotonic()
        for entry in [entry for entry in self._restarting if entry[0] <= now]:
            self._restarting.remove(entry)
            self._await_ready(self._children.replace(entry[1]), "is back")

    def _await_ready(self, child: Child, said: str) -> None:
        """Note when a service that may be started again is ready, and say so; on a thread, for it may take long."""
        process = next((p for p in self._run.topology.processes if p.name == child.name), None)
        if process is None or not self._restarts.allows(child.name):
            return
        over = self._over[child.name] = threading.Event()
        threading.Thread(target=self._tell_when_ready, args=(process, over, said), daemon=True).start()

    def _tell_when_ready(self, process: Process, over: threading.Event, said: str) -> None:
        started = time.monotonic()
        if not await_ready([process], self._run.launch.run_id, over):
            return
        self._restarts.ready(process.name)
        if said:
            seconds = time.monotonic() - started
            print(f"meshy: {process.name} {said} after {seconds:.0f} s", file=sys.stderr, flush=True)


def restart_limits(run: Run) -> dict[str, int]:
    """How often each process may be started again. A replica of several processes is not: its others would go on with
    a world in which the new one does not exist."""
    return {
        process.name: run.recipe.group(replica.group).config.max_restarts
        for replica in run.topology.replicas
        for process in replica.processes
        if len(replica.processes) == 1
    }
