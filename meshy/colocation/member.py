"""What one replica of a ring's member does next. Pure: events in, actions out.

    out --Restore--> restoring --restored()--> in --Free--> freeing --freed()--> leaving --(Give or SayFreed)--> out

ON_DEMAND replicas ask when code waits for the GPUs, and leave when it has ended. FALLBACK replicas always ask, from
the first such code on, which brings there what they free and restore; they leave at the first moment at which no such
code runs and another group's waits; code of their own that has waited is let in once before that.
"""

from __future__ import annotations

from typing import Literal

from meshy.colocation.turns import (
    Action,
    Ask,
    Enter,
    Free,
    Ledger,
    Press,
    Restore,
    Rule,
    SayFreed,
    begin_next,
    let_join,
)

Phase = Literal["out", "restoring", "in", "freeing", "leaving"]


class Member:
    """replica: its name. life: of this process.

    `decide` gives the next action. What comes of Restore and Free is told by `restored` and `freed`; what comes of all
    others is seen in the ledger, so every decision needs a look that was taken after the action before it.
    """

    def __init__(self, rule: Rule, replica: str, life: str) -> None:
        self.rule, self.replica, self.life = rule, replica, life
        self.group = replica.rpartition(".")[0]
        self.fallback = rule.is_fallback(self.group)
        self.phase: Phase = "out"
        self.row = ""  # the uid of the row by which it takes part, or did last
        self.wanted = False
        self.inside = False
        self._began = False  # code has waited once
        self._spent = False  # code that waited for this turn has ended

    # Events -----------------------------------------------------------------------------------------------------------

    def want(self) -> None:
        """Code waits for the GPUs."""
        self.wanted = self._began = True

    def give_up(self) -> None:
        """It does not wait any more."""
        self.wanted = False

    def leave(self) -> None:
        """The code that was let in has ended."""
        self.inside = False
        self._spent = True

    def restored(self) -> None:
        assert self.phase == "restoring"
        self.phase = "in"

    def freed(self) -> None:
        assert self.phase == "freeing"
        self.phase = "leaving"

    # Decisions --------------------------------------------------------------------------------------------------------

    def decide(self, ledger: Ledger) -> Action | None:
        """None: there is nothing to do until something changes."""
        if self.phase == "in":
            return self._inside(ledger)
        if self.phase == "leaving":
            return self._leaving(ledger)
        return self._outside(ledger) if self.phase == "out" else None

    def _outside(self, ledger: Ledger) -> Action | None:
        for row in ledger.present:
            if row.life == self.life and row.uid != self.row and not row.freed:
                self.row, self.phase, self._spent = row.uid, "restoring", False
                return Restore(row)
        return self._ask(ledger)

    def _ask(self, ledger: Ledger) -> Ask | Press | None:
        """One request at a time."""
        asked = next((row for row in ledger.waiting if row.life == self.life), None)
        if asked is None:
            return Ask() if self.wanted or (self.fallback and self._began) else None
        return Press(asked) if self.wanted and not self.rule.presses(asked) else None

    def _inside(self, ledger: Ledger) -> Action | None:
        if not self.inside:
            others = self.rule.wanted_by_others(ledger)
            if self.wanted and not (self._spent and (others or not self.fallback)):
                self.wanted, self.inside = False, True
                return Enter()
            if others or not self.fallback:
                self.phase = "freeing"
                return Free()
        return let_join(self.rule, ledger) if self._leads(ledger) else None

    def _leaving(self, ledger: Ledger) -> Action | None:
        if self._leads(ledger):
            return begin_next(self.rule, ledger) or self._ask(ledger)
        for row in ledger.present:
            if row.uid == self.row and not row.freed:
                return SayFreed(row)
        self.phase = "out"
        return self._outside(ledger)

    def _leads(self, ledger: Ledger) -> bool:
        return ledger.leader is not None and ledger.leader.uid == self.row
