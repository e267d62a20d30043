"""Who runs when, and in which slot."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshy.inference.embedded.attention import chunk_rows
from meshy.inference.embedded.batch import flatten
from meshy.inference.embedded.scheduler import Scheduler
from tests.inference.conftest import request


def ids(requests) -> list[str]:
    return [one.rid for one in requests]


def test_slots_are_filled_in_order_and_refilled_at_once():
    scheduler = Scheduler(max_running=3, max_prefill_tokens=100)
    scheduler.add(request(str(i), [0] * 4, 9) for i in range(5))
    first = scheduler.plan()
    assert ids(first.prefill) == ["0", "1", "2"] and not first.decode
    scheduler.running[0].finish({"type": "stop"})
    second = scheduler.plan()
    assert ids(second.decode) == ["2", "1"] and second.moves == [(2, 0)]
    assert ids(second.prefill) == ["3"] and ids(scheduler.waiting) == ["4"]


def test_prefill_budget_holds_back_but_lets_one_long_prompt_through():
    scheduler = Scheduler(max_running=8, max_prefill_tokens=10)
    scheduler.add(
        [request("long", [0] * 50, 1), request("a", [0] * 4, 1), request("b", [0] * 4, 1), request("c", [0] * 4, 1)]
    )
    assert ids(scheduler.plan().prefill) == ["long"]
    assert ids(scheduler.plan().prefill) == ["a", "b"]


def test_retracted_requests_come_back_first_and_whole():
    scheduler = Scheduler(max_running=2, max_prefill_tokens=100)
    scheduler.add(request(str(i), [0] * 4, 9) for i in range(3))
    for one in scheduler.plan().prefill:
        one.append(7, -1.0, "0")
    scheduler.retract()
    plan = scheduler.plan()
    assert ids(plan.prefill) == ["0", "1"]
    assert [one.length for one in plan.prefill] == [5, 5] and [one.retractions for one in plan.prefill] == [1, 1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 7), max_size=4), min_size=1, max_size=12), st.integers(1, 6))
def test_every_request_keeps_its_own_slot_through_all_moves(endings, slots):
    """Follow the moves with a model of the cache: at each step, slot i must hold what `decode[i]` wrote."""
    scheduler = Scheduler(max_running=slots, max_prefill_tokens=1000)
    scheduler.add(request(str(i), [0], 99) for i in range(20))
    cache: dict[int, str] = {}
    for ending in endings:
        plan = scheduler.plan()
        targets = [to for _, to in plan.moves]
        assert len(set(targets)) == len(targets) and not set(targets) & {source for source, _ in plan.moves}
        cache.update({to: cache[source] for source, to in plan.moves})
        assert [cache[slot] for slot in range(len(plan.decode))] == ids(plan.decode)
        cache.update({len(plan.decode) + i: one.rid for i, one in enumerate(plan.prefill)})
        assert len(scheduler.running) == min(slots, len(scheduler.running) + len(scheduler.waiting))
        for index in ending:
            if index < len(scheduler.running) and not scheduler.running[index].finished:
                scheduler.running[index].finish({"type": "stop"})


def test_equal_prompts_are_fed_once_and_written_to_every_slot():
    decode = [request("d", [5, 6], 9)]
    decode[0].append(7, -1.0, "0")
    prefill = [request("a", [1, 2, 3], 9), request("b", [4] * 20, 9), request("c", [1, 2, 3], 9)]
    batch = flatten(decode, prefill)
    assert [(block.start, block.prompts, block.length) for block in batch.blocks] == [(1, 1, 16), (17, 1, 32)]
    assert batch.tokens[:4].tolist() == [7, 1, 2, 3] and batch.positions[:4].tolist() == [2, 0, 1, 2]
    assert batch.logit_rows[:3].tolist() == [0, 3, 36] and batch.logit_of.tolist() == [0, 1, 2, 1]
    writes = set(zip(batch.write_row.tolist(), batch.write_slot.tolist(), batch.write_position.tolist(), strict=True))
    assert {(0, 0, 2), (1, 1, 0), (3, 1, 2), (1, 3, 0), (3, 3, 2), (17, 2, 0), (36, 2, 19)} <= writes
    assert len(writes) == 1 + 3 + 20 + 3


def test_a_small_step_is_padded_to_four_rows():
    batch = flatten([request("d", [5], 9)], [])
    assert len(batch.tokens) == len(batch.positions) == len(batch.logit_rows) == 4
    assert len(batch.write_row) == 1


def test_rows_are_attended_together_unless_that_reads_much_more():
    alike = np.full(128, 40)
    assert chunk_rows(alike) == [(0, 128, 64)]
    uneven = alike.copy()
    uneven[100] = 500
    assert chunk_rows(uneven) == [(0, 32, 64), (32, 64, 64), (64, 96, 64), (96, 128, 512)]
    assert chunk_rows(np.array([], dtype=np.int64)) == []
