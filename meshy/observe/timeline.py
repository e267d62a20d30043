"""When was which service busy? Intervals on the wall clock, one JSON line each, and the idle share made from them."""

import atexit
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshy.observe.jsonl import read_jsonl

Interval = tuple[float, float]

BUSY = ("decode", "reward", "train")
"""Names of the intervals in which an engine works; everything else (waiting, publishing, queue) counts as idle."""

MERGE_GAP = 0.001
FLUSH_SECONDS = 1.0


class Timeline:
    """Records busy intervals into `path`, one line `{"name": ..., "start": ..., "end": ...}` each (unix seconds).

    Thread-safe. Intervals of one name that overlap, or are closer than `MERGE_GAP` seconds, are written as one, so
    a thousand decode steps in a row become a line. Lines are written about once a second and at `close`, each batch
    by one append, so that several processes may share a file.

    Example:
        timeline = Timeline(run_dir / "timeline" / "trainer.0.jsonl")
        with timeline.span("train"):
            ...
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._pending: dict[str, list[Interval]] = {}
        self._has_pending = threading.Event()
        self._closing = threading.Event()
        self._writer: threading.Thread | None = None
        atexit.register(self.close)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Records the time spent in the block, also when it raises."""
        start = time.time()
        try:
            yield
        finally:
            self.record(name, start, time.time())

    def record(self, name: str, start: float, end: float) -> None:
        """Records that `name` ran from `start` to `end`, unix seconds; an instant if the clock was set back."""
        end = max(start, end)
        with self._lock:
            intervals = self._pending.setdefault(name, [])
            if intervals and intervals[-1][0] <= start <= intervals[-1][1] + MERGE_GAP:
                intervals[-1] = (intervals[-1][0], max(end, intervals[-1][1]))
            else:
                intervals.append((start, end))
            if self._closing.is_set():
                self._write()
            elif self._writer is None:
                self._writer = threading.Thread(target=self._write_regularly, name="timeline", daemon=True)
                self._writer.start()
        self._has_pending.set()

    def flush(self) -> None:
        """Writes what is recorded so far."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Writes the rest; later records are written at once. May be called twice."""
        self._closing.set()
        self._has_pending.set()
        self.flush()
        atexit.unregister(self.close)

    def _write_regularly(self) -> None:
        while not self._closing.is_set():
            self._has_pending.wait()
            self._closing.wait(FLUSH_SECONDS)
            self._has_pending.clear()
            self.flush()

    def _write(self) -> None:
        lines = [
            json.dumps({"name": name, "start": round(start, 6), "end": round(end, 6)})
            for name, intervals in self._pending.items()
            for start, end in union(intervals, gap=MERGE_GAP)
        ]
        self._pending = {}
        if lines:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                file.write(("\n".join(lines) + "\n").encode())


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """The same points covered by disjoint intervals in ascending order; holes of at most `gap` are filled."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def covered(intervals: Iterable[Interval], start: float, end: float) -> float:
    """Seconds of [start, end] that lie in at least one interval."""
    return sum(max(0.0, min(stop, end) - max(begin, start)) for begin, stop in union(intervals))


def read_timeline(folder: str | Path, names: Sequence[str] = BUSY) -> list[Interval]:
    """Every interval of those names, of every service (`<folder>/*.jsonl`), unsorted."""
    return [
        (row["start"], row["end"])
        for path in sorted(Path(folder).glob("*.jsonl"))
        for row in read_jsonl(path)
        if row.get("name") in names
    ]


def idle_share(run_dir: str | Path, start: float, end: float) -> float:
    """The share (0..1) of [start, end], unix seconds, in which no service decodes, scores a reward or trains.

    Raises ValueError when the window is empty.
    """
    if end <= start:
        raise ValueError(f"an idle share needs a window longer than nothing, not {start} .. {end}")
    busy = covered(read_timeline(Path(run_dir) / "timeline"), start, end)
    return 1.0 - busy / (end - start)


def steady_window(steps: Sequence[Mapping[str, Any]], last_end: float | None = None) -> Interval | None:
    """From the start of the second step to the end of the last but one, unix seconds; None with fewer than 3 steps.

    `steps` are lines of metrics.jsonl. Where they lack `started` and `ended`, the steps are laid end to end by their
    `step_seconds`, backwards from `last_end` (when the last step ended); without that either, None.
    """
    if len(steps) < 3:
        return None
    inner = steps[1:-1]
    if all("started" in row and "ended" in row for row in inner):
        return float(inner[0]["started"]), float(inner[-1]["ended"])
    if last_end is None or any(row.get("step_seconds") is None for row in steps):
        return None
    end = last_end - steps[-1]["step_seconds"]
    return end - sum(row["step_seconds"] for row in inner), end
