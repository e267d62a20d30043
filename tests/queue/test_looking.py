"""Looking at rows without taking them, clearing under a condition, and callers that are dead."""

from __future__ import annotations

import asyncio

import pytest

from meshy.queue.client import AsyncQueueClient
from meshy.queue.errors import Refused, UnknownName

from .conftest import make_rows, scores


def run(work, queue, contract, caller: str, life: str = ""):
    async def all_of_it():
        async with AsyncQueueClient(queue.endpoints, contract, caller, life=life) as client:
            return await work(client)

    return asyncio.run(all_of_it())


def test_a_look_shows_all_rows_and_what_they_have(queue, contract, writer, scorer, partition):
    writer.put(partition, make_rows(["a", "b"]))
    scorer.write(scorer.take(partition, at_least=2).select([1]), scores(6, 1))
    seen = run(lambda client: client.look(partition), queue, contract, "logger.0")
    assert [tuple(rows) for rows, _ in seen] == [("a",), ("b",)]
    assert [("score" in columns, "ack.scorer" in columns) for _, columns in seen] == [(False, False), (True, True)]
    with pytest.raises(UnknownName):
        run(lambda client: client.look("rows?"), queue, contract, "logger.0")


def test_rows_are_cleared_unless_they_have_got_a_column(queue, contract, clients):
    gatekeeper = clients["gatekeeper.0"]
    for name in ("free", "held"):
        gatekeeper.put("gate", {"uid": [name], "step": [1]})

    async def clear(client):
        rows = await client.take("gate", at_least=2)
        with pytest.raises(Refused, match="has got column 'step' meanwhile; none is cleared"):
            await client.clear(rows, unless="step")
        assert len(await client.look("gate")) == 2
        await client.clear(rows)

    with pytest.raises(Refused, match="it has taken"):
        run(clear_untaken, queue, contract, "gatekeeper.0")
    acknowledge(queue, contract)
    run(clear, queue, contract, "gatekeeper.0")


async def clear_untaken(client):
    seen = [rows for rows, _ in await client.look("gate")]
    consumer = client.rights.consumer("gate")
    await client.clear(type(seen[0])("gate", seen[0].uids, seen[0].indexes, consumer))


def acknowledge(queue, contract) -> None:
    async def ack(client):
        await client.ack(await client.take("gate", at_least=2))

    for replica in (0, 1):
        run(ack, queue, contract, f"walker.{replica}")


def test_nothing_is_done_for_one_that_is_banished(queue, contract, writer, partition):
    async def banish(client):
        await client.banish("writer.1", "first life")

    async def put(client, uid):
        return await client.put(partition, make_rows([uid]))

    run(lambda client: put(client, "a"), queue, contract, "writer.1", "first life")
    run(banish, queue, contract, "trainer.0")
    with pytest.raises(Refused, match="first life was declared dead"):
        run(lambda client: put(client, "b"), queue, contract, "writer.1", "first life")
    run(lambda client: put(client, "c"), queue, contract, "writer.1", "second life")
    writer.put(partition, make_rows(["d"]))
    seen = run(lambda client: client.look(partition), queue, contract, "trainer.0")
    assert [tuple(rows) for rows, _ in seen] == [("a",), ("c",), ("d",)]


def test_no_storage_unit_does_what_a_dead_client_had_sent(queue, contract, clients):
    """Not even a write that comes late: its sender died before it was recorded, and somebody has stood in since."""
    rows = clients["gatekeeper.0"].put("gate", {"uid": ["x", "y"], "step": [1, 1]})

    async def talk():
        client = AsyncQueueClient(queue.endpoints, contract, "gatekeeper.0", life="first life")
        async with client, AsyncQueueClient(queue.endpoints, contract, "trainer.0") as keeper:
            wire = await client._wired()
            await keeper.banish("gatekeeper.0", "first life")
            for i in range(2):
                with pytest.raises(Refused, match="first life was declared dead"):
                    await wire.put(rows.indexes[i : i + 1], rows.uids[i : i + 1], client._pack("gate", {"step": [2]}))

    asyncio.run(talk())
    assert clients["gatekeeper.0"].read(rows, ["step"])["step"].tolist() == [1, 1]
    acknowledge(queue, contract)
    clients["gatekeeper.0"].clear(clients["gatekeeper.0"].take("gate", at_least=2))
