"""`meshy status RUN`: how a run is, asked from outside, through its folder and its services' admin endpoints."""

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshy.observe.ask import get_json
from meshy.observe.jsonl import read_jsonl
from meshy.observe.queue_table import QueueTable
from meshy.observe.runfolder import RunFolder, RunFolderError, read_json
from meshy.observe.terminal import SafeStream

DEADLINE = 2.0
ASK_AT_ONCE = 512
WATCH_SECONDS = 1.0
STARTING_SECONDS = 60.0
LOST_LOOKS = 15
QUEUE = "queue.controller"

SILENT = "silent"
FOREIGN = "foreign"
ENDED = ("finished", "failed", "interrupted")


@dataclass(frozen=True, kw_only=True)
class ServiceStatus:
    """One process. `state` is what it says, or `silent` (no answer) or `foreign` (another run answers on its port)."""

    name: str
    host: str
    admin_port: int
    gpus: tuple[int, ...] = ()
    pid: int | None = None
    state: str
    since: float | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run at one moment. `state`: starting, running, finished, failed, interrupted or lost.

    `lost`: no service answers and nothing was said about an end. `step` and `evaluation` are the last lines of
    metrics.jsonl and evals.jsonl.
    """

    run_dir: str
    run_id: str | None
    state: str
    time: float
    steps: int | None
    step: Mapping[str, Any] | None
    evaluation: Mapping[str, Any] | None
    services: tuple[ServiceStatus, ...]
    queue: QueueTable | None
    summary: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def status(run: str | Path, *, watch: bool = False, as_json: bool = False) -> int:
    """Prints how the run is, over and over until it ends with `watch`. The exit code: 2 when `run` is not a run."""
    from meshy.observe.status_view import show

    try:
        folder = RunFolder.open(run)
        return show(lambda: look(folder), watch=watch, as_json=as_json, pause=WATCH_SECONDS)
    except RunFolderError as error:
        print(f"meshy status: {error}", file=SafeStream(sys.stderr))
        return 2
    except KeyboardInterrupt:
        return 0


def look(folder: RunFolder, deadline: float = DEADLINE) -> RunStatus:
    """Asks everyone at once, each for at most `deadline` seconds. Raises RunFolderError when the folder is damaged."""
    topology, recipe, summary = (read_json(path) for path in (folder.topology, folder.recipe, folder.summary))
    steps, evals = read_jsonl(folder.metrics), read_jsonl(folder.evals)
    services: list[ServiceStatus] = []
    table: QueueTable | None = None
    if topology and not summary:
        services, table = asyncio.run(_ask_all(topology, deadline))
    return RunStatus(
        run_dir=str(folder.path),
        run_id=(topology or {}).get("run_id"),
        state=_state(folder, summary, services, bool(steps)),
        time=time.time(),
        steps=(recipe or {}).get("steps"),
        step=steps[-1] if steps else None,
        evaluation=evals[-1] if evals else None,
        services=tuple(services),
        queue=table,
        summary=summary,
    )


def _state(folder: RunFolder, summary: Mapping[str, Any] | None, services: list[ServiceStatus], stepped: bool) -> str:
    if summary:
        return str(summary["status"])
    answering = [service for service in services if service.state not in (SILENT, FOREIGN)]
    if not answering:
        newest = max(path.stat().st_mtime for path in (folder.topology, folder.path, folder.logs) if path.exists())
        return "starting" if not stepped and time.time() - newest < STARTING_SECONDS else "lost"
    return "running" if stepped or all(service.state == "ready" for service in services) else "starting"


async def _ask_all(topology: Mapping[str, Any], deadline: float) -> tuple[list[ServiceStatus], QueueTable | None]:
    run_id = topology.get("run_id")
    controller = topology["queue"]["controller"]
    queue = {"name": QUEUE, "host": controller["host"], "admin_port": controller["ports"][-1]}
    turns = asyncio.Semaphore(ASK_AT_ONCE)
    services, table = await asyncio.gather(
        asyncio.gather(*(_ask_health(turns, entry, run_id, deadline) for entry in [queue, *topology["services"]])),
        _ask_table(queue, deadline),
    )
    ours = services[0].state not in (SILENT, FOREIGN)  # another run's queue is none of this run's business
    return list(services), table if ours else None


async def _ask_health(
    turns: asyncio.Semaphore, entry: Mapping[str, Any], run_id: str | None, deadline: float
) -> ServiceStatus:
    place = {
        "name": entry["name"],
        "host": entry["host"],
        "admin_port": entry["admin_port"],
        "gpus": tuple(entry.get("gpus", ())),
    }
    address = f"{entry['host']}:{entry['admin_port']}"
    try:
        async with turns:
            code, health = await get_json(entry["host"], entry["admin_port"], "/health", deadline)
        if not isinstance(health, dict):
            raise ValueError("not an object")
    except TimeoutError:
        return ServiceStatus(**place, state=SILENT, detail=f"no answer from {address} in {deadline:g} s")
    except OSError as error:
        return ServiceStatus(**place, state=SILENT, detail=f"nothing listens on {address} ({_short(error)})")
    except ValueError:
        return ServiceStatus(**place, state=FOREIGN, detail=f"what answers on {address} is no service of Meshy")
    if run_id is not None and health.get("run_id", run_id) != run_id:
        return ServiceStatus(**place, state=FOREIGN, detail=f"run {health['run_id']} answers on {address}")
    return ServiceStatus(
        **place,
        pid=health.get("pid"),
        state=str(health.get("state", "ready" if code == 200 else "starting")),
        since=health.get("since"),
        detail=str(health.get("detail", "")),
    )


def _short(error: OSError) -> str:
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)


async def _ask_table(queue: Mapping[str, Any], deadline: float) -> QueueTable | None:
    try:
        code, table = await get_json(queue["host"], queue["admin_port"], "/table", deadline)
    except (OSError, ValueError):  # what there is to say, the queue's own line among the services says
        return None
    return table if code == 200 and isinstance(table, dict) else None
