"""What the first ignitor tells the person at the terminal: the run as it goes, and how it ended."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from meshy.ignitor.agreement import Run
from meshy.ignitor.ending import Ending
from meshy.observe.ask import ask_json
from meshy.observe.progress import Progress
from meshy.observe.queue_table import depth
from meshy.observe.summary import Failure, build_summary, print_end

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
TROUBLE_SECONDS = 5.0
SINCE = re.compile(r" \(for \d+ s\)")  # what changes although nothing has happened


class Story:
    """A progress view fed by the services' admin endpoints while the run starts, and the summary at its end."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._progress = Progress(run.folder, steps=run.recipe.steps, depth=self._queue_depth)
        self._over = threading.Event()
        self._onlooker = threading.Thread(target=self._look, name="onlooker", daemon=True)

    def __enter__(self) -> Self:
        self._progress.__enter__()
        topology = self._run.topology
        self._progress.note(
            f"{len(topology.processes)} services on {len(topology.hosts)} host(s), ports from {topology.base_port}; "
            f"admin of {topology.processes[0].name}: http://{topology.processes[0].host}:"
            f"{topology.processes[0].admin_port}/health"
        )
        self._onlooker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._progress.stop()

    def end(self, ending: Ending, started: float, restarts: Mapping[str, int]) -> None:
        """Write the summary and print how it went. restarts: how often each service was started again."""
        self._over.set()
        self._progress.stop()
        failure = None
        if ending.status == "failed":
            failure = Failure(service=ending.service, reason=ending.reason, log=ending.log or None)
        summary = build_summary(
            self._run.folder,
            status=ending.status,
            started=started,
            ended=time.time(),
            failure=failure,
            restarts=restarts,
        )
        print_end(self._run.folder, summary)

    def _look(self) -> None:
        """Ask each service how it is: often until all are ready, then now and then for what troubles it."""
        controller = self._run.topology.controller
        waiting = {"queue": (controller.host, controller.ports[3])}
        waiting |= {process.name: (process.host, process.admin_port) for process in self._run.topology.processes}
        while waiting and not self._over.is_set():
            for name, (host, port) in list(waiting.items()):
                state = ask(host, port, "/health").get("state", "loading")
                self._progress.state(name, state)
                if state == "ready":
                    del waiting[name]
            self._over.wait(LOOK_SECONDS)
        told: dict[str, str] = {}
        while not self._over.wait(TROUBLE_SECONDS):
            self._tell_trouble(told)

    def _tell_trouble(self, told: dict[str, str]) -> None:
        """A line for each replica whose leader says something else of itself than the last time."""
        for replica in self._run.topology.replicas:
            health = ask(replica.host, replica.leader.admin_port, "/health")
            detail = str(health.get("detail") or "") if health.get("state") == "ready" else ""
            what = SINCE.sub("", detail)
            if what != told.get(replica.name, ""):
                told[replica.name] = what
                self._progress.note(f"{replica.name}: {detail or 'all is well again'}")

    def _queue_depth(self) -> str | None:
        controller = self._run.topology.controller
        return depth(ask(controller.host, controller.ports[3], "/table"))


def ask(host: str, port: int, path: str) -> dict[str, Any]:
    """The JSON object that an admin endpoint answers, with whatever status; empty where nothing answers."""
    try:
        _, data = ask_json(host, port, path, deadline=1.0)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
