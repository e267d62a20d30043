"""What the first ignitor tells the person at the terminal: the run as it goes, and how it ended."""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.error
import urllib.request
from types import TracebackType
from typing import Any, Self

from meshy.ignitor.agreement import Run
from meshy.ignitor.ending import Ending
from meshy.observe.progress import Progress
from meshy.observe.summary import Failure, build_summary, print_end

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5


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

    def end(self, ending: Ending, started: float) -> None:
        """Write the summary and print how it went."""
        self._over.set()
        self._progress.stop()
        failure = None
        if ending.status == "failed":
            failure = Failure(service=ending.service, reason=ending.reason, log=ending.log or None)
        summary = build_summary(
            self._run.folder, status=ending.status, started=started, ended=time.time(), failure=failure
        )
        print_end(self._run.folder, summary)

    def _look(self) -> None:
        """Ask each service how it is until all are ready."""
        waiting = list(self._run.topology.processes)
        while waiting and not self._over.is_set():
            for process in list(waiting):
                state = ask(f"http://{process.host}:{process.admin_port}/health").get("state", "loading")
                self._progress.state(process.name, state)
                if state == "ready":
                    waiting.remove(process)
            self._over.wait(LOOK_SECONDS)

    def _queue_depth(self) -> str | None:
        controller = self._run.topology.controller
        table = ask(f"http://{controller.host}:{controller.ports[3]}/table")
        return queue_depth(table)


def queue_depth(table: dict[str, Any]) -> str | None:
    """`train 24`: rows alive in the partitions of work; None while the queue does not answer."""
    partitions = table.get("partitions", {})
    parts = [f"{name} {entry['rows']}" for name, entry in partitions.items() if name not in ("gen_gate", "eval")]
    return ", ".join(parts) or None


def ask(url: str) -> dict[str, Any]:
    """The JSON object that `url` answers, also with an error status; empty where nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            data = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            try:
                data = json.load(error)
            except ValueError:
                return {}
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
