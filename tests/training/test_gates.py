"""Gates over a real queue that holds no more of them than LIVE_GATES."""

from __future__ import annotations

import queue as queues
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshy.columns import GEN_GATE
from meshy.queue.errors import QueueFull
from meshy.training.config import LIVE_GATES
from meshy.training.gates import Gates

SECONDS = 20.0


def acknowledge(queue, count: int) -> list[int]:
    """By rollout; the steps of these gates."""
    rows = queue.rollout.take(GEN_GATE, "rollout.0", at_least=count, at_most=count, timeout=SECONDS)
    steps = queue.rollout.read(rows, ["gate_step"])["gate_step"].tolist()
    queue.rollout.ack(rows)
    return steps


def test_a_gate_waits_for_a_place_until_a_reader_acknowledges_one(queue):
    gates, turns = Gates(queue.trainer), queues.SimpleQueue()
    for version in range(LIVE_GATES):
        gates.open(version, 8 * version, stop=False)
    assert gates.outstanding == LIVE_GATES
    with pytest.raises(QueueFull):  # no gate more would fit
        Gates(queue.trainer).open(0, 0, stop=False)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(gates.open, LIVE_GATES, 8 * LIVE_GATES, stop=False, meanwhile=lambda: turns.put(None))
        turns.get(timeout=SECONDS)
        assert not opening.done()
        assert acknowledge(queue, 1) == [0]
        opening.result(SECONDS)
        assert gates.outstanding == LIVE_GATES
        assert acknowledge(queue, LIVE_GATES) == list(range(1, LIVE_GATES + 1))  # without a gap
        ending = pool.submit(gates.clear_all, lambda: None)
        ending.result(SECONDS)
    assert gates.outstanding == 0 and queue.trainer.table()[GEN_GATE]["rows"] == 0


def test_what_goes_wrong_meanwhile_ends_the_wait(queue):
    def fail() -> None:
        raise ConnectionError("no replica serves")

    gates = Gates(queue.trainer, most=1)
    gates.open(0, 0, stop=False)
    gates.clear_acknowledged()  # nobody has: it waits for nothing
    assert gates.outstanding == 1
    with pytest.raises(ConnectionError):
        gates.open(1, 8, stop=True, meanwhile=fail)
    assert gates.next_step == 1  # the next one is still to come
    acknowledge(queue, 1)
    gates.clear_acknowledged()
    assert gates.outstanding == 0
    gates.open(1, 8, stop=True, meanwhile=fail)
    assert acknowledge(queue, 1) == [1]
    gates.clear_all(lambda: None)
