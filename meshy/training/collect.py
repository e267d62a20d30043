"""The leader gathers a batch: it takes rows as they become ready and reads what it must know of them meanwhile."""

import time
from dataclasses import dataclass, field
from typing import Any

from meshy.columns import TRAIN
from meshy.queue.rows import Rows
from meshy.queue.sync import QueueClient
from meshy.training.batch import LEADER_COLUMNS, Batch, batch_of


@dataclass
class Collector:
    """waited: seconds without a row to take; busy: seconds spent on reading, both since the last `collect`."""

    queue: QueueClient
    batch_size: int
    waited: float = 0.0
    busy: float = 0.0
    have: int = 0
    _parts: list[tuple[Rows, dict[str, Any]]] = field(default_factory=list)

    def collect(self) -> Batch:
        """Waits for `batch_size` rows that are complete for the trainer. What has come is read while the rest is
        generated, so that little is left to do when the last group arrives."""
        self._parts, self.have, self.waited, self.busy = [], 0, 0.0, 0.0
        while self.have < self.batch_size:
            started = time.monotonic()
            rows = self.queue.take(TRAIN, at_least=1, at_most=self.batch_size - self.have)
            taken = time.monotonic()
            self._parts.append((rows, self.queue.read(rows, LEADER_COLUMNS)))
            self.have += len(rows)
            self.waited += taken - started
            self.busy = time.monotonic() - taken  # only the last part delays the batch
        return batch_of(self._parts)
