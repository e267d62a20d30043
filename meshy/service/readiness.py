"""Waiting until other services are ready, by asking their admin endpoints."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from meshy.observe.ask import ask_json
from meshy.topology import Process, Topology

log = logging.getLogger(__name__)

WATCHDOG_SECONDS = 30.0


def wait_until_ready(topology: Topology, groups: Iterable[str], run_id: str, stopping: threading.Event) -> None:
    """Returns once every replica of `groups` says that it is ready, or `stopping` is set."""
    await_ready([r.leader for group in groups for r in topology.replicas_of(group)], run_id, stopping)


def await_ready(processes: Iterable[Process], run_id: str, stopping: threading.Event) -> bool:
    """True once each of `processes` says that it is ready; False when `stopping` was set before.

    There is no deadline, for a model may take long to load, and a service that dies is the ignitor's business; a line
    every 30 s says who is waited for.
    """
    waiting = list(processes)
    started = said = time.monotonic()
    pause = 0.02
    while waiting and not stopping.is_set():
        waiting = [process for process in waiting if not is_ready(process, run_id)]
        if waiting and time.monotonic() - said > WATCHDOG_SECONDS:
            said = time.monotonic()
            log.info("waiting since %.0f s for %s", said - started, ", ".join(p.name for p in waiting))
        if waiting:
            stopping.wait(pause)
            pause = min(pause * 1.3, 0.25)
    return not waiting


def is_ready(process: Process, run_id: str) -> bool:
    """Whether the service answers as ready. RuntimeError when a service of another run answers on its port."""
    try:
        status, health = ask_json(process.host, process.admin_port, "/health", deadline=2.0)
    except (OSError, ValueError):
        return False  # not listening yet
    if health.get("run_id") != run_id:
        raise RuntimeError(
            f"port {process.admin_port} on {process.host} should belong to {process.name} of this run, but "
            f"{health.get('service', 'something else')} of run {health.get('run_id')!r} answers there; set base_port"
        )
    return status == 200
