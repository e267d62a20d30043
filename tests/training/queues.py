"""A real queue with what a trainer meets there: rollout that writes rows and reads gates, and a role that scores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from meshy.columns import (
    GATE_COLUMNS,
    GEN_GATE,
    TOKENS,
    TRAIN,
    TRAIN_COLUMNS,
    UID,
    Column,
    Consumes,
    Contract,
    Produces,
)
from meshy.contract import Declaration, derive_contract
from meshy.queue.errors import QueueTimeout
from meshy.queue.local import LocalQueue, local_queue
from meshy.queue.rows import Rows
from meshy.queue.sync import QueueClient
from meshy.training.config import LIVE_GATES
from tests.training.arrivals import group_columns

BONUS = Column("bonus", "float32")


def contract_of() -> Contract:
    """The trainer waits for a column of the scorer's; at most LIVE_GATES gates are alive."""
    contract, faults = derive_contract(
        [
            Declaration(
                "rollout",
                1,
                (Consumes(GEN_GATE, GATE_COLUMNS, per_replica=True),),
                (Produces(TRAIN, TRAIN_COLUMNS, creates=True),),
                {TRAIN: 4096},
            ),
            Declaration("scorer", 1, (Consumes(TRAIN, (UID, TOKENS)),), (Produces(TRAIN, (BONUS,)),)),
            Declaration(
                "trainer",
                1,
                (Consumes(TRAIN, (*TRAIN_COLUMNS, "bonus"), end=True), Consumes(GEN_GATE, GATE_COLUMNS, end=True)),
                (Produces(GEN_GATE, GATE_COLUMNS, creates=True),),
                {GEN_GATE: LIVE_GATES},
            ),
        ]
    )
    assert not faults
    return contract


@dataclass
class TrainQueue:
    """Positions are never used twice, so tests can share it."""

    server: LocalQueue
    contract: Contract
    deadline: float = 20.0
    positions: Iterator[int] = field(default_factory=itertools.count)
    made: list[QueueClient] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rollout, self.scorer, self.trainer = (self.client(name) for name in ("rollout", "scorer", "trainer"))

    def client(self, group: str) -> QueueClient:
        client = QueueClient(self.server.endpoints, self.contract, f"{group}.0", self.deadline)
        self.made.append(client)
        return client

    def put(self, size: int = 2, *, scored: bool = True, **changes: Any) -> tuple[str, ...]:
        """A group; its uids."""
        rows = self.rollout.put(TRAIN, group_columns(next(self.positions), size, **changes))
        if scored:
            self.score(self.unscored(size))
        return rows.uids

    def unscored(self, count: int) -> Rows:
        return self.scorer.take(TRAIN, at_least=count, at_most=count, timeout=self.deadline)

    def score(self, rows: Rows) -> None:
        self.scorer.write(rows, {"bonus": [0.5] * len(rows)})

    def take(self, count: int) -> Rows:
        return self.trainer.take(TRAIN, at_least=count, at_most=count, timeout=self.deadline)

    def waiting(self) -> int:
        """Rows that the trainer could take."""
        return self.trainer.table()[TRAIN]["consumers"]["trainer"]["ready"]

    def empty(self) -> None:
        """What a test has left behind."""
        with suppress(QueueTimeout):
            self.score(self.scorer.take(TRAIN, timeout=0))
        with suppress(QueueTimeout):
            self.trainer.clear(self.trainer.take(TRAIN, timeout=0))

    def close(self) -> None:
        for client in self.made:
            client.close()


@contextmanager
def train_queue(deadline: float = 20.0) -> Iterator[TrainQueue]:
    contract = contract_of()
    with local_queue(contract) as server:
        queue = TrainQueue(server, contract, deadline)
        try:
            yield queue
        finally:
            queue.close()
