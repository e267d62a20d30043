"""Which replicas may be given requests: the rule alone, without I/O.

A replica is in rotation until it fails, or shows that it serves older weights than are required of it. Out of rotation
it is asked for its version again and again, at growing intervals, and comes back when it answers with one that will do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FIRST_WAIT = 0.1  # seconds until a replica that went out is asked
LONGEST_WAIT = 1.0


def too_old(replica: str, version: int, needed: int) -> str:
    return f"{replica} serves weights v{version}, v{needed} is required"


@dataclass(slots=True)
class _Out:
    why: str
    since: float
    needs: int
    """The weight version that it must serve to come back, whatever else is required by then."""


class Rotation:
    """The state of every replica. required: the weight version that each must serve at least; -1 for any."""

    def __init__(self, replicas: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.replicas = tuple(replicas)
        self.required = -1
        self.fit = self.replicas
        """Those in rotation."""
        self._out: dict[str, _Out] = {}
        self._waits = dict.fromkeys(replicas, FIRST_WAIT)
        self._seconds_out = dict.fromkeys(replicas, 0.0)
        self._clock = clock

    def require(self, version: int) -> bool:
        """From now on every replica must serve at least `version`; whether that is news. It never goes back."""
        news = version > self.required
        self.required = max(self.required, version)
        return news

    def failed(self, replica: str, why: str) -> bool:
        """It could not be used; `why` names it. Whether it was in rotation until now."""
        return self._leave(replica, why, -1)

    def serves(self, replica: str, version: int, at_least: int) -> bool:
        """What a replica showed of the weights that it serves; whether that will do. If not, it is out of rotation
        until it serves `at_least`."""
        if version >= at_least:
            return True
        self._leave(replica, too_old(replica, version, at_least), at_least)
        return False

    def answered(self, replica: str) -> None:
        """It did what it was asked; should it fail again, it is asked again soon."""
        self._waits[replica] = FIRST_WAIT

    def still_out(self, replica: str, why: str) -> None:
        """It was asked and cannot come back yet."""
        self._out[replica].why = why

    def comes_back(self, replica: str, version: int) -> float | None:
        """A replica out of rotation says that it serves `version`: the seconds for which it was out if it comes back
        with that, else None."""
        out = self._out[replica]
        needs = max(self.required, out.needs)
        if version < needs:
            out.why = too_old(replica, version, needs)
            return None
        del self._out[replica]
        seconds = self._clock() - out.since
        self._seconds_out[replica] += seconds
        self._note_fit()
        return seconds

    def next_wait(self, replica: str) -> float:
        """Seconds until it is worth asking again. They double each time, until it does what it is asked."""
        wait = self._waits[replica]
        self._waits[replica] = min(2 * wait, LONGEST_WAIT)
        return wait

    def is_out(self, replica: str) -> bool:
        return replica in self._out

    def seconds_out(self, replica: str) -> float:
        """In all, the time until now included."""
        out = self._out.get(replica)
        return self._seconds_out[replica] + (0.0 if out is None else self._clock() - out.since)

    def reasons(self) -> list[str]:
        """Why each replica that is out of rotation is, and for how long already."""
        now = self._clock()
        return [f"{out.why} (for {now - out.since:.0f} s)" for out in list(self._out.values())]

    def _leave(self, replica: str, why: str, needs: int) -> bool:
        out = self._out.get(replica)
        if out is not None:
            out.needs = max(out.needs, needs)
            return False
        self._out[replica] = _Out(why, self._clock(), needs)
        self._note_fit()
        return True

    def _note_fit(self) -> None:
        self.fit = tuple(replica for replica in self.replicas if replica not in self._out)
