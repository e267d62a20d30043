"""Which services are started again when they die, how often and how soon: the rule alone, without I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshy.service.exits import FAILED_TO_START, UNRECOVERABLE

LONGEST_WAIT = 30.0  # seconds
FORGIVEN_AFTER = 600.0  # seconds; whoever has lived so long starts with a clean record


@dataclass(frozen=True)
class Restart:
    """A service is to be started again `wait` seconds from now; it is the `number`-th time of at most `limit`."""

    number: int
    limit: int
    wait: float

    def __str__(self) -> str:
        return f"restart {self.number} of {self.limit}"


class Restarts:
    """limits: how often in a row a service may be started again, by its name. Names that are not there never are."""

    def __init__(self, limits: Mapping[str, int], clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._counts: dict[str, int] = {}
        self._ready: dict[str, float] = {}

    def ready(self, name: str) -> None:
        """`name` has started and is ready: its life begins."""
        self._ready[name] = self._clock()

    def allows(self, name: str) -> bool:
        """Whether `name` is one that may be started again at all."""
        return self._limits.get(name, 0) > 0

    def after_death(self, name: str, exit_code: int) -> Restart | None:
        """What is to be done about the death of `name`; None: it is not started again.

        One that could not even start the first time would not the second time either, and one may say itself that it
        would not.
        """
        limit = self._limits.get(name, 0)
        lived = self._clock() - self._ready.pop(name, self._clock())
        count = 0 if lived >= FORGIVEN_AFTER else self._counts.get(name, 0)
        in_vain = exit_code == UNRECOVERABLE or (exit_code == FAILED_TO_START and name not in self._counts)
        if count >= limit or in_vain:
            return None
        self._counts[name] = count + 1
        return Restart(count + 1, limit, min(2.0**count, LONGEST_WAIT))

    def told(self, name: str) -> str:
        """An addition to the reason why `name` is given up."""
        count = self._counts.get(name, 0)
        if not count:
            return ""
        used_up = " (max_restarts)" if count >= self._limits.get(name, 0) else ""
        return f" after {count} restart{'s' if count > 1 else ''}{used_up}"
