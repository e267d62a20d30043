"""A ring's ledger as everybody reads it, and the rule of who comes next. Pure.

A replica that wants the ring's GPUs puts a row into the ledger; whoever grants writes into that row the turn that it
may take part in. All rows of one turn are of one group, whose replicas use the GPUs together. Turns are numbered 1, 2,
3 ... without a gap; the newest one is the present turn, and its group is the holder. One row of a turn leads it: its
replica is the only one who grants, further rows of the same turn and, once all others of the turn are freed, the next
turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from meshy.recipe import FALLBACK, Membership


@dataclass(frozen=True, slots=True)
class Grant:
    """What the granter has written into a row. leads: the row's replica is the turn's granter. source: who granted it.
    at: unix seconds. payload: small JSON values that travel with the token, such as the weights to serve."""

    turn: int
    leads: bool
    source: str = ""
    reason: str = ""
    at: float = 0.0
    payload: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Row:
    """A request, and what has become of it. life: of the process that asks; a replica that starts again has another
    one. asked: unix seconds. presses: code waits for the GPUs; said of FALLBACK rows, for those of others always mean
    it. freed: the replica has left the turn and its GPUs."""

    uid: str
    replica: str
    life: str
    asked: float = 0.0
    grant: Grant | None = None
    presses: bool = False
    freed: bool = False

    @property
    def group(self) -> str:
        return self.replica.rpartition(".")[0]

    @property
    def index(self) -> int:
        return int(self.replica.rpartition(".")[2])


class Ledger:
    """A look at all rows of a ring."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.rows = tuple(rows)

    @cached_property
    def turns(self) -> dict[int, tuple[Row, ...]]:
        """The rows of each turn that are left, the one that leads it first."""
        turns: dict[int, list[Row]] = {}
        for row in self.rows:
            if row.grant is not None:
                turns.setdefault(row.grant.turn, []).append(row)
        return {
            turn: tuple(sorted(turns[turn], key=lambda row: (not grant_of(row).leads, row.index, row.uid)))
            for turn in sorted(turns)
        }

    @cached_property
    def turn(self) -> int:
        """The present turn; 0 before the first."""
        return max(self.turns, default=0)

    @property
    def present(self) -> tuple[Row, ...]:
        """The rows of the present turn, the one that leads it first."""
        return self.turns.get(self.turn, ())

    @cached_property
    def waiting(self) -> tuple[Row, ...]:
        """Those that are not granted, oldest first."""
        return tuple(sorted((row for row in self.rows if row.grant is None), key=lambda row: (row.asked, row.uid)))

    @cached_property
    def over(self) -> tuple[Row, ...]:
        """Rows that nobody needs: of former turns, and of those who have left the present one to its leader."""
        former = [row for row in self.rows if row.grant is not None and row.grant.turn < self.turn]
        return (*former, *(row for row in self.present[1:] if row.freed))

    @property
    def holder(self) -> str | None:
        """The group whose turn it is."""
        return self.present[0].group if self.present else None

    @property
    def leader(self) -> Row | None:
        """The row of the present turn's granter."""
        return self.present[0] if self.present else None

    def joining(self) -> tuple[Row, ...]:
        """Rows of the holder's own group that wait: replicas that have come later."""
        return tuple(row for row in self.waiting if row.group == self.holder)


@dataclass(frozen=True)
class Rule:
    """Who comes next. members: group and membership, in the ring's order."""

    members: tuple[tuple[str, Membership], ...]

    @cached_property
    def _place(self) -> dict[str, int]:
        return {group: place for place, (group, _) in enumerate(self.members)}

    @cached_property
    def _fallback(self) -> frozenset[str]:
        return frozenset(group for group, membership in self.members if membership == FALLBACK)

    def is_fallback(self, group: str) -> bool:
        return group in self._fallback

    def presses(self, row: Row) -> bool:
        """Whether code waits for the GPUs, rather than a FALLBACK that would have them while nobody's does."""
        return row.presses or not self.is_fallback(row.group)

    def wanted_by_others(self, ledger: Ledger) -> bool:
        """Whether code of another group than the holder's waits: a FALLBACK holder must yield to it."""
        return any(row.group != ledger.holder and self.presses(row) for row in ledger.waiting)

    def next(self, ledger: Ledger) -> tuple[Row, ...]:
        """The rows that the next turn is granted to: all that wait of one group. Where code waits goes before a
        FALLBACK where none does, then the group that follows the holder soonest in the ring (itself last), then the one
        that asked first. So whoever waits is passed over at most once by each other group."""
        if not ledger.waiting:
            return ()
        chosen = min(ledger.waiting, key=lambda row: self._order(row, ledger.holder)).group
        return tuple(row for row in ledger.waiting if row.group == chosen)

    def _order(self, row: Row, holder: str | None) -> tuple[bool, int, float, str]:
        after = self._place[holder] + 1 if holder is not None else 0
        return not self.presses(row), (self._place[row.group] - after) % len(self.members), row.asked, row.uid


# What is to be done ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Put a request into the ledger."""


@dataclass(frozen=True, slots=True)
class Press:
    """Write into the ledger that code waits for what a row asks."""

    row: Row


@dataclass(frozen=True, slots=True)
class Restore:
    """Bring back what computes on the GPUs; `row` says for which turn."""

    row: Row


@dataclass(frozen=True, slots=True)
class Enter:
    """Let the code that waits for the GPUs go on."""


@dataclass(frozen=True, slots=True)
class Free:
    """Give the GPUs back."""


@dataclass(frozen=True, slots=True)
class SayFreed:
    """Write into the ledger that a row's replica has freed its GPUs."""

    row: Row


@dataclass(frozen=True, slots=True)
class Give:
    """Grant these rows a turn, all at once: the next one, led by `leader`, or the present one to replicas that join."""

    rows: tuple[Row, ...]
    turn: int
    leader: Row | None
    reason: str


@dataclass(frozen=True, slots=True)
class Clear:
    """Delete rows. unless_granted: leave those that somebody has granted meanwhile."""

    rows: tuple[Row, ...]
    unless_granted: bool


Action = Ask | Press | Restore | Enter | Free | SayFreed | Give | Clear


def grant_of(row: Row) -> Grant:
    """Of a row that is known to be granted."""
    assert row.grant is not None
    return row.grant


def begin_next(rule: Rule, ledger: Ledger, reason: str = "") -> Give | None:
    """The next turn, for whoever may begin it. Every row of the present one but the granter's must be freed."""
    if not all(row.freed for row in ledger.present[1:]):
        return None
    rows = rule.next(ledger)
    if not rows:
        return None
    leader = min(rows, key=lambda row: (row.index, row.uid))
    reason = reason or ("asked" if any(rule.presses(row) for row in rows) else "nobody else asks")
    return Give(rows, ledger.turn + 1, leader, reason)


def let_join(rule: Rule, ledger: Ledger) -> Give | None:
    """Replicas of the holder's group that have come later take part in the present turn, unless others wait for it."""
    joining = ledger.joining()
    if not joining or rule.wanted_by_others(ledger):
        return None
    return Give(joining, ledger.turn, None, "joins its group")
