"""Who comes next, and what members and keeper decide, from a look at the ledger."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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
    begin_next,
)
from meshy.recipe import FALLBACK, ON_DEMAND

RULE = Rule((("inference", FALLBACK), ("teacher", ON_DEMAND), ("critic", ON_DEMAND), ("trainer", ON_DEMAND)))


def row(
    replica: str, asked: float = 0, turn: int = 0, leads: bool = True, life: str = "", presses=False, freed=False
) -> Row:
    grant = Grant(turn, leads) if turn else None
    return Row(f"{replica}@{asked}", replica, life or f"{replica}/0", asked, grant, presses, freed)


def chosen(*rows: Row) -> list[str]:
    return [row.replica for row in RULE.next(Ledger(rows))]


def test_on_demand_goes_before_fallback() -> None:
    assert chosen(row("inference.0", 1), row("trainer.0", 2)) == ["trainer.0"]
    assert chosen(row("inference.0", 1)) == ["inference.0"]


def test_fallback_whose_code_waits_is_one_of_those_that_ask() -> None:
    waits, trainer = row("inference.0", 1, presses=True), row("trainer.0", 2)
    assert chosen(row("trainer.0", 0, turn=4), waits, trainer) == ["inference.0"]
    assert chosen(row("teacher.0", 0, turn=4), waits, trainer) == ["trainer.0"]
    given = begin_next(RULE, Ledger([row("trainer.0", 0, turn=4), waits, trainer]))
    assert given == Give((waits,), 5, waits, "asked")


def test_then_the_one_that_follows_the_holder_soonest() -> None:
    waiting = [row("teacher.0", 1), row("critic.0", 2), row("trainer.0", 3)]
    assert chosen(*waiting) == ["teacher.0"]
    assert chosen(row("teacher.0", 0, turn=4), *waiting) == ["critic.0"]
    assert chosen(row("critic.0", 0, turn=4), *waiting) == ["trainer.0"]
    assert chosen(row("trainer.0", 0, turn=4), *waiting) == ["teacher.0"]
    assert chosen(row("trainer.0", 0, turn=4), waiting[2]) == ["trainer.0"]


def test_all_waiting_replicas_of_a_group_come_together() -> None:
    assert chosen(row("teacher.1", 5), row("teacher.0", 7), row("critic.0", 1)) == ["teacher.1", "teacher.0"]


@given(
    st.lists(st.tuples(st.sampled_from(["inference", "teacher", "critic", "trainer"]), st.floats(0, 9)), min_size=1),
    st.data(),
)
def test_whoever_waits_has_a_turn_before_anybody_has_two(asks, data) -> None:
    """However often others ask again at once."""
    waiting = {group: row(f"{group}.0", asked, presses=True) for group, asked in asks}
    patient = data.draw(st.sampled_from(sorted(waiting)))
    holder = data.draw(st.sampled_from(["inference", *waiting]))
    seen: list[str] = []
    for turn in range(1, 9):
        (next_row,) = RULE.next(Ledger([row(f"{holder}.0", -1, turn), *waiting.values()]))
        holder = next_row.group
        seen.append(holder)
        if holder == patient:
            break
        waiting[holder] = row(f"{holder}.0", 100.0 + turn, presses=True)
    assert seen[-1] == patient and len(seen) == len(set(seen))


def test_a_request_is_not_repeated() -> None:
    trainer = Member(RULE, "trainer.0", "t")
    assert trainer.decide(Ledger()) is None
    trainer.want()
    assert trainer.decide(Ledger()) == Ask()
    asked = Ledger([row("trainer.0", life="t")])
    assert trainer.decide(asked) is None
    trainer.give_up()
    assert trainer.decide(Ledger()) is None


def test_a_turn_from_request_to_grant() -> None:
    trainer, inference = Member(RULE, "trainer.0", "t"), row("inference.0", 1, life="i")
    trainer.want()
    mine = row("trainer.0", 2, turn=7, life="t")
    ledger = Ledger([mine, inference])
    assert trainer.decide(ledger) == Restore(mine)
    assert trainer.decide(ledger) is None
    trainer.restored()
    assert trainer.decide(ledger) == Enter()
    assert trainer.decide(ledger) is None
    trainer.leave()
    assert trainer.decide(ledger) == Free()
    trainer.freed()
    assert trainer.decide(ledger) == Give((inference,), 8, inference, "nobody else asks")


def test_one_that_holds_and_wants_again_lets_the_others_go_first() -> None:
    trainer, other = Member(RULE, "trainer.0", "t"), row("teacher.0", 3)
    trainer.want()
    ledger = Ledger([row("trainer.0", 2, turn=7, life="t"), other])
    trainer.decide(ledger)
    trainer.restored()
    trainer.decide(ledger)
    trainer.leave()
    trainer.want()
    assert trainer.decide(ledger) == Free()
    trainer.freed()
    assert trainer.decide(ledger) == Give((other,), 8, other, "asked")


def test_fallback_always_asks_and_holds_until_on_demand_asks() -> None:
    inference, mine = Member(RULE, "inference.0", "i"), row("inference.0", 1, turn=3, life="i")
    assert inference.decide(Ledger()) is None, "it has nothing yet that it could free"
    inference.want()
    assert inference.decide(Ledger()) == Ask()
    inference.give_up()
    assert inference.decide(Ledger()) == Ask()
    assert inference.decide(Ledger([mine])) == Restore(mine)
    inference.restored()
    assert inference.decide(Ledger([mine])) is None
    inference.want()
    assert inference.decide(Ledger([mine])) == Enter()
    wanted = Ledger([mine, row("trainer.0", 2)])
    assert inference.decide(wanted) is None, "its code is inside: no safe point"
    inference.leave()
    inference.want()
    assert inference.decide(wanted) == Free()
    inference.freed()
    inference.decide(wanted)
    waits = row("inference.0", 3, life="i")
    assert inference.decide(Ledger([row("trainer.0", 2, turn=4), waits])) == Press(waits)
    waits = row("inference.0", 3, life="i", presses=True)
    assert inference.decide(Ledger([row("trainer.0", 2, turn=4), waits])) is None


def test_fallback_that_has_waited_is_let_in_once_before_it_yields() -> None:
    inference, mine = Member(RULE, "inference.0", "i"), row("inference.0", 1, turn=3, life="i", presses=True)
    wanted = Ledger([mine, row("trainer.0", 2)])
    inference.want()
    assert inference.decide(wanted) == Restore(mine)
    inference.restored()
    assert inference.decide(wanted) == Enter()
    inference.leave()
    inference.want()
    assert inference.decide(wanted) == Free()


def test_the_leader_waits_for_the_others_of_its_turn_and_lets_later_ones_join() -> None:
    leader = Member(RULE, "inference.0", "i0")
    leader.want()
    leader.give_up()
    first, second = row("inference.0", 1, turn=3, life="i0"), row("inference.1", 2, 3, leads=False, life="i1")
    leader.decide(Ledger([first, second]))
    leader.restored()
    third = row("inference.2", 3, life="i2")
    assert leader.decide(Ledger([first, second, third])) == Give((third,), 3, None, "joins its group")
    wanted = row("trainer.0", 4)
    assert leader.decide(Ledger([first, second, third, wanted])) == Free()
    leader.freed()
    assert leader.decide(Ledger([first, second, wanted])) == Ask(), "it waits for the other, and its place is kept"
    again = row("inference.0", 5, life="i0")
    assert leader.decide(Ledger([first, second, wanted, again])) is None
    other = Member(RULE, "inference.1", "i1")
    other.row, other.phase = second.uid, "leaving"
    assert other.decide(Ledger([first, second, wanted])) == SayFreed(second)


def test_the_keeper_begins_clears_and_stands_in_for_the_dead() -> None:
    keeper = Keeper(RULE)
    assert keeper.decide(Ledger()) is None
    waiting = row("trainer.0", 2)
    assert keeper.decide(Ledger([waiting])) == Give((waiting,), 1, waiting, "the first turn")
    before, present = row("teacher.0", 0, turn=1), row("inference.0", 1, turn=2, life="i")
    assert keeper.decide(Ledger([before, present, waiting])) == Clear((before,), unless_granted=False)
    assert keeper.decide(Ledger([present, waiting])) is None
    keeper.died("i")
    given = keeper.decide(Ledger([present, waiting]))
    assert given == Give((waiting,), 3, waiting, "in place of inference.0, which died")
    left = row("inference.1", 1, turn=2, leads=False, freed=True)
    assert keeper.decide(Ledger([present, left])) == Clear((left,), unless_granted=False)
    vain = row("inference.0", 5, life="i")
    assert keeper.decide(Ledger([present, vain, waiting])) == Clear((vain,), unless_granted=True)
