"""Pacing against a brute-force model: what may be started is worked out anew from scratch at every turn."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshy.rollout.pacing import Gate, GateError, NothingSurvives, Pacing, Slot


def gate(step: int, retired: int, *, version: int | None = None, incarnation: str = "a", stop: bool = False) -> Gate:
    return Gate(
        incarnation=incarnation,
        gate_step=step,
        weight_version=step if version is None else version,
        samples_retired=retired,
        stop=stop,
    )


def drain(pacing: Pacing) -> list[Slot]:
    slots = []
    while (slot := pacing.next()) is not None:
        slots.append(slot)
    return slots


def test_nothing_starts_before_the_first_gate_and_one_batch_after_it():
    pacing = Pacing(prompts_per_batch=3, group_size=4, steps=2)
    assert drain(pacing) == []
    pacing.open(gate(0, 0))
    assert drain(pacing) == [Slot(0, 0), Slot(1, 0), Slot(2, 0)]
    pacing.open(gate(1, 12))
    assert drain(pacing) == [Slot(3, 1), Slot(4, 1), Slot(5, 1)]


def test_the_budget_ends_with_the_last_batch_and_with_the_stop_gate():
    pacing = Pacing(prompts_per_batch=2, group_size=1, steps=1, window=5)
    pacing.open(gate(0, 0))
    assert len(drain(pacing)) == 2
    stopped = Pacing(prompts_per_batch=2, group_size=1, steps=9)
    stopped.open(gate(0, 0, stop=True))
    assert drain(stopped) == []


def test_a_failed_group_is_replaced_within_its_own_batch_beyond_the_planned_positions():
    pacing = Pacing(prompts_per_batch=2, group_size=8, steps=3, window=2)
    pacing.open(gate(0, 0))
    slots = drain(pacing)
    pacing.fail(slots[1], "reward error")
    pacing.fail(slots[3], "reward timeout")
    assert drain(pacing) == [Slot(6, 0), Slot(7, 1)]
    assert pacing.failures == {"reward error": 1, "reward timeout": 1}


def test_a_run_that_goes_on_at_version_50_has_no_more_in_flight_than_a_new_one():
    pacing = Pacing(prompts_per_batch=4, group_size=2, steps=100, window=3, replica=1, replicas=3)
    pacing.open(gate(0, 50 * 8, version=50))
    assert [slot.position for slot in drain(pacing)] == [p for p in range(200, 212) if p % 3 == 1]


def test_too_many_failures_in_a_row_end_the_run_with_counts():
    pacing = Pacing(prompts_per_batch=1, group_size=1, steps=9, max_failures=2)
    pacing.open(gate(0, 0))
    first = pacing.next()
    pacing.fail(first, "reward error")
    pacing.complete(pacing.next())  # a group that survives begins the count anew
    pacing.open(gate(1, 1))
    for reason in ("reward error", "generation"):
        pacing.fail(pacing.next(), reason)
    with pytest.raises(NothingSurvives, match=r"3 groups in a row.*2 allowed.*1 groups were.*reward error \(3\)"):
        pacing.fail(pacing.next(), "reward error")


@pytest.mark.parametrize(
    ("gates", "what"),
    [
        ([gate(1, 0)], "first gate must be step 0"),
        ([gate(0, 0), gate(2, 8)], "not contiguous"),
        ([gate(0, 0), gate(0, 0)], "came twice"),
        ([gate(0, 0), gate(1, 4), gate(0, 0)], "not contiguous"),
        ([gate(0, 8), gate(1, 0)], "never go back"),
        ([gate(0, 0, version=3), gate(1, 4, version=2)], "never go back"),
        ([gate(0, 0), gate(0, 0, incarnation="b")], "started anew"),
        ([gate(0, 0, stop=True), gate(1, 0)], "after the last one"),
    ],
)
def test_gates_that_do_not_follow_one_another_show_both_rows(gates, what):
    pacing = Pacing(prompts_per_batch=1, group_size=4, steps=9)
    for good in gates[:-1]:
        pacing.open(good)
    with pytest.raises(GateError, match=what) as error:
        pacing.open(gates[-1])
    for shown in gates[-2:]:
        assert repr(shown) in str(error.value)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_against_a_brute_force_model(data):
    """Any number of replicas, any order of starts, ends and failures, a trainer that retires whole batches."""
    prompts, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    window, replicas = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    group_size, resumed = data.draw(st.integers(1, 3)), data.draw(st.integers(0, steps - 1))
    rest = {"prompts_per_batch": prompts, "group_size": group_size, "steps": steps, "window": window}
    paces = [Pacing(**rest, max_failures=10**6, replica=i, replicas=replicas) for i in range(replicas)]

    started: dict[int, Slot] = {}
    done: list[Slot] = []
    lost: list[list[int]] = [[] for _ in paces]  # batches of failed groups that wait for a replacement, per replica
    retired, step, failures = resumed, 0, data.draw(st.integers(0, 6))

    def may_start(replica: int) -> list[int]:
        planned = range(resumed * prompts, steps * prompts)
        open_batches = range(resumed, retired + window)
        return [p for p in planned if p % replicas == replica and p // prompts in open_batches and p not in started]

    def start(replica: int) -> None:
        slot = paces[replica].next()
        allowed = may_start(replica)
        if slot is None:
            assert not allowed and not lost[replica]
            return
        assert slot.position not in started and slot.position % replicas == replica
        if lost[replica]:
            assert slot.batch == lost[replica].pop(0) and slot.position >= steps * prompts
        else:
            assert slot.position == allowed[0] and slot.batch == slot.position // prompts
        assert slot.batch <= retired + window - 1
        started[slot.position] = slot

    def end() -> None:
        nonlocal failures
        running = sorted((slot for pace in paces for slot in pace.in_flight), key=lambda s: s.position)
        if not running:
            return
        slot = data.draw(st.sampled_from(running))
        if failures and data.draw(st.booleans()):
            failures -= 1
            lost[slot.position % replicas].append(slot.batch)
            paces[slot.position % replicas].fail(slot, "reward error")
        else:
            done.append(slot)
            paces[slot.position % replicas].complete(slot)

    for pace in paces:
        pace.open(gate(0, retired * prompts * group_size, version=retired))
    for _ in range(400):
        if retired == steps:
            break
        if sum(slot.batch == retired for slot in done) == prompts:
            retired, step = retired + 1, step + 1
            for pace in paces:
                pace.open(gate(step, retired * prompts * group_size, version=retired, stop=retired == steps))
        elif data.draw(st.booleans()):
            start(data.draw(st.integers(0, replicas - 1)))
        else:
            end()
    else:  # the draws were unlucky; let everything run to its end
        while retired < steps:
            for replica in range(replicas):
                start(replica)
            end()
            if sum(slot.batch == retired for slot in done) == prompts:
                retired, step = retired + 1, step + 1
                for pace in paces:
                    pace.open(gate(step, retired * prompts * group_size, version=retired, stop=retired == steps))

    assert all(pace.next() is None and not pace.in_flight for pace in paces)
    assert sorted(slot.batch for slot in done) == [j for j in range(resumed, steps) for _ in range(prompts)]
    assert len({slot.position for slot in done}) == len(done)
    assert sum(pace.completed for pace in paces) == (steps - resumed) * prompts
