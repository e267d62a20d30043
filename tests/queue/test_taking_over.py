"""A process that is killed with rows in its hands: its next life, or another replica, gets them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshy.columns import UID, Column, Consumes, Contract, Produces, ack_column
from meshy.contract import Declaration, derive_contract
from meshy.queue import client as client_module
from meshy.queue.client import AsyncQueueClient
from meshy.queue.controller import Controller
from meshy.queue.errors import QueueTimeout, Refused
from meshy.queue.ledger import Ledger
from meshy.queue.local import free_endpoints
from meshy.queue.transferqueue import Message, MessageType

from .conftest import CAPACITY, make_rows, scores


@pytest.fixture
def life(queue, contract) -> Callable[..., AsyncQueueClient]:
    """A client of a process that has a life, and perhaps former ones."""

    def start(caller: str, life: str, *former: str) -> AsyncQueueClient:
        return AsyncQueueClient(queue.endpoints, contract, caller, life=life, former=former)

    return start


def play(story: Awaitable[None]) -> None:
    async def told() -> None:
        async with asyncio.timeout(30):
            await story

    asyncio.run(told())


def test_the_next_life_takes_what_the_dead_one_had_in_its_hands(life, writer, trainer, logger, partition):
    async def story() -> None:
        async with life("scorer.0", "one") as first, life("scorer.1", "other") as other:
            held = await first.take(partition, at_least=3)
            await first.write(held.select([1]), scores(6, 1))  # the rest it had not written when it died
            with pytest.raises(QueueTimeout):
                await other.take(partition, timeout=0)
            async with life("scorer.0", "three", "one", "two") as third:
                again = await third.take(partition, at_least=2, timeout=5)
                assert list(again) == ["a", "c"]
                await third.write(again, {"score": [[1.0] * 5, [1.0] * 7]})
            with pytest.raises(Refused, match="one was declared dead"):
                await first.write(held.select([0, 2]), {"score": [[2.0] * 5, [2.0] * 7]})

    writer.put(partition, make_rows(["a", "b", "c"]))
    logger.ack(logger.take(partition, at_least=3))
    play(story())
    taken = trainer.take(partition, at_least=3)
    read = {uid: score.tolist() for uid, score in zip(taken, trainer.read(taken)["score"], strict=True)}
    assert read == {"a": [1.0] * 5, "b": [0.0] * 6, "c": [1.0] * 7}


def test_a_living_replica_is_woken_for_the_rows_of_a_dead_one(monkeypatch, life, writer, partition):
    monkeypatch.setattr(client_module, "POLL_SECONDS", 3600.0)

    async def story() -> None:
        async with life("scorer.0", "first") as first, life("scorer.1", "other") as other:
            await first.take(partition, at_least=2)
            waiter = asyncio.create_task(other.take(partition, at_least=2))
            await asyncio.sleep(0.2)
            assert not waiter.done()
            async with life("scorer.0", "second", "first"):
                assert list(await waiter) == ["a", "b"]

    writer.put(partition, make_rows(["a", "b"]))
    play(story())


def test_the_other_rank_of_a_replica_keeps_its_rows(life, writer, partition):
    """Ranks share the caller's name and have lives of their own; a row belongs to the process that took it."""

    async def story() -> None:
        async with life("scorer.0", "rank 0") as lead, life("scorer.0", "rank 1") as rank:
            held = await lead.take(partition)
            await lead.banish("scorer.0", "rank 1")
            with pytest.raises(QueueTimeout):
                await lead.take(partition, timeout=0)
            with pytest.raises(Refused):
                await rank.table()
            await lead.ack(held)

    writer.put(partition, make_rows(["a"]))
    play(story())


def test_the_uids_that_a_dead_producer_had_reserved_are_free(life, writer, partition):
    async def story() -> None:
        async with life("writer.1", "first") as first:
            wire = await first._wired()
            reserved = await wire.controller("reserve", partition=partition, uids=["a", "b"])
            packed = first._pack(partition, make_rows(["a", "b"]))
            await wire.put(reserved["indexes"], ["a", "b"], packed, reserved["serial"])
            async with life("writer.1", "second", "first") as second:
                rows = await second.put(partition, make_rows(["a", "b"], length=2))
                with pytest.raises(Refused):
                    await wire.put(reserved["indexes"], ["a", "b"], packed, reserved["serial"])
                assert [len(row) for row in (await second.read(rows, ["tokens"]))["tokens"]] == [2, 3]

    play(story())
    assert writer.table()[partition]["rows"] == 2 and writer.table()[partition]["reserved"] == 0


# Any order of events --------------------------------------------------------------------------------------------------

READERS = {"scorer": None, "math": "route.math"}
"""Groups of two replicas that acknowledge, and the column of the rows that are for them."""


def story_contract() -> Contract:
    score, mark = Column("score", "float32"), Column("mark", "float32")
    contract, faults = derive_contract(
        [
            Declaration(
                "writer", 1, (), (Produces("p", (UID, Column("route.math", "bool")), creates=True),), {"p": CAPACITY}
            ),
            Declaration("scorer", 2, (Consumes("p", ("uid",)),), (Produces("p", (score,)),)),
            Declaration("math", 2, (Consumes("p", ("uid",), route="math"),), (Produces("p", (mark,), route="math"),)),
            Declaration("trainer", 1, (Consumes("p", ("uid", "score", "mark"), end=True),), ()),
        ]
    )
    assert not faults, faults
    return contract


@pytest.fixture(scope="module")
def controller() -> Iterator[Controller]:
    yield Controller(free_endpoints(), story_contract())


@dataclass
class Replica:
    group: str
    name: str
    lives: int = 1
    connected: bool = True
    held: list[dict[str, Any]] = field(default_factory=list)

    @property
    def sender(self) -> str:
        return f"{self.name}/{self.lives}"


class World:
    """Replicas whose requests may come late, after they have died; the controller is the real one."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        controller._banished.clear()
        controller.index_manager.release_partition("p")
        status = type(controller.partitions["p"])(partition_id="p")
        controller.partitions["p"] = status
        controller.ledgers["p"] = Ledger(controller.contract.partition("p"), CAPACITY, status)
        self.replicas = [Replica(group, f"{group}.{i}") for group in READERS for i in range(2)]
        self.on_the_way: list[Callable[[], None]] = []
        self.route: dict[str, bool] = {}
        self.acks: dict[tuple[str, str], int] = {}
        self.trained: list[str] = []
        self.names = (f"u{i}" for i in itertools.count())

    def ask(self, sender: str, operation: str, /, **body: Any) -> dict[str, Any]:
        message = Message.create(
            MessageType.GET_META, sender, {"operation": operation, **body}, receiver_id=self.controller.address
        )
        return self.controller._handle_request(message, None).body

    def put(self, routed: bool) -> None:
        uid = next(self.names)
        reserved = self.ask("writer.0", "reserve", partition="p", uids=[uid])
        if "error" in reserved:
            assert reserved["error"][0] == "QueueFull"
            return
        columns = ["uid", *(["route.math"] if routed else [])]
        self.ask("writer.0", "commit", partition="p", indexes=reserved["indexes"], uids=[uid], columns=columns)
        self.route[uid] = routed

    def connect(self, replica: Replica) -> None:
        if not replica.connected:
            for life in range(1, replica.lives):
                assert "error" not in self.ask("anybody", "banish", sender=f"{replica.name}/{life}")
            replica.connected = True

    def take(self, replica: Replica, at_most: int) -> None:
        self.connect(replica)
        sender, life = replica.sender, replica.lives
        wanted = {"partition": "p", "consumer": replica.group, "at_least": 1, "at_most": at_most}

        def arrive() -> None:
            taken = self.ask(sender, "take", **wanted)
            if taken.get("uids") and replica.lives == life:
                replica.held.append(taken)

        self.on_the_way.append(arrive)

    def write(self, replica: Replica) -> bool:
        if not replica.held:
            return False
        sender, rows = replica.sender, replica.held.pop(0)
        ack = ack_column(replica.group)
        columns = ["score" if replica.group == "scorer" else "mark", ack]

        def arrive() -> None:
            which = {"indexes": rows["indexes"], "uids": rows["uids"]}
            answer = self.ask(sender, "commit", partition="p", columns=columns, **which)
            if "error" in answer:
                assert answer["error"][0] == "Refused"
                return
            for uid in rows["uids"]:
                self.acks[uid, replica.group] = self.acks.get((uid, replica.group), 0) + 1

        self.on_the_way.append(arrive)
        return True

    def arrive(self, which: int) -> None:
        self.on_the_way.pop(which)()

    def kill(self, replica: Replica) -> None:
        """What it had sent may arrive all the same, until its next life connects."""
        replica.lives += 1
        replica.connected = False
        replica.held.clear()

    def train(self) -> None:
        taken = self.ask("trainer.0", "take", partition="p", consumer="trainer", at_least=1, at_most=None)
        for uid in taken["uids"]:
            assert self.acks[uid, "scorer"] == 1
            assert self.acks.get((uid, "math"), 0) == int(self.route[uid])
        self.trained += taken["uids"]
        if taken["uids"]:
            which = {"partition": "p", "indexes": taken["indexes"], "uids": taken["uids"]}
            assert "error" not in self.ask("trainer.0", "mark_clearing_rows", consumer="trainer", **which)
            assert "error" not in self.ask("trainer.0", "clear", **which)

    def finish(self) -> None:
        """Everything arrives, and whoever lives goes on until there is nothing left to do."""
        for _ in range(2):
            for replica in self.replicas:
                self.take(replica, CAPACITY)
            self.arrive_all()
            for replica in self.replicas:
                while replica.held:
                    self.write(replica)
            self.arrive_all()
        self.train()

    def arrive_all(self) -> None:
        while self.on_the_way:
            self.arrive(0)


EVENTS = st.one_of(
    st.tuples(st.just("put"), st.booleans()),
    st.tuples(st.sampled_from(["take", "write"]), st.integers(0, 3), st.booleans()),
    st.tuples(st.sampled_from(["kill", "connect"]), st.integers(0, 3)),
    st.tuples(st.just("arrive"), st.integers(0, 9)),
    st.tuples(st.just("train")),
)


@given(st.lists(EVENTS, min_size=30, max_size=90))
@settings(max_examples=150, deadline=None)
def test_every_row_is_acknowledged_once_by_each_reader_and_trained_once(controller, events):
    world = World(controller)
    for _ in range(2):
        world.put(True)
    for event in events:
        match event:
            case ("put", bool(routed)):
                world.put(routed)
            case ("take", i, late):
                world.take(world.replicas[i], 2)
                if not late:
                    world.arrive(-1)
            case ("write", i, late):
                if world.write(world.replicas[i]) and not late:
                    world.arrive(-1)
            case ("kill", i):
                world.kill(world.replicas[i])
            case ("connect", i):
                world.connect(world.replicas[i])
            case ("arrive", i) if world.on_the_way:
                world.arrive(i % len(world.on_the_way))
            case ("train",):
                world.train()
    world.finish()
    assert sorted(world.trained) == sorted(world.route)
    assert world.acks == {
        (uid, group): 1 for uid, routed in world.route.items() for group in READERS if routed or group == "scorer"
    }
    ledger = controller.ledgers["p"]
    assert not ledger.uids and not ledger.reserved and not any(ledger._holders.values())
