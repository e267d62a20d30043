"""The status of a run on the terminal: tables, a live view, or JSON."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshy.observe.advice import advice
from meshy.observe.jsonl import finite, plain, read_jsonl
from meshy.observe.progress import RunView, evaluation_line
from meshy.observe.queue_table import consumers_table, partitions_table
from meshy.observe.runfolder import RunFolder
from meshy.observe.status import ENDED, FOREIGN, LOST_LOOKS, SILENT, RunStatus, ServiceStatus
from meshy.observe.summary import end_rows
from meshy.observe.terminal import SafeStream, console, duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

MOST_SERVICES = 40
STYLES = {
    "ready": "green",
    "running": "green",
    "finished": "green",
    "failed": "bold red",
    "lost": "bold red",
    SILENT: "red",
    FOREIGN: "red",
}


def show(look: Callable[[], RunStatus], *, watch: bool, as_json: bool, pause: float) -> int:
    """Prints what `look` returns; with `watch` again and again, `pause` seconds apart, until the run has ended."""
    out = console()
    if as_json:
        return _repeat(look, watch, pause, out, lambda state: out.print(to_line(state), markup=False, soft_wrap=True))
    if watch and out.is_terminal and not out.is_dumb_terminal:
        from rich.live import Live

        with Live(console=out, auto_refresh=False, vertical_overflow="visible") as live:
            return _repeat(look, True, pause, out, lambda state: live.update(render(state), refresh=True))
    return _repeat(look, watch, pause, out, lambda state: out.print(render(state)))


def _repeat(
    look: Callable[[], RunStatus], watch: bool, pause: float, out: "Console", display: Callable[[RunStatus], None]
) -> int:
    lost = 0  # a run that ends is lost for a moment, until its summary is there
    while True:
        state = look()
        display(state)
        lost = lost + 1 if state.state == "lost" else 0
        unread = isinstance(out.file, SafeStream) and out.file.gone
        if not watch or state.state in ENDED or lost >= LOST_LOOKS or unread:
            return 0
        time.sleep(pause)


def to_line(state: RunStatus) -> str:
    """One line of JSON."""
    return json.dumps(finite(state.to_json()), default=plain)


def render(state: RunStatus) -> "RenderableType":
    """The status as tables."""
    from rich.console import Group
    from rich.text import Text

    head = Text("run ").append(state.run_dir, "bold").append("   ").append(state.state, STYLES.get(state.state, "cyan"))
    parts: list[RenderableType] = [head, *(Text(line) for line in progress_lines(state))]
    folder = RunFolder(Path(state.run_dir))
    if state.summary:
        parts += [Text(""), *(Text(f"{label:<20}{value}") for label, value in end_rows(folder, state.summary))]
        parts += [Text(f"  - {text}") for text in advice(state.summary, read_jsonl(folder.metrics), folder.path)]
    if state.services:
        parts += [Text(""), services_table(state.services, state.time)]
        parts += [Text(line) for line in trouble_lines(state, folder)]
    if state.queue:
        parts += [Text(""), partitions_table(state.queue), Text(""), consumers_table(state.queue)]
    return Group(*parts)


def progress_lines(state: RunStatus) -> list[str]:
    """The last step and the last evaluation, a line each."""
    lines = []
    if state.step:
        view = RunView(steps=state.steps or 0, started=state.time)
        view.add_step(state.step, state.time)
        ended = state.step.get("ended")
        age = "" if ended is None or state.summary else f"  ({duration(max(0.0, state.time - ended))} ago)"
        eta = view.eta() if state.state == "running" else None
        lines.append(view.step_line() + ("" if eta is None else f"  ETA {duration(eta)}") + age)
    elif not state.summary:
        lines.append(f"step 0/{state.steps or '?'}")
    if state.evaluation:
        lines.append(evaluation_line(state.evaluation))
    if state.state == "lost":
        lines.append("no service answers and no end was recorded: the run was killed, or its hosts cannot be reached")
    return lines


def services_table(services: Sequence[ServiceStatus], now: float) -> "RenderableType":
    """A line for each process; of very many, those first that are not ready."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("service", "host", "GPUs", "pid", "admin", "state", "for", "detail"):
        view.add_column(heading, justify="right" if heading in ("pid", "admin", "for") else "left", overflow="fold")
    shown = services
    if len(services) > MOST_SERVICES:
        shown = sorted(services, key=lambda service: service.state == "ready")[:MOST_SERVICES]
    for service in shown:
        view.add_row(
            service.name,
            service.host,
            ",".join(map(str, service.gpus)) or "-",
            str(service.pid or "-"),
            str(service.admin_port),
            Text(service.state, STYLES.get(service.state, "yellow")),
            "-" if service.since is None else duration(max(0.0, now - service.since)),
            service.detail or "-",
        )
    if len(shown) < len(services):
        view.add_row(f"... {len(services) - len(shown)} more", *[""] * 7)
    return view


def trouble_lines(state: RunStatus, folder: RunFolder) -> list[str]:
    """Where to read on about services that do not answer."""
    troubled = [service.name for service in state.services if service.state in (SILENT, FOREIGN, "failed")]
    files = [folder.log("queue" if name.startswith("queue.") else name) for name in troubled]
    logs = [file for file in files if file.exists()]
    lines = [f"log of {path.stem}: {path}" for path in logs[:5]]
    return lines + ([f"and {len(logs) - 5} more in {folder.logs}"] if len(logs) > 5 else [])
