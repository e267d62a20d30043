"""The live view on the terminal of the first ignitor: it follows the run folder, and never holds up the run."""

import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TextIO

from meshy.observe.jsonl import TailReader
from meshy.observe.runfolder import RunFolder
from meshy.observe.terminal import console, duration, mean, short, tiny

if TYPE_CHECKING:
    from rich.console import RenderableType

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
REMIND_SECONDS = 30.0
RECENT = 10
STOP_SECONDS = 2.0
TELLING_MISMATCH = 1e-6  # below it, trainer and inference differ by rounding in float32
READY = "ready"


@dataclass(kw_only=True)
class RunView:
    """What the terminal says, as a function of what happened. No I/O; `now` is in unix seconds."""

    steps: int
    started: float
    depth: str | None = None
    states: dict[str, tuple[str, float]] = field(default_factory=dict)
    last: Mapping[str, Any] | None = None
    last_change: float = 0.0
    recent: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def set_state(self, service: str, state: str, now: float) -> bool:
        """Notes the state of a service while it starts; False when that is nothing new."""
        if self.states.get(service, ("", 0.0))[0] == state:
            return False
        self.states[service] = (state, now)
        self.last_change = now
        return True

    def add_step(self, row: Mapping[str, Any], now: float) -> None:
        self.last = row
        self.last_change = now
        self.recent.append(row)

    @property
    def step(self) -> int:
        return int(self.last["step"]) if self.last else 0

    @property
    def ready(self) -> bool:
        return bool(self.states) and all(state == READY for state, _ in self.states.values())

    def start_line(self, now: float) -> str:
        """`starting: queue ready, inference loading (8 s), trainer 1/2 ready (3 s)`."""
        if self.ready:
            took = duration(self.last_change - self.started)
            return f"all services ready after {took}; waiting for the first step ({duration(now - self.last_change)})"
        groups: dict[str, list[tuple[str, float]]] = {}
        for service, entry in self.states.items():
            groups.setdefault(service.split(".")[0], []).append(entry)
        return "starting: " + (", ".join(_group_text(name, entries, now) for name, entries in groups.items()) or "...")

    def eta(self) -> float | None:
        """Seconds that the remaining steps will take at the pace of the last ones; None while or when there is none."""
        pace = mean(row.get("step_seconds") for row in self.recent)
        remaining = self.steps - self.step
        return pace * remaining if pace is not None and remaining > 0 else None

    def numbers(self) -> str:
        """The last step in numbers; the average reward is over the last 10 steps, where more than one is known."""
        row = self.last or {}
        average = mean(step.get("reward_mean") for step in self.recent)
        parts = [
            f"reward {short(row.get('reward_mean'))}" + (f" (avg {short(average)})" if len(self.recent) > 1 else ""),
            f"length {short(row.get('response_length_mean'))}",
            f"staleness {short(row.get('staleness_max'))}",
            f"{short(row.get('step_seconds'), 2)} s/step",
            f"{short(row.get('tokens_per_second'))} tok/s",
        ]
        mismatch = row.get("mismatch_kl") or 0.0
        if mismatch >= TELLING_MISMATCH:
            parts.append(f"mismatch KL {tiny(mismatch)}")
        return "  ".join(parts + ([f"queue {self.depth}"] if self.depth else []))

    def step_line(self) -> str:
        """One line for logs and pipes."""
        return f"step {self.step}/{self.steps}  {self.numbers()}"


def _group_text(name: str, entries: list[tuple[str, float]], now: float) -> str:
    waiting = [(state, since) for state, since in entries if state != READY]
    ready = len(entries) - len(waiting)
    if not waiting:
        return f"{name} ready"
    if ready:
        return f"{name} {ready}/{len(entries)} ready ({duration(now - min(since for _, since in waiting))})"
    return f"{name} {waiting[0][0]} ({duration(now - min(since for _, since in waiting))})"


def evaluation_line(row: Mapping[str, Any]) -> str:
    """`evaluation of weights v40: accuracy 91.8 % on 256 prompts (2.1 s)`."""
    accuracy = row.get("accuracy")
    percent = "-" if accuracy is None else f"{100 * accuracy:.1f} %"
    return (
        f"evaluation of weights v{row.get('weight_version', '?')}: accuracy {percent} "
        f"on {row.get('count', '?')} prompts ({short(row.get('seconds'), 2)} s)"
    )


class Progress:
    """Shows a run while it goes: on a terminal a live block, elsewhere a line for each thing that happens.

    A thread of its own follows metrics.jsonl and evals.jsonl and does all the writing, so that neither a slow terminal
    nor a closed pipe holds up the caller; it may be used from any thread.

    Example:
        with Progress(folder, steps=recipe.steps, depth=lambda: queue_depth(url)) as progress:
            progress.note("trainer: http://127.0.0.1:10754/health")
            progress.state("inference.0", "loading")
            progress.state("inference.0", "ready")
            ...
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        steps: int,
        depth: Callable[[], str | None] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """`depth` gives the queue's depth as a short text; it is called on the thread, at most once a second."""
        self._folder = folder
        self._depth = depth
        self._console = console(stream if stream is not None else sys.stdout)
        self._view = RunView(steps=steps, started=time.time())
        self._metrics = TailReader(folder.metrics)
        self._evals = TailReader(folder.evals)
        self._events: queue.SimpleQueue[tuple[str, ...] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.note(f"run folder  {self._folder.path}")
        self.note(f"watch it    meshy status {self._folder.path} --watch")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def note(self, text: str) -> None:
        """Shows a line of text above the live block."""
        self._events.put(("note", text))

    def state(self, service: str, state: str) -> None:
        """Shows that `service` (`inference.0`) is in `state` (`starting`, `ready` ...) while the run starts."""
        self._events.put(("state", service, state))

    def stop(self) -> None:
        """Shows what came last and leaves the terminal in order. Waits for a terminal that hangs 2 s, no longer."""
        self._events.put(None)
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            self._follow(show=lambda final: None)
            return
        from rich.live import Live

        # What others print meanwhile goes above the block, or the block would be drawn over it.
        with (
            Live(console=self._console, auto_refresh=False, redirect_stderr=sys.stderr.isatty()) as live,
            _logging_through_stderr(),
        ):
            self._console.show_cursor(True)  # a kill -9 must not leave a terminal without its cursor

            def show(final: bool) -> None:
                live.update(self._block(final), refresh=True)

            self._follow(show)

    def _follow(self, show: Callable[[bool], None]) -> None:
        live = self._console.is_terminal and not self._console.is_dumb_terminal
        next_depth = shown = reminded = 0.0
        while True:
            stopping, changed = self._take_events(POLL_SECONDS, live)
            now = time.time()
            if self._depth is not None and now >= next_depth and not stopping:
                self._view.depth = self._depth()
                next_depth = time.time() + 1.0
            changed |= self._read_files(now, live)
            if changed or stopping or now - shown >= 1.0:
                show(stopping)
                shown = now
            if stopping:
                return
            if not live and not self._view.last and now - max(reminded, self._view.last_change) >= REMIND_SECONDS:
                self._print(self._view.start_line(now))
                reminded = now

    def _take_events(self, timeout: float, live: bool) -> tuple[bool, bool]:
        """Waits for an event, takes all there are; (whether to stop, whether anything is new)."""
        changed = new_state = stopping = False
        wait: float | None = timeout
        while not stopping:
            try:
                event = self._events.get(timeout=wait) if wait else self._events.get_nowait()
            except queue.Empty:
                break
            changed, wait = True, None
            if event is None:
                stopping = True
            elif event[0] == "note":
                self._print(event[1])
            else:
                new_state |= self._view.set_state(event[1], event[2], time.time())
        if new_state and not live and not self._view.last:
            self._print(self._view.start_line(time.time()))
        return stopping, changed

    def _read_files(self, now: float, live: bool) -> bool:
        steps, evals = self._metrics.read(), self._evals.read()
        early = [row for row in evals if not row.get("weight_version")]
        for row in early:
            self._print(evaluation_line(row))
        for row in steps:
            self._view.add_step(row, now)
            if not live:
                eta = self._view.eta()
                self._print(self._view.step_line() + ("" if eta is None else f"  ETA {duration(eta)}"))
        for row in evals:
            if row not in early:
                self._print(evaluation_line(row))
        return bool(steps or evals)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _block(self, final: bool) -> "RenderableType":
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = time.time()
        view = self._view
        if view.last is None:
            return Text("" if final else view.start_line(now), style="cyan", overflow="ellipsis", no_wrap=True)
        head = Table.grid(padding=(0, 2))
        eta = view.eta()
        head.add_row(
            Text(f"step {view.step}/{view.steps}", style="bold"),
            ProgressBar(total=view.steps, completed=view.step, width=32),
            Text(f"{duration(now - view.started)} elapsed"),
            Text("" if final or eta is None else f"ETA {duration(eta)}", style="cyan"),
        )
        return Group(head, Text(view.numbers(), overflow="ellipsis", no_wrap=True))


@contextmanager
def _logging_through_stderr() -> Iterator[None]:
    """Lets log handlers that write to the terminal write to what `sys.stderr` is now."""
    moved = []
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.__stderr__, sys.__stdout__):
            moved.append((handler, handler.setStream(sys.stderr)))
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)
