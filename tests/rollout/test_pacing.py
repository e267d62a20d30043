"""Pacing: what a person can count, and gates that do not fit. See test_pacing_model.py for everything else."""

import pytest

from meshy.columns import ANY_BATCH
from meshy.rollout.pacing import Gate, GateError, NothingSurvives, Pace, Pacing, Slot


def gate(step: int, retired: int, *, version: int | None = None, incarnation: str = "a", stop: bool = False) -> Gate:
    return Gate(
        incarnation=incarnation,
        gate_step=step,
        weight_version=step if version is None else version,
        samples_retired=retired,
        stop=stop,
    )


def pacing_of(prompts: int, group_size: int, steps: int, *, replica: int = 0, replicas: int = 1, **fields) -> Pacing:
    bounds = {name: fields.pop(name) for name in ("max_failures", "max_filtered") if name in fields}
    pace = Pace(prompts_per_batch=prompts, group_size=group_size, steps=steps, **fields)
    return Pacing(pace, replica=replica, replicas=replicas, **bounds)


def drain(pacing: Pacing) -> list[Slot]:
    slots = []
    while (slot := pacing.next()) is not None:
        slots.append(slot)
    return slots


def test_nothing_starts_before_the_first_gate_and_one_batch_after_it():
    pacing = pacing_of(3, 4, 2)
    assert drain(pacing) == []
    pacing.open(gate(0, 0))
    assert drain(pacing) == [Slot(0, 0), Slot(1, 0), Slot(2, 0)]
    pacing.open(gate(1, 12))
    assert drain(pacing) == [Slot(3, 1), Slot(4, 1), Slot(5, 1)]


def test_the_budget_ends_with_the_last_batch_and_with_the_stop_gate():
    pacing = pacing_of(2, 1, 1, window=5)
    pacing.open(gate(0, 0))
    assert len(drain(pacing)) == 2
    stopped = pacing_of(2, 1, 9)
    stopped.open(gate(0, 0, stop=True))
    assert drain(stopped) == []


def test_a_failed_group_is_replaced_within_its_own_batch_beyond_the_planned_positions():
    pacing = pacing_of(2, 8, 3, window=2)
    pacing.open(gate(0, 0))
    slots = drain(pacing)
    pacing.fail(slots[1], "reward error")
    pacing.fail(slots[3], "reward timeout")
    assert drain(pacing) == [Slot(6, 0), Slot(7, 1)]
    assert pacing.failures == {"reward error": 1, "reward timeout": 1}


def test_a_replacement_for_an_earlier_batch_comes_before_those_for_later_ones():
    pacing = pacing_of(2, 1, 3, window=2)
    pacing.open(gate(0, 0))
    slots = drain(pacing)
    pacing.fail(slots[2], "generation")
    pacing.fail(slots[0], "generation")
    assert drain(pacing) == [Slot(6, 0), Slot(7, 1)]


@pytest.mark.parametrize("pace", [{"window": 1}, {"window": 3}, {"window": None, "max_staleness": 2}])
def test_a_run_that_goes_on_at_version_50_has_no_more_in_flight_than_a_new_one(pace):
    most = 4 * (pace["window"] or 3)
    new, resumed = ([pacing_of(4, 2, 100, replica=i, replicas=3, **pace) for i in range(3)] for _ in range(2))
    for step in range(3):
        for pacing in new:
            pacing.open(gate(step, 8 * step))
        for pacing in resumed:
            pacing.open(gate(step, 8 * (50 + step), version=50 + step))
        positions = sorted(slot.position for pacing in new for slot in drain(pacing))
        assert positions == list(range(most + 4 * (step - 1) if step else 0, most + 4 * step))
        assert sorted(slot.position for pacing in resumed for slot in drain(pacing)) == [p + 200 for p in positions]


def test_without_a_window_positions_follow_one_another_while_there_is_room_among_what_is_alive():
    pacing = pacing_of(2, 2, 4, window=None, max_staleness=1)
    pacing.open(gate(0, 0))
    slots = drain(pacing)
    assert slots == [Slot(p, ANY_BATCH) for p in range(4)]
    assert pacing.complete(slots[2]) == () and drain(pacing) == []  # complete, but not retired
    pacing.fail(slots[1], "generation")
    pacing.drop(slots[3], 1.0)
    assert drain(pacing) == [Slot(4, ANY_BATCH), Slot(5, ANY_BATCH)]
    pacing.open(gate(1, 4))
    assert drain(pacing) == [Slot(6, ANY_BATCH), Slot(7, ANY_BATCH)]
    pacing.open(gate(2, 2 + 4, version=1))  # a credit: one group was too old
    assert drain(pacing) == [Slot(8, ANY_BATCH)]


def test_without_a_window_no_group_is_started_that_no_step_would_train():
    pacing = pacing_of(2, 2, 2, window=None, max_staleness=9)
    pacing.open(gate(0, 0))
    assert len(drain(pacing)) == 4
    pacing.open(gate(1, 4, version=1))
    assert drain(pacing) == []
    pacing.open(gate(2, 4 + 2, version=1))  # one was dropped
    assert len(drain(pacing)) == 1


def test_over_sampling_starts_more_and_gives_up_what_is_not_needed():
    pacing = pacing_of(4, 1, 3, window=2, over_sampling=1.5)
    pacing.open(gate(0, 0))
    slots = drain(pacing)
    own = [Slot(0, 0), Slot(1, 0), Slot(2, 0), Slot(3, 0)]
    assert slots == [*own, Slot(12, 0), Slot(13, 0), *(Slot(p, 1) for p in range(4, 8)), Slot(14, 1), Slot(15, 1)]
    pacing.fail(slots[0], "generation")
    assert drain(pacing) == [Slot(16, 0)]
    assert [pacing.complete(slot) for slot in (slots[5], slots[1], slots[3])] == [(), (), ()]
    assert list(pacing.complete(slots[4])) == [Slot(2, 0), Slot(16, 0)]
    assert pacing.surplus == 2 and {slot.batch for slot in pacing.in_flight} == {1} and drain(pacing) == []


def test_a_batch_is_complete_before_its_surplus_is_started():
    pacing = pacing_of(2, 1, 3, over_sampling=3.0)
    pacing.open(gate(0, 0))
    first, second = pacing.next(), pacing.next()
    pacing.complete(first)
    assert pacing.complete(second) == [] and pacing.peek() is None


@pytest.mark.parametrize(("share", "started"), [(10, 11), (20, 22), (3, 4)])
def test_over_sampling_rounds_up_but_not_for_the_sake_of_a_float(share, started):
    pacing = pacing_of(share, 1, 1, over_sampling=1.1)
    pacing.open(gate(0, 0))
    assert len(drain(pacing)) == started


@pytest.mark.parametrize(
    "fields",
    [
        {"window": 0},
        {"window": -1},
        {"window": None},
        {"over_sampling": 0.5},
        {"over_sampling": float("inf")},
        {"over_sampling": float("nan")},
        {"window": None, "max_staleness": 1, "over_sampling": 1.5},
    ],
)
def test_a_pace_that_cannot_be_kept_is_refused(fields):
    with pytest.raises(ValueError, match=r"window|over_sampling"):
        pacing_of(2, 2, 2, **fields)


def test_too_many_failures_in_a_row_end_the_run_with_counts():
    pacing = pacing_of(1, 1, 9, max_failures=2)
    pacing.open(gate(0, 0))
    first = pacing.next()
    pacing.fail(first, "reward error")
    pacing.complete(pacing.next())  # a group that survives begins the count anew
    pacing.open(gate(1, 1))
    for reason in ("reward error", "generation"):
        pacing.fail(pacing.next(), reason)
    with pytest.raises(NothingSurvives, match=r"3 groups in a row.*2 allowed.*1 groups were.*reward error \(3\)"):
        pacing.fail(pacing.next(), "reward error")


def test_a_group_that_the_filter_drops_has_not_failed():
    pacing = pacing_of(4, 1, 9, max_failures=1)
    pacing.open(gate(0, 0))
    for _ in range(5):
        pacing.fail(pacing.next(), "reward error")
        pacing.drop(pacing.next(), 0.0)
    assert pacing.failures.total() == pacing.filtered.total() == 5


def test_a_filter_that_drops_everything_ends_the_run_with_the_rewards_of_what_it_dropped():
    pacing = pacing_of(4, 1, 9, max_filtered=5)
    pacing.open(gate(0, 0))
    for reward in (0.0, 1.0, 0.0, 0.04, 0.26):
        pacing.drop(pacing.next(), reward)
    pacing.fail(pacing.next(), "reward error")  # says nothing about the filter
    with pytest.raises(NothingSurvives) as error:
        pacing.drop(pacing.next(), 1.0)
    assert str(error.value) == (
        "6 groups in a row have been dropped by the filter, more than the 5 allowed; since the start 0 groups were "
        "completed, 1 failed: reward error (1), 6 were dropped; groups by mean reward:\n"
        "    0.0 ### 3\n    0.3 # 1\n    1.0 ## 2"
    )


def test_the_bar_of_a_histogram_stays_on_its_line():
    pacing = pacing_of(1, 1, 9, max_filtered=4999)
    pacing.open(gate(0, 0))
    with pytest.raises(NothingSurvives, match=r"\n    1.0 #{60} 5000$"):
        for _ in range(5000):
            pacing.drop(pacing.next(), 1.0)


def test_one_group_that_survives_begins_the_count_of_the_dropped_anew():
    pacing = pacing_of(1, 1, 9, window=None, max_staleness=8, max_filtered=2)
    pacing.open(gate(0, 0))
    for _ in range(4):
        pacing.drop(pacing.next(), 0.0)
        pacing.drop(pacing.next(), 0.0)
        pacing.complete(pacing.next())
    assert pacing.filtered == {0.0: 8} and pacing.completed == 4


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
    pacing = pacing_of(1, 4, 9)
    for good in gates[:-1]:
        pacing.open(good)
    with pytest.raises(GateError, match=what) as error:
        pacing.open(gates[-1])
    for shown in gates[-2:]:
        assert repr(shown) in str(error.value)
