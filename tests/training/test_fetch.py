"""A rank's rows over a real queue, read early; and rows that are cleared or forgotten while they are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from meshy.queue.errors import QueueUnreachable, StaleRows
from meshy.queue.rows import Rows
from meshy.queue.sync import QueueClient
from meshy.spmd.fetch import Fetcher
from meshy.training.batch import RANK_COLUMNS
from meshy.training.collect import Collector
from tests.training.queues import train_queue

SECONDS = 20.0


class Halting:
    """A client whose reads wait for the test."""

    def __init__(self, client: QueueClient) -> None:
        self.client = client
        self.began, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def read(self, rows: Rows, columns: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
        self.began.release()
        assert self.go.acquire(timeout=SECONDS)
        return self.client.read(rows, columns, optional)


@contextmanager
def fetching(client: Any) -> Iterator[Fetcher]:
    fetcher = Fetcher(client, RANK_COLUMNS)
    yield fetcher
    fetcher.close()
    fetcher._thread.join(SECONDS)
    assert not fetcher._thread.is_alive()


def wait_until_read(fetcher: Fetcher) -> None:
    with fetcher._changed:
        assert fetcher._changed.wait_for(lambda: not fetcher._coming, SECONDS)


def check(data: Any, rows: Rows) -> None:
    """As `group_columns` makes them."""
    for i, uid in enumerate(rows.uids):
        position, number = map(int, uid.split("."))
        assert torch.equal(data["tokens"][i], torch.arange(4 + number) + 1000 * position)
        assert data["rollout_logprobs"][i].tolist() == [-position] * (4 + number)
        assert data["loss_mask"][i].tolist() == [False] + [True] * (3 + number)
        assert data["token_versions"][i].dtype == torch.int32


def test_rows_are_read_before_they_are_asked_for_and_given_in_any_order(queue):
    queue.put(3), queue.put(2)
    rows = queue.take(5)
    with fetching(queue.trainer) as fetcher:
        fetcher.want(rows.select([0, 1, 2]))
        fetcher.want(rows.select([3]))
        wait_until_read(fetcher)
        queue.trainer.clear(rows.select([0, 1, 2, 3]))  # the proof that they are here
        for order in ([3, 0, 2], [1, 4, 0]):  # row 4 was meant for another rank
            check(fetcher.get(rows.select(order)), rows.select(order))
        fetcher.forget(rows.uids)
        assert fetcher.held == 0
        assert fetcher.get(rows.select([]))["tokens"] == []


def test_rows_still_on_their_way_are_waited_for(queue):
    queue.put(2)
    rows, client = queue.take(2), Halting(queue.trainer)
    with fetching(client) as fetcher:
        fetcher.want(rows)
        assert client.began.acquire(timeout=SECONDS)
        timer = threading.Thread(target=client.go.release)
        timer.start()
        check(fetcher.get(rows), rows)
        assert not client.began.acquire(blocking=False)  # read once


def test_rows_forgotten_while_they_are_read_are_not_kept(queue):
    queue.put(3)
    rows, client = queue.take(3), Halting(queue.trainer)
    with fetching(client) as fetcher:
        fetcher.want(rows)
        assert client.began.acquire(timeout=SECONDS)
        fetcher.forget(rows.uids[:2])
        client.go.release()
        wait_until_read(fetcher)
        assert fetcher.held == 1
        fetcher.want(rows.select([0]))
        fetcher.forget(rows.uids)
        assert fetcher.held == 0
        client.go.release()


@pytest.mark.parametrize("told", ["before it fails", "after", "never"])
def test_rows_cleared_while_they_are_read_harm_nobody(queue, told):
    queue.put(4)
    rows, client = queue.take(4), Halting(queue.trainer)
    gone, alive = rows.select([1, 2]), rows.select([0, 3])
    with fetching(client) as fetcher:
        fetcher.want(rows)
        assert client.began.acquire(timeout=SECONDS)
        if told == "before it fails":
            fetcher.forget(gone.uids)
        queue.trainer.clear(gone)
        client.go.release(20)
        wait_until_read(fetcher)
        if told == "after":
            fetcher.forget(gone.uids)
        check(fetcher.get(alive), alive)
        assert fetcher.held == 2
        queue.put(2)
        more = queue.take(2)
        fetcher.want(more)
        check(fetcher.get(more), more)
        with pytest.raises(StaleRows, match=gone.uids[0]):
            fetcher.get(gone)
        with pytest.raises(StaleRows, match=gone.uids[1]):  # asked again, it does not wait for ever
            fetcher.get(gone.select([1]))


def test_nothing_is_left_of_a_long_run(queue):
    with fetching(queue.trainer) as fetcher:
        for _ in range(20):
            queue.put(4)
            rows = queue.take(4)
            fetcher.want(rows.select([0, 1]))
            check(fetcher.get(rows.select([1, 2])), rows.select([1, 2]))
            fetcher.forget(rows.uids)
            queue.trainer.clear(rows)
        assert fetcher.held == 0


def test_a_closed_fetcher_reads_no_more_of_what_was_wanted(queue):
    queue.put(1), queue.put(1)
    rows, client = queue.take(2), Halting(queue.trainer)
    with fetching(client) as fetcher:
        fetcher.want(rows.select([0]))
        fetcher.want(rows.select([1]))
        assert client.began.acquire(timeout=SECONDS)
        fetcher.close()
        client.go.release()
    assert not client.began.acquire(blocking=False)


def test_a_queue_that_dies_is_said_where_rows_are_asked_for():
    with train_queue(deadline=1.0) as queue:
        queue.put(2)
        rows = queue.take(2)
        collector = Collector(queue.trainer)
        queue.server.processes["controller"].kill()
        with pytest.raises(QueueUnreachable, match=r"trainer\.0"):
            collector.collect(0, 2)
        with fetching(queue.trainer) as fetcher:
            fetcher.want(rows)
            with pytest.raises(QueueUnreachable, match=r"trainer\.0"):
                fetcher.get(rows)
        collector.close()
