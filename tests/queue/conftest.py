"""One real queue for the room's tests; every test works in a partition of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from meshy.columns import Column, Consumes, Contract, Produces, route_column
from meshy.contract import Declaration, derive_contract
from meshy.queue.local import LocalQueue, local_queue
from meshy.queue.sync import QueueClient

COLUMNS = (
    Column("uid", "str"),
    Column("tokens", "int64", "jagged"),
    Column("logprobs", "float32", "jagged"),
    Column("mask", "bool", "jagged"),
    Column("versions", "int32", "jagged"),
    Column("topk", "float32", "jagged2d"),
    Column("reward", "float32"),
    Column("seconds", "float64"),
    Column("truncated", "bool"),
    Column("half", "bfloat16"),  # type: ignore[arg-type]
    Column("info", "object", "object"),
)
SCORE = Column("score", "float32", "jagged")
PARTITIONS = [f"rows{i}" for i in range(90)]
MIXED = [f"mixed{i}" for i in range(20)]
"""Partitions with rows of two routes, and of none."""
ROUTES = ("math", "code")
CAPACITY = 64


def declarations() -> list[Declaration]:
    """A writer, a scorer that adds a column, a logger that only acknowledges, and a trainer that clears. In some
    partitions a teacher for each route stands in the scorer's place."""

    def each(make: Callable[[str], Any], partitions: list[str] = PARTITIONS) -> tuple[Any, ...]:
        return tuple(make(name) for name in partitions)

    routes = tuple(Column(route_column(route), "bool") for route in ROUTES)
    return [
        Declaration(
            "writer",
            2,
            (),
            each(lambda p: Produces(p, COLUMNS, creates=True))
            + each(lambda p: Produces(p, (*COLUMNS, *routes), creates=True), MIXED),
            dict.fromkeys((*PARTITIONS, *MIXED), CAPACITY),
        ),
        *(
            Declaration(
                route,
                2,
                each(lambda p, route=route: Consumes(p, ("uid", "tokens"), route=route), MIXED),
                each(lambda p, route=route: Produces(p, (SCORE,), route=route), MIXED),
            )
            for route in ROUTES
        ),
        Declaration("scorer", 2, each(lambda p: Consumes(p, ("uid", "tokens"))), each(lambda p: Produces(p, (SCORE,)))),
        Declaration("logger", 1, each(lambda p: Consumes(p, ("uid", "reward")), PARTITIONS + MIXED), ()),
        Declaration(
            "trainer",
            1,
            each(lambda p: Consumes(p, ("uid", "tokens", "reward", "score"), end=True), PARTITIONS + MIXED),
            (),
        ),
        Declaration(
            "gatekeeper",
            1,
            (Consumes("gate", ("uid", "step"), end=True),),
            (Produces("gate", (Column("uid", "str"), Column("step", "int64")), creates=True),),
        ),
        Declaration("walker", 2, (Consumes("gate", ("uid", "step"), per_replica=True),), ()),
    ]


@pytest.fixture(scope="session")
def contract() -> Contract:
    contract, faults = derive_contract(declarations())
    assert not faults
    return contract


@pytest.fixture(scope="session")
def queue(contract: Contract) -> Iterator[LocalQueue]:
    """Two storage units, so that every test also tests how rows are spread."""
    with local_queue(contract, storage_units=2) as queue:
        yield queue
        server = queue.processes["controller"]
        server.terminate()
        assert server.wait(10) == 0, "SIGTERM ends the queue cleanly"


@pytest.fixture(scope="session")
def clients(queue: LocalQueue, contract: Contract) -> Iterator[dict[str, QueueClient]]:
    callers = [
        "writer.0",
        "writer.1",
        "scorer.0",
        "scorer.1",
        "logger.0",
        "trainer.0",
        "gatekeeper.0",
        "walker.0",
        "walker.1",
        "math.0",
        "math.1",
        "code.0",
    ]
    made = {caller: QueueClient(queue.endpoints, contract, caller, deadline=20.0) for caller in callers}
    yield made
    for client in made.values():
        client.close()


@pytest.fixture(scope="session")
def _names() -> Iterator[str]:
    return itertools.chain(PARTITIONS)


@pytest.fixture
def partition(_names: Iterator[str]) -> str:
    return next(_names)


@pytest.fixture(scope="session")
def _mixed_names() -> Iterator[str]:
    return itertools.chain(MIXED)


@pytest.fixture
def mixed(_mixed_names: Iterator[str]) -> str:
    return next(_mixed_names)


@pytest.fixture
def writer(clients: dict[str, QueueClient]) -> QueueClient:
    return clients["writer.0"]


@pytest.fixture
def scorer(clients: dict[str, QueueClient]) -> QueueClient:
    return clients["scorer.0"]


@pytest.fixture
def logger(clients: dict[str, QueueClient]) -> QueueClient:
    return clients["logger.0"]


@pytest.fixture
def trainer(clients: dict[str, QueueClient]) -> QueueClient:
    return clients["trainer.0"]


def make_rows(uids: list[str], length: int = 5, route: str | None = None) -> dict[str, Any]:
    """Values of every column; row i has `length + i` tokens. route: of all rows."""
    lengths = [length + i for i in range(len(uids))]
    return {
        "uid": uids,
        "tokens": [torch.arange(n) + 1000 * i for i, n in enumerate(lengths)],
        "logprobs": [torch.rand(n) for n in lengths],
        "mask": [torch.rand(n) < 0.5 for n in lengths],
        "versions": [torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)],
        "topk": [torch.rand(n, 3) for n in lengths],
        "reward": [0.25 * i for i in range(len(uids))],
        "seconds": [1e9 + i for i in range(len(uids))],
        "truncated": [i % 2 == 0 for i in range(len(uids))],
        "half": torch.arange(len(uids)).bfloat16(),
        "info": [{"turn": (i, None), "set": {i}} for i in range(len(uids))],
        **({} if route is None else {route_column(route): [True] * len(uids)}),
    }


def scores(length: int, rows: int) -> dict[str, Any]:
    return {"score": [torch.full((length + i,), float(i)) for i in range(rows)]}
