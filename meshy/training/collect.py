"""The leader gathers a batch: it takes rows as they become ready and reads what it must know of them meanwhile."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from meshy.columns import TRAIN
from meshy.queue.errors import QueueTimeout
from meshy.queue.rows import Rows
from meshy.queue.sync import QueueClient
from meshy.training.batch import LEADER_COLUMNS, Batch, batch_of

log = logging.getLogger("meshy.training")

TURN_SECONDS = 1.0  # of waiting for rows, then `meanwhile` has its turn
WATCHDOG_SECONDS = 60.0  # of waiting, then a line in the log says for what


@dataclass
class Collector:
    """meanwhile: called now and then while a batch is not complete; it must be quick unless something is wrong.
    waited: seconds without a row to take; busy: seconds spent on reading, both since the last `collect`."""

    queue: QueueClient
    batch_size: int
    meanwhile: Callable[[], None] = lambda: None
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
            rows = self._take(self.batch_size - self.have)
            taken = time.monotonic()
            self._parts.append((rows, self.queue.read(rows, LEADER_COLUMNS)))
            self.have += len(rows)
            self.waited += taken - started
            self.busy = time.monotonic() - taken  # only the last part delays the batch
        return batch_of(self._parts)

    def _take(self, at_most: int) -> Rows:
        said = time.monotonic()
        while True:
            self.meanwhile()
            try:
                return self.queue.take(TRAIN, at_least=1, at_most=at_most, timeout=TURN_SECONDS)
            except QueueTimeout as timeout:
                if time.monotonic() - said > WATCHDOG_SECONDS:
                    said = time.monotonic()
                    log.warning("%s", timeout)
