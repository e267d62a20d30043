"""A ring without processes: members, keeper and ledger, moved one step at a time in any order.

Every participant acts on a look at the ledger that may be old, except that it looks again after an action of its own.
The checks that must hold in every state are made after every step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

from meshy.colocation.keeper import Keeper
from meshy.colocation.member import Member
from meshy.colocation.turns import (
    Ask,
    Clear,
    Enter,
    Free,
    Give,
    Grant,
    Ledger,
    Press,
    Restore,
    Row,
    Rule,
    SayFreed,
    grant_of,
)
from meshy.recipe import Membership

KEEPER = "keeper"


class World:
    """members: group, membership and number of replicas. wants: how often code of each replica asks for the
    GPUs. crashes: how many processes die."""

    def __init__(self, members: tuple[tuple[str, Membership, int], ...], wants: int, crashes: int) -> None:
        self.rule = Rule(tuple((group, membership) for group, membership, _ in members))
        self.keeper = Keeper(self.rule)
        self.members = {
            f"{group}.{i}": Member(self.rule, f"{group}.{i}", f"{group}.{i}/0")
            for group, _, count in members
            for i in range(count)
        }
        self.rows: tuple[Row, ...] = ()
        self.looks: dict[str, Ledger | None] = dict.fromkeys([*self.members, KEEPER])
        self.wants = dict.fromkeys(self.members, wants)
        self.passed: dict[str, int] = {}  # by uid of rows that code waits for: the turns that others had since
        self.dead: set[str] = set()  # replicas that are gone now
        self.untold: tuple[str, ...] = ()  # lives that have ended without the keeper's knowing
        self.crashes = crashes
        self.count = 0

    def copy(self) -> World:
        other = copy.copy(self)
        other.keeper = copy.copy(self.keeper)
        other.keeper._dead = set(self.keeper._dead)
        other.members = {name: copy.copy(member) for name, member in self.members.items()}
        other.looks, other.wants, other.passed = dict(self.looks), dict(self.wants), dict(self.passed)
        other.dead = set(self.dead)
        return other

    def key(self) -> object:
        """Equal for states that go on alike."""
        members = tuple(
            (m.life, m.phase, m.row, m.wanted, m.inside, m._spent, name in self.dead)
            for name, m in self.members.items()
        )
        looks = tuple(look and frozenset(look.rows) for look in self.looks.values())
        dead = frozenset(self.keeper._dead)
        return members, frozenset(self.rows), looks, dead, self.untold, tuple(self.wants.values()), self.crashes

    # Steps ------------------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[str, str]]:
        """Every step that is possible now."""
        for name, member in self.members.items():
            if name in self.dead:
                yield "restart", name
                continue
            yield from self._of(name)
            if member.phase in ("restoring", "freeing"):
                yield "called back", name
            if member.inside:
                yield "leave", name
            if self.wants[name] and not member.wanted and not member.inside:
                yield "want", name
            if self.crashes:
                yield "kill", name
        yield from self._of(KEEPER)
        if self.untold:
            yield "tell", KEEPER

    def _of(self, name: str) -> Iterator[tuple[str, str]]:
        look = self.looks[name]
        if look is None or look.rows != self.rows:
            yield "look", name
        if look is not None and self._decides(name) is not None:
            yield "act", name

    def _decides(self, name: str) -> object:
        look = self.looks[name]
        assert look is not None
        return copy.copy(self.keeper if name == KEEPER else self.members[name]).decide(look)

    def take(self, step: str, name: str) -> None:
        match step:
            case "look":
                self.looks[name] = Ledger(self.rows)
            case "act":
                self._act(name)
            case "called back":
                member = self.members[name]
                member.restored() if member.phase == "restoring" else member.freed()
            case "leave":
                self.members[name].leave()
            case "want":
                self.wants[name] -= 1
                self.members[name].want()
            case "kill":
                self.crashes -= 1
                self.dead.add(name)
                self.untold += (self.members[name].life,)
                if self.members[name].wanted or self.members[name].inside:
                    self.wants[name] += 1  # its next life does it again
            case "tell":
                self.keeper.died(self.untold[0])
                self.untold = self.untold[1:]
                self.looks[KEEPER] = None
            case "restart":
                self.dead.remove(name)
                self.count += 1
                self.members[name] = Member(self.rule, name, f"{name}/{self.count}")
                self.looks[name] = None
                if self.members[name].fallback:
                    self.wants[name] = max(1, self.wants[name])  # it loads what it will free
        self.check()

    def _act(self, name: str) -> None:
        look = self.looks[name]
        assert look is not None
        who = self.keeper if name == KEEPER else self.members[name]
        action = who.decide(look)
        self.looks[name] = None
        there = {row.uid: row for row in self.rows}
        match action:
            case Ask():
                self.count += 1
                life = self.members[name].life
                assert not any(row.life == life and row.grant is None for row in self.rows), "asked twice"
                row = Row(f"{name}#{self.count}", name, life, asked=float(self.count))
                self.rows = (*self.rows, row)
            case Give(rows, turn, leader, _):
                if any(row.uid not in there for row in rows):
                    return  # the queue refuses it whole
                assert all(there[row.uid].grant is None for row in rows), "granted twice"
                now = Ledger(self.rows)
                if leader is not None:
                    assert turn == now.turn + 1, f"turn {turn} after {now.turn}"
                    using = {m.group for n, m in self.members.items() if n not in self.dead and self._uses(m)}
                    assert not using, f"granted while {using} had not freed"
                else:
                    assert turn == now.turn and {row.group for row in rows} == {now.holder}
                self._pass_over(leader, now)
                given = {row.uid: replace(there[row.uid], grant=Grant(turn, row is leader)) for row in rows}
                self.rows = tuple(given.get(row.uid, row) for row in self.rows)
            case Press(row):
                self.rows = tuple(replace(r, presses=True) if r.uid == row.uid else r for r in self.rows)
            case SayFreed(row):
                self.rows = tuple(replace(r, freed=True) if r.uid == row.uid else r for r in self.rows)
            case Clear(rows, unless_granted):
                gone = {row.uid for row in rows if not (unless_granted and there[row.uid].grant is not None)}
                self.rows = tuple(row for row in self.rows if row.uid not in gone)
            case Enter() | Restore() | Free() | None:
                pass

    def _pass_over(self, leader: Row | None, now: Ledger) -> None:
        """No starvation: each other group goes before code that waits once at most, but for what it granted unseen."""
        waits = [row.uid for row in now.waiting if self.rule.presses(row)]
        self.passed = {uid: self.passed.get(uid, 0) + (leader is not None) for uid in waits}
        assert all(count <= len(self.rule.members) + 1 for count in self.passed.values()), "passed over"

    # What must hold ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _uses(member: Member) -> bool:
        return member.phase in ("restoring", "in", "freeing")

    def check(self) -> None:
        using = {name: m for name, m in self.members.items() if name not in self.dead and self._uses(m)}
        assert len({m.group for m in using.values()}) <= 1, f"two holders: {sorted(using)}"
        inside = [name for name, m in self.members.items() if m.inside and name not in self.dead]
        assert all(self.members[name].phase == "in" for name in inside)
        turns = sorted({grant_of(row).turn for row in self.rows if row.grant is not None})
        assert not turns or turns == list(range(turns[0], turns[-1] + 1)), f"a gap in turns {turns}"

    def settle(self) -> None:
        """Let everything go on, in turn, until nothing more happens; nothing dies any more."""
        self.crashes = 0
        for _ in range(400):
            before = self.key()
            for name in [*self.members, KEEPER]:
                for step, who in list(self.steps()):
                    if who == name:
                        self.take(step, who)
                        break
            if self.key() == before:
                break
        else:
            raise AssertionError("it never comes to rest")
        waiting = [name for name, m in self.members.items() if m.wanted or m.inside or self.wants[name]]
        assert not waiting, f"left waiting: {waiting}"
        holder = Ledger(self.rows).holder
        assert holder is not None and self.rule.is_fallback(holder), f"in the end {holder} holds"
        assert all(m.phase == "in" for m in self.members.values() if m.group == holder), "its replicas do not serve"
        assert len(self.rows) <= 2 * len(self.members)
