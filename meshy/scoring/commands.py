"""What the leader of a scoring replica tells all its ranks to do. Rows travel as handles; each rank reads its own."""

from dataclasses import dataclass

from meshy.queue.rows import Rows
from meshy.titan.sharing import MicroBatchPlan


@dataclass(frozen=True)
class ScoreRows:
    """Score the rows in these micro-batches, one list a rank, and write what comes of it."""

    rows: Rows
    micro_batches: tuple[tuple[MicroBatchPlan, ...], ...]


@dataclass(frozen=True)
class Settle:
    """Return when everything that was scored is written."""


@dataclass(frozen=True)
class CriticStep:
    """One optimiser step of a critic: micro-batches of each rank, of numbers into the batch; and the denominators, over
    all ranks (see algorithms.interface.GlobalCounts)."""

    micro_batches: tuple[tuple[MicroBatchPlan, ...], ...]
    tokens: int
    sequences: int
    learning_rate: float


@dataclass(frozen=True)
class LearnBatch:
    """Learn from a batch that was scored. uids: of its rows, in the order of the data. ranks: who has scored each, and
    keeps it. rewards: of each."""

    uids: tuple[str, ...]
    ranks: tuple[int, ...]
    rewards: tuple[float, ...]
    steps: tuple[CriticStep, ...]
