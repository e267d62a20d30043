"""The gates that pace rollout: one row a weight version, written when inference serves it."""

import logging
import uuid
from collections.abc import Callable
from typing import Any

from meshy.columns import GEN_GATE
from meshy.queue.errors import QueueTimeout
from meshy.queue.sync import QueueClient

log = logging.getLogger("meshy.training")

TURN_SECONDS = 1.0  # of waiting for readers, then `meanwhile` has its turn


class Gates:
    """Writes gates without a gap (0, 1, 2 ... within one incarnation) and clears those that every reader has seen."""

    def __init__(self, queue: QueueClient) -> None:
        self._queue = queue
        self.incarnation = uuid.uuid4().hex[:12]
        self.next_step = 0
        self.outstanding = 0

    def open(self, *, weight_version: int, samples_retired: int, stop: bool) -> None:
        """Rollout may go on with this version. stop: it is the last gate; what follows it is the final evaluation."""
        row: dict[str, Any] = {
            "uid": f"gate-{self.incarnation}-{self.next_step}",
            "incarnation": self.incarnation,
            "gate_step": self.next_step,
            "weight_version": weight_version,
            "samples_retired": samples_retired,
            "stop": stop,
        }
        self._queue.put(GEN_GATE, {name: [value] for name, value in row.items()})
        self.next_step += 1
        self.outstanding += 1

    def clear_acknowledged(self) -> None:
        """Clears what every reader has acknowledged by now; waits for nothing."""
        try:
            self._clear(timeout=0)
        except QueueTimeout:
            return  # nobody has acknowledged one since

    def clear_all(self, meanwhile: Callable[[], None]) -> None:
        """Waits until every gate is acknowledged, and clears them. meanwhile: called now and then."""
        while self.outstanding:
            meanwhile()
            try:
                self._clear(TURN_SECONDS)
            except QueueTimeout as timeout:
                log.debug("%s", timeout)

    def _clear(self, timeout: float) -> None:
        if not self.outstanding:
            return
        rows = self._queue.take(GEN_GATE, at_least=1, at_most=self.outstanding, timeout=timeout)
        self._queue.clear(rows)
        self.outstanding -= len(rows)
