"""Slots that decode without a model: which token of which response is written when, and by which weights. No I/O.

Time is counted in decode steps, which all slots take together. A response of n tokens takes a slot for n steps; a slot
that becomes free goes at that very boundary to the next in line, however late anybody looks. A request that comes
during a step begins with the next one. Weights take effect between two steps.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Any

ROUNDING = 1e-6  # of a step


@dataclass(eq=False, slots=True)
class Job:
    """A request for `tokens` tokens. written, spans (version, from, to), aborted: there once it has ended."""

    rid: str
    tokens: int
    sink: Any = None
    earliest: int = 0  # the step before which it was not there
    first: int | None = None  # the step that writes its first token
    written: int = 0
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    aborted: bool = False
    ended: bool = False


class Decoding:
    """`now` is any clock's seconds, and never goes back; every method settles what has ended by then."""

    def __init__(self, slots: int, step_seconds: float, now: float, version: int = 0) -> None:
        self.slots, self.step_seconds = slots, step_seconds
        self.paused = False
        self.tokens = 0  # written by jobs that have ended
        self.jobs: dict[str, Job] = {}  # running and waiting
        self.running = 0
        self._line: deque[Job] = deque()
        self._ends: list[tuple[int, int, Job]] = []
        self._count = 0
        self._done: list[Job] = []
        self._origin, self._base = now, 0.0
        self._versions: list[tuple[int, int]] = [(0, version)]  # (from this step on, version)

    @property
    def version(self) -> int:
        return self._versions[-1][1]

    @property
    def waiting(self) -> int:
        return len(self.jobs) - self.running

    def submit(self, job: Job, now: float) -> None:
        """Raises ValueError where a job of that name is under way."""
        self._settle(now)
        if job.rid in self.jobs:
            raise ValueError(f"a request {job.rid!r} is under way already")
        if not self.running:  # nobody's step is under way: one begins with this request
            self._base, self._origin = math.ceil(self._steps(now) - ROUNDING), now
        job.earliest = self._next_step(now)
        self.jobs[job.rid] = job
        self._line.append(job)
        self._fill(job.earliest)

    def advance(self, now: float) -> list[Job]:
        """Those that have ended since this was asked last."""
        self._settle(now)
        done, self._done = self._done, []
        return done

    def next_end(self) -> float | None:
        """When the next job ends, if nothing else happens; None if none does."""
        self._forget_aborted()
        if self.paused or not self._ends:
            return None
        return self._origin + (self._ends[0][0] - self._base) * self.step_seconds

    def abort(self, rids: set[str] | None, now: float) -> int:
        """End these (None: all) with what is written of them. How many there were."""
        self._settle(now)
        found = [job for rid, job in self.jobs.items() if rids is None or rid in rids]
        whole = math.floor(self._steps(now) + ROUNDING)
        for job in found:
            if job.first is None:
                self._line.remove(job)
                self._end(job, 0, aborted=True)
            else:
                self.running -= 1
                self._end(job, min(max(whole - job.first, 0), job.tokens), aborted=True)
        self._fill(self._next_step(now))
        return len(found)

    def pause(self, now: float) -> None:
        """Time stands still; whoever has a slot keeps it."""
        self._settle(now)
        self._base, self._origin = self._steps(now), now
        self.paused = True

    def resume(self, now: float) -> None:
        if self.paused:
            self.paused, self._origin = False, now

    def set_version(self, version: int, now: float) -> None:
        """Of all tokens from the next step on."""
        self._settle(now)
        self._versions.append((self._next_step(now), version))

    # The rest ---------------------------------------------------------------------------------------------------------

    def _steps(self, now: float) -> float:
        return self._base if self.paused else self._base + (now - self._origin) / self.step_seconds

    def _next_step(self, now: float) -> int:
        return math.ceil(self._steps(now) - ROUNDING)

    def _settle(self, now: float) -> None:
        whole = math.floor(self._steps(now) + ROUNDING)
        self._forget_aborted()
        while self._ends and self._ends[0][0] <= whole:
            step, _, job = heapq.heappop(self._ends)
            self.running -= 1
            self._end(job, job.tokens)
            self._fill(step)
            self._forget_aborted()

    def _forget_aborted(self) -> None:
        while self._ends and self._ends[0][2].ended:
            heapq.heappop(self._ends)

    def _fill(self, step: int) -> None:
        """Free slots are taken from this step on."""
        while self._line and self.running < self.slots:
            job = self._line.popleft()
            job.first = max(step, job.earliest)
            self.running += 1
            self._count += 1
            heapq.heappush(self._ends, (job.first + job.tokens, self._count, job))

    def _end(self, job: Job, written: int, aborted: bool = False) -> None:
        del self.jobs[job.rid]
        job.written, job.aborted, job.ended = written, aborted, True
        job.spans = self._spans(job.first or 0, written)
        self.tokens += written
        self._done.append(job)

    def _spans(self, first: int, count: int) -> list[tuple[int, int, int]]:
        spans: list[tuple[int, int, int]] = []
        index = bisect_right(self._versions, first, key=lambda entry: entry[0]) - 1
        done = 0
        while done < count:
            last = index + 1 == len(self._versions)
            stop = count if last else min(count, self._versions[index + 1][0] - first)
            if stop > done:
                spans.append((self._versions[index][1], done, stop))
                done = stop
            index += 1
        return spans
