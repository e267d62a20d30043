"""Which replica a request goes to: the rule alone, without I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

FAILURE_PENALTY = 5.0  # seconds for which a replica that failed is chosen only if all have


@dataclass(slots=True)
class _Key:
    replica: str
    in_flight: int = 0


class Balancer:
    """Least loaded first; requests of one key that overlap in time go to the same replica, which holds their prefix."""

    def __init__(self, replicas: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        if not replicas:
            raise ValueError("a generation client needs at least one URL")
        self.load = dict.fromkeys(replicas, 0)
        self._failed_until = dict.fromkeys(replicas, 0.0)
        self._keys: dict[str, _Key] = {}
        self._clock = clock

    def acquire(self, key: str | None = None) -> str:
        """Choose a replica and count the request there; `release` must follow."""
        now = self._clock()
        held = self._keys.get(key) if key is not None else None
        if held is not None and self._failed_until[held.replica] <= now:
            replica = held.replica
        else:
            replica = min(self.load, key=lambda url: (self._failed_until[url] > now, self.load[url]))
        if key is not None:
            entry = self._keys.setdefault(key, _Key(replica))
            entry.replica = replica
            entry.in_flight += 1
        self.load[replica] += 1
        return replica

    def release(self, replica: str, key: str | None = None) -> None:
        self.load[replica] -= 1
        if key is not None:
            entry = self._keys[key]
            entry.in_flight -= 1
            if not entry.in_flight:
                del self._keys[key]

    def failed(self, replica: str) -> None:
        """Prefer others for a while."""
        self._failed_until[replica] = self._clock() + FAILURE_PENALTY
