"""What the keeper of a ring does next. Pure: events in, actions out.

The keeper holds the token before the first turn and in place of a granter whose death is confirmed, and deletes rows
that nobody needs, so that the ledger stays small for ever.
"""

from __future__ import annotations

from meshy.colocation.turns import Action, Clear, Ledger, Rule, SayFreed, begin_next, let_join


class Keeper:
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._dead: set[str] = set()

    def died(self, life: str) -> None:
        """That process has ended, and nothing that it sent can reach the ledger any more."""
        self._dead.add(life)

    def decide(self, ledger: Ledger) -> Action | None:
        """None: there is nothing to do until something changes. Every decision needs a look that was taken after the
        action, and the death, before it."""
        for row in ledger.present[1:]:
            if row.life in self._dead and not row.freed:
                return SayFreed(row)
        if ledger.over:
            return Clear(ledger.over, unless_granted=False)
        if vain := tuple(row for row in ledger.waiting if row.life in self._dead):
            return Clear(vain, unless_granted=True)
        leader = ledger.leader
        if leader is not None and leader.life not in self._dead:
            return None
        reason = "the first turn" if leader is None else f"in place of {leader.replica}, which died"
        return begin_next(self.rule, ledger, reason) or let_join(self.rule, ledger)
