"""The collector over a real queue: what it gathers, and what it does not keep the rows waiting for."""

from __future__ import annotations

import queue as queues
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from meshy.queue.errors import QueueClosed
from meshy.queue.rows import Rows
from meshy.training import collect as module
from meshy.training.collect import Collector
from meshy.training.inbox import MisfitGroup

SECONDS = 20.0


class Shares:
    """Says who fetches, and lets a test wait for rows to come."""

    def __init__(self) -> None:
        self.told: queues.SimpleQueue[str] = queues.SimpleQueue()
        self.lengths: dict[str, int] = {}

    def __call__(self, rows: Rows, lengths: list[int]) -> list[int]:
        self.lengths |= zip(rows.uids, lengths, strict=True)
        for uid in rows.uids:
            self.told.put(uid)
        return [int(uid.split(".")[1]) % 2 for uid in rows.uids]

    def wait_for(self, count: int) -> set[str]:
        return {self.told.get(timeout=SECONDS) for _ in range(count)}


@contextmanager
def collecting(client: Any, **options: Any) -> Iterator[Collector]:
    collector = Collector(client, **options)
    try:
        yield collector
    finally:
        collector.close()
        assert not collector._thread.is_alive()


@pytest.fixture(autouse=True)
def short_turns(monkeypatch) -> None:
    """One is how long `close` may take."""
    monkeypatch.setattr(module, "TURN_SECONDS", 0.05)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_a_batch_is_there_when_its_last_group_has_come(queue, pool):
    shares = Shares()
    with collecting(queue.trainer, share=shares) as collector:
        early = queue.put(3)
        assert shares.wait_for(3) == set(early)  # while nobody asks for a batch yet
        asked = pool.submit(collector.collect, 0, 5)
        for_next = queue.put(2, batch=1)
        shares.wait_for(2)
        assert not asked.done()
        last = queue.put(2, batch=0)
        batch = asked.result(SECONDS)
        assert batch.rows.uids == (*early, *last) and batch.groups.tolist() == [0, 0, 0, 1, 1]
        assert batch.lengths == (4, 5, 6, 4, 5) and batch.ranks == (0, 1, 0, 0, 1)
        assert shares.lengths[early[2]] == 6
        assert collector.waited > 0 and collector.have == 2
        assert collector.collect(1, 2).rows.uids == for_next
        assert collector.have == 0
        queue.trainer.clear(batch.rows)  # it has taken them as the end consumer


def test_rows_of_a_group_may_come_one_by_one_as_they_are_scored(queue, pool):
    shares = Shares()
    with collecting(queue.trainer, share=shares) as collector:
        uids = queue.put(3, scored=False)
        asked = pool.submit(collector.collect, 0, 3)
        rows = queue.unscored(3)
        for i in (2, 0, 1):
            assert not asked.done()
            queue.score(rows.select([i]))
            assert shares.wait_for(1) == {uids[i]}
        assert asked.result(SECONDS).rows.uids == uids


def test_what_is_too_old_is_dropped_and_its_replacement_comes_meanwhile(queue):
    """`dropped` waits for rows that are put because of it, as the trainer does at a gate that nobody acknowledges."""
    shares, dropped = Shares(), []

    def drop(groups: list[Any]) -> None:
        dropped.extend(row.uids[0] for group in groups for row in group.rows)
        replacements.append(queue.put(2, oldest_version=3))
        assert shares.wait_for(2) == set(replacements[-1])

    replacements: list[tuple[str, ...]] = []
    with collecting(queue.trainer, share=shares, dropped=drop) as collector:
        old, fresh = queue.put(2, oldest_version=1), queue.put(2, oldest_version=2)
        bound = queue.put(2, oldest_version=0, batch=3)  # of a window, whose bound is another one
        shares.wait_for(6)
        batch = collector.collect(3, 6, max_staleness=1)
        assert dropped == list(old)
        assert batch.rows.uids == (*fresh, *bound, *replacements[0])
        assert collector.have == 0


def test_the_leader_has_its_turn_however_steadily_rows_come(queue, pool):
    """And what it raises then ends the wait."""

    def turn() -> None:
        raise ConnectionError("no replica serves")

    with collecting(queue.trainer, meanwhile=turn) as collector:
        asked = pool.submit(collector.collect, 0, 4096)
        for _ in range(400):  # a put takes milliseconds: no pause is as long as a turn
            if asked.done():
                break
            queue.put(1)
        with pytest.raises(ConnectionError):
            asked.result(SECONDS)


@pytest.mark.parametrize("failing", ["share", "group"])
def test_what_the_thread_raises_is_raised_where_a_batch_is_asked_for(queue, pool, failing):
    def share(rows: Rows, lengths: list[int]) -> list[int]:
        if failing == "share":
            raise LookupError("no rank is free")
        return [0] * len(rows)

    with collecting(queue.trainer, share=share) as collector:
        asked = pool.submit(collector.collect, 0, 4)
        queue.put(3, group_size=2)
        with pytest.raises(
            LookupError if failing == "share" else MisfitGroup, match=r"no rank|all 2 rows of its group"
        ):
            asked.result(SECONDS)
        with pytest.raises((LookupError, MisfitGroup)):  # and again: there is nothing that could come any more
            collector.collect(0, 4)


def test_a_queue_that_closes_is_said_where_a_batch_is_asked_for(queue, pool):
    client = queue.client("trainer")
    with collecting(client) as collector:
        asked = pool.submit(collector.collect, 0, 4)
        client.close()
        with pytest.raises(QueueClosed):
            asked.result(SECONDS)


def test_a_closed_collector_takes_nothing_more(queue):
    with collecting(queue.trainer):
        pass
    queue.put(2)
    assert queue.waiting() == 2
