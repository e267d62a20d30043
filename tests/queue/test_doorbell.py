import asyncio
import threading
import time

import pytest

from meshy.queue import client as client_module
from meshy.queue.client import AsyncQueueClient
from meshy.queue.errors import QueueClosed, QueueTimeout
from meshy.queue.sync import QueueClient

from .conftest import make_rows, scores


@pytest.fixture
def no_polls(monkeypatch):
    """Take the net away: only the doorbell can wake a waiter before the test's own time limit."""
    monkeypatch.setattr(client_module, "POLL_SECONDS", 3600.0)


def test_a_put_wakes_a_waiter(no_polls, queue, contract, writer, partition):
    async def wait_and_put():
        async with AsyncQueueClient(queue.endpoints, contract, "scorer.0") as scorer:
            waiter = asyncio.create_task(scorer.take(partition, at_least=3))
            for uids in (["a"], ["b", "c"]):
                await asyncio.sleep(0.1)
                assert not waiter.done()
                await asyncio.to_thread(writer.put, partition, make_rows(uids))
            return await asyncio.wait_for(waiter, 20)

    assert list(asyncio.run(wait_and_put())) == ["a", "b", "c"]


def test_the_last_missing_column_and_the_last_ack_wake_the_end_consumer(
    no_polls, writer, scorer, logger, trainer, partition
):
    got = []
    thread = threading.Thread(target=lambda: got.append(trainer.take(partition, at_least=2)))
    thread.start()
    writer.put(partition, make_rows(["a", "b"]))
    scorer.write(scorer.take(partition, at_least=2), scores(5, 2))
    logger.ack(logger.take(partition, at_least=2))
    thread.join(20)
    assert [list(rows) for rows in got] == [["a", "b"]]


def test_no_ring_is_lost_in_a_race_of_puts_and_takes(no_polls, writer, scorer, partition):
    """Without polls one lost ring would hang: 200 puts against takes that look and wait at any moment."""
    got = []
    thread = threading.Thread(target=lambda: [got.extend(scorer.take(partition)) for _ in range(1000) if len(got) < 60])
    thread.start()
    for i in range(60):
        writer.put(partition, make_rows([f"u{i}"]))
    thread.join(30)
    assert got == [f"u{i}" for i in range(60)]


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_that_comes_together_with_the_ring_is_not_lost(no_polls, queue, contract, partition, turns):
    async def ring_and_cancel():
        async with AsyncQueueClient(queue.endpoints, contract, "scorer.0") as scorer:
            waiter = asyncio.create_task(scorer.take(partition))
            while partition not in scorer._doorbell._events:
                await scorer.table()
            for _ in range(3):  # it has looked by then, and waits
                await scorer.table()
            scorer._doorbell._events[partition].set()
            for _ in range(turns):
                await asyncio.sleep(0)
            waiter.cancel()
            await asyncio.wait({waiter}, timeout=5)
            assert waiter.cancelled()

    asyncio.run(ring_and_cancel())


def test_the_poll_is_the_net_beneath_the_doorbell(monkeypatch, writer, scorer, partition):
    monkeypatch.setattr(client_module, "POLL_SECONDS", 0.05)
    bell = scorer._client._doorbell
    monkeypatch.setattr(bell, "_events", {})
    monkeypatch.setattr(bell, "armed", lambda name: asyncio.Event())  # deaf
    monkeypatch.setattr(bell, "subscribe", lambda name: asyncio.sleep(0))
    got = []
    thread = threading.Thread(target=lambda: got.append(scorer.take(partition)))
    thread.start()
    writer.put(partition, make_rows(["a"]))
    thread.join(20)
    assert [list(rows) for rows in got] == [["a"]]


def test_rows_of_a_cancelled_take_go_back(queue, contract, writer, partition):
    async def cancel_takes():
        got = []
        async with AsyncQueueClient(queue.endpoints, contract, "scorer.0") as scorer:
            await scorer.connect()
            for i in range(40):
                take = asyncio.create_task(scorer.take(partition, at_most=1))
                await asyncio.sleep(0.0002 * i)  # cancelled before, while and after the answer comes
                take.cancel()
                try:
                    got += list(await take)
                except asyncio.CancelledError:
                    continue
            while len(got) < 50:
                got += list(await scorer.take(partition, timeout=20))
        return got

    writer.put(partition, make_rows([f"u{i}" for i in range(50)], length=1))
    assert sorted(asyncio.run(cancel_takes())) == sorted(f"u{i}" for i in range(50))


def test_timeouts_and_the_watchdog_line_name_what_is_missing(monkeypatch, caplog, writer, trainer, scorer, partition):
    monkeypatch.setattr(client_module, "WATCHDOG_SECONDS", 0.1)
    monkeypatch.setattr(client_module, "POLL_SECONDS", 0.05)
    writer.put(partition, make_rows(["a"]))
    with pytest.raises(QueueTimeout, match=r"missing score in 1, ack\.scorer in 1, ack.logger in 1"):
        trainer.take(partition, timeout=0.5)
    assert "trainer.0: 'trainer' has waited" in caplog.text
    with pytest.raises(QueueTimeout, match=r"for 2 rows .* 1 are ready; nobody has put more rows \(1 alive"):
        scorer.take(partition, at_least=2, timeout=0.1)


def test_closing_a_client_ends_its_waits(queue, contract, partition):
    client = QueueClient(queue.endpoints, contract, "scorer.1")
    errors = []

    def wait():
        try:
            client.take(partition)
        except QueueClosed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    client.close()
    thread.join(10)
    assert len(errors) == 1
    with pytest.raises(QueueClosed):
        client.table()
    client.close()
