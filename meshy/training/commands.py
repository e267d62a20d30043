"""What the trainer's leader tells all ranks to do. Small: rows travel as handles, each rank reads its own."""

from dataclasses import dataclass

from meshy.queue.rows import Rows
from meshy.training.plan import MiniBatchPlan


@dataclass(frozen=True)
class TrainBatch:
    """Train `rows` by the plans, once for each epoch.

    rewards, advantages: of every row, in order. learning_rates: of each optimiser step. version: of the batch; the
    weights that rollout was given last.
    """

    rows: Rows
    rewards: tuple[float, ...]
    advantages: tuple[float, ...]
    plans: tuple[MiniBatchPlan, ...]
    epochs: int
    learning_rates: tuple[float, ...]
    version: int


@dataclass(frozen=True)
class WriteWeights:
    """Write the weights as they are now into the run folder, as this version."""

    version: int


@dataclass(frozen=True)
class StreamWeights:
    """Give the weights as they are now to these replicas, as this version."""

    version: int
    urls: tuple[str, ...]


@dataclass(frozen=True)
class ShelveWeights:
    """Write the weights as they are now, as this version, where replicas find them that load them in a later turn."""

    version: int


@dataclass(frozen=True)
class ExpectWeights:
    """Compute the checksums that these replicas should report of the weights as they are now."""

    urls: tuple[str, ...]


GiveWeights = WriteWeights | StreamWeights | ShelveWeights | ExpectWeights
