"""Row indexes are used again. Nothing that refers to an earlier row may touch a later one."""

import asyncio
import time

import psutil
import pytest

from meshy.queue.client import AsyncQueueClient
from meshy.queue.controller import Controller
from meshy.queue.errors import DuplicateUid, MissingColumn, QueueTimeout, Refused, StaleRows, WrongRun
from meshy.queue.ledger import RESERVATION_SECONDS
from meshy.queue.local import free_endpoints
from meshy.queue.storage import FencedStorageUnit
from meshy.queue.sync import QueueClient
from meshy.queue.transferqueue import Message, MessageType

from .conftest import make_rows, scores


@pytest.fixture
def reused(writer, scorer, logger, trainer, partition):
    """Handles of rows that were cleared, whose indexes hold other rows now: (the scorer's, the trainer's, the new)."""
    writer.put(partition, make_rows(["old0", "old1"]))
    scored = scorer.take(partition, at_least=2)
    scorer.write(scored, scores(5, 2))
    logger.ack(logger.take(partition, at_least=2))
    trained = trainer.take(partition, at_least=2)
    trainer.clear(trained)
    new = []
    while not set(scored.indexes) <= {index for rows in new for index in rows.indexes}:
        new.append(writer.put(partition, make_rows([f"new{len(new)}.{i}" for i in range(4)])))
    return scored, trained, new


def test_a_late_write_into_a_reused_row_is_refused(scorer, trainer, reused):
    scored, _, new = reused
    with pytest.raises(
        StaleRows, match=r"write of 'old\d' refused by .*storage.\d: row \d+ was cleared and now holds 'new"
    ):
        scorer.write(scored, scores(5, 2))
    for rows in new:
        with pytest.raises(MissingColumn):
            trainer.read(rows, ["score"])
    assert scorer.table()[scored.partition]["columns"]["score"] == 0


def test_a_late_read_ack_and_clear_are_refused(writer, scorer, trainer, reused):
    scored, trained, new = reused
    with pytest.raises(StaleRows, match="read of 'old"):
        scorer.read(scored)
    with pytest.raises(StaleRows, match="write of 'old"):
        scorer.ack(scored)
    with pytest.raises(StaleRows, match="clear of 'old"):
        trainer.clear(trained)
    assert [uid for rows in new for uid in writer.read(rows, ["uid"])["uid"]] == [uid for rows in new for uid in rows]


def test_rows_are_cleared_once_and_then_empty(writer, scorer, logger, trainer, partition):
    writer.put(partition, make_rows(["a"]))
    scored = scorer.take(partition)
    scorer.write(scored, scores(5, 1))
    logger.ack(logger.take(partition))
    taken = trainer.take(partition)
    trainer.clear(taken)
    with pytest.raises(StaleRows, match=r"'a' in .* refused: row .* was cleared and now"):
        trainer.clear(taken)
    with pytest.raises(StaleRows, match="was cleared and now"):
        scorer.write(scored, scores(5, 1))
    with pytest.raises(StaleRows):
        trainer.read(taken)


def test_a_cancelled_put_leaves_no_half_rows(queue, contract, writer, partition):
    """Cancelled at any moment, a put has either happened or left nothing behind, and its uids may be put again."""

    async def cancel_puts():
        async with AsyncQueueClient(queue.endpoints, contract, "writer.1") as client:
            for i in range(30):
                put = asyncio.create_task(client.put(partition, make_rows([f"u{i}"])))
                await asyncio.sleep(0.0002 * i)
                put.cancel()
                await asyncio.wait([put])

    asyncio.run(cancel_puts())
    table = writer.table()[partition]
    assert table["reserved"] == 0
    assert table["rows"] == table["columns"]["info"]
    for i in range(30):
        try:
            writer.put(partition, make_rows([f"u{i}"]))
        except DuplicateUid:
            continue
    assert writer.table()[partition]["rows"] == 30


@pytest.mark.prove
def test_a_long_run_keeps_the_processes_small(queue, writer, scorer, logger, trainer, partition):
    processes = psutil.Process(queue.processes["controller"].pid).children()
    sizes = []
    for step in range(3000):
        writer.put(partition, make_rows([f"{step}.{i}" for i in range(4)], length=500))
        scorer.write(scorer.take(partition, at_least=4), scores(500, 4))
        logger.ack(logger.take(partition, at_least=4))
        trainer.clear(trainer.take(partition, at_least=4))
        if step in (500, 2999):
            sizes.append([process.memory_info().rss for process in processes])
    assert writer.table()[partition]["rows"] == 0
    growth = [(after - before) / 2**20 for before, after in zip(*sizes, strict=True)]
    assert max(growth) < 8, f"MB that each process has grown: {growth}"


def test_only_the_end_consumer_clears_what_it_took(writer, scorer, trainer, partition):
    put = writer.put(partition, make_rows(["a"]))
    for client, rows in ((writer, put), (scorer, scorer.take(partition)), (trainer, put)):
        with pytest.raises(Refused, match="only 'trainer', the end consumer"):
            client.clear(rows)
    assert writer.read(put, ["uid"])["uid"] == ["a"]


def test_a_logger_that_acknowledges_late_loses_no_row(writer, scorer, logger, trainer, partition):
    uids = [f"u{i}" for i in range(6)]
    writer.put(partition, make_rows(uids))
    scorer.write(scorer.take(partition, at_least=6), scores(5, 6))
    with pytest.raises(QueueTimeout, match=r"missing ack\.logger in 6"):  # complete, but the logger has not seen them
        trainer.take(partition, timeout=0)
    seen = []
    while len(seen) < 6:
        logged = logger.take(partition, at_most=2)
        seen += logger.read(logged)["uid"]
        logger.ack(logged)
        trained = trainer.take(partition, at_least=2)
        assert list(trained) == list(logged)
        trainer.clear(trained)
    assert seen == uids
    assert writer.table()[partition]["rows"] == 0


def test_a_client_of_another_run_is_refused(queue, contract):
    with pytest.raises(WrongRun, match=r"this is 'local-.*/controller', but the message is for 'other/controller'"):
        QueueClient(queue.endpoints.for_run("other"), contract, "writer.0", deadline=5.0)


def test_a_client_with_another_contract_is_refused(queue, contract):
    from meshy.columns import Column, Contract, PartitionContract

    columns = dict(contract.partitions["rows3"].columns) | {"more": Column("more", "int64")}
    other = PartitionContract(
        "rows3", columns, contract.partitions["rows3"].consumers, contract.partitions["rows3"].writers
    )
    changed = Contract(dict(contract.partitions) | {"rows3": other}, contract.capacity)
    with pytest.raises(Refused, match="another contract; they differ in partitions rows3"):
        QueueClient(queue.endpoints, changed, "writer.0", deadline=5.0)


def test_a_reservation_whose_producer_died_lapses_and_its_late_put_is_refused(contract):
    endpoints = free_endpoints()
    controller, unit = Controller(endpoints, contract), FencedStorageUnit(endpoints, 0)
    dead = controller.reserve("rows0", ["dead"], "writer.0")
    ledger, index = controller.ledgers["rows0"], dead["indexes"][0]
    ledger.reserved[index] = ledger.reserved[index]._replace(since=time.monotonic() - RESERVATION_SECONDS - 1)
    controller.reserve("rows1", ["x"], "writer.0")  # another partition's put frees nothing here
    assert controller.table()["rows0"]["reserved"] == 1
    live = controller.reserve("rows0", ["live"], "writer.1")
    again = controller.reserve("rows0", ["dead"], "writer.1")  # its uid is free as well
    assert live["indexes"] == dead["indexes"]
    unit._put(live["indexes"], ["live"], {"uid": {"values": ["live"], "sizes": None}}, live["serial"])
    with pytest.raises(StaleRows, match="came too late"):
        unit._put(dead["indexes"], ["dead"], {"uid": {"values": ["dead"], "sizes": None}}, dead["serial"])
    with pytest.raises(StaleRows):
        controller.commit("rows0", dead["indexes"], ["dead"], ["uid"])
    assert unit._get(live["indexes"], ["live"], ["uid"])["columns"]["uid"]["values"] == ["live"]
    controller.commit("rows0", live["indexes"], ["live"], ["uid"])
    controller.release("rows0", again["indexes"], ["dead"])
    assert controller.table()["rows0"]["rows"] == 1 and controller.table()["rows0"]["reserved"] == 0
    unit.shutdown()


def test_transferqueue_s_own_unfenced_requests_are_refused(contract):
    endpoints = free_endpoints()
    controller = Controller(endpoints, contract)
    body = {"data_fields": ["uid"], "batch_size": 1, "partition_id": "rows0", "mode": "insert"}
    request = Message.create(MessageType.GET_META, "somebody", body, receiver_id=controller.address)
    answer = controller._handle_request(request, None)
    assert answer.body["error"][0] == "Refused"
    assert controller.table()["rows0"]["reserved"] == 0


def test_thousands_of_rows_pass_through_few_places(contract):
    """In one process, for speed: row indexes and books stay bounded, and every row comes out once."""
    endpoints = free_endpoints()
    controller = Controller(endpoints, contract)
    ledger = controller.ledgers["gate"]
    started = time.monotonic()
    highest = 0
    for step in range(3000):
        uids = [f"{step}.{i}" for i in range(3)]
        indexes = controller.reserve("gate", uids, "gatekeeper.0")["indexes"]
        highest = max(highest, *indexes)
        controller.commit("gate", indexes, uids, ["uid", "step"])
        for walker in ("walker.0", "walker.1"):
            controller.take("gate", walker, 3, None, walker)
        controller.commit("gate", indexes, uids, ["ack.walker.0", "ack.walker.1"])
        taken = controller.take("gate", "gatekeeper", 1, None, "gatekeeper.0")
        assert taken["uids"] == uids
        controller.mark_clearing_rows("gate", "gatekeeper", taken["indexes"], taken["uids"])
        controller.clear("gate", taken["indexes"], taken["uids"])
    assert highest < 6
    assert not ledger.uids and not ledger._live and not ledger._order and not any(ledger._holders.values())
    assert controller.partitions["gate"].production_status.shape[0] <= 6
    print(f"{3000 / (time.monotonic() - started):.0f} cycles/s")
