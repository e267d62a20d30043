"""The gates that pace rollout: one row a weight version, written when inference serves it."""

import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from meshy.columns import GEN_GATE
from meshy.queue.client import WATCHDOG_SECONDS
from meshy.queue.errors import QueueTimeout
from meshy.queue.sync import QueueClient
from meshy.training.config import LIVE_GATES

log = logging.getLogger("meshy.training")

TURN_SECONDS = 1.0  # of waiting for readers, then `meanwhile` has its turn


class Gates:
    """Writes gates without a gap (0, 1, 2 ... within one incarnation) and clears those that every reader has seen."""

    def __init__(self, queue: QueueClient, most: int = LIVE_GATES) -> None:
        self._queue, self._most = queue, most
        self.incarnation = uuid.uuid4().hex[:12]
        self.next_step = 0
        self.outstanding = 0

    def open(
        self, weight_version: int, samples_retired: int, *, stop: bool, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Rollout may go on with this version. stop: it is the last gate; what follows it is the final evaluation.
        Where as many are open as there may be, this waits until readers have acknowledged one. meanwhile: called
        then."""
        self._wait_for(self._most - 1, meanwhile)
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
        self._wait_for(0, meanwhile)

    def _wait_for(self, left: int, meanwhile: Callable[[], None]) -> None:
        said = time.monotonic()
        while self.outstanding > left:
            meanwhile()
            try:
                self._clear(TURN_SECONDS)
            except QueueTimeout as timeout:
                if time.monotonic() - said > WATCHDOG_SECONDS:
                    said = time.monotonic()
                    log.warning("%s", timeout)

    def _clear(self, timeout: float) -> None:
        if not self.outstanding:
            return
        rows = self._queue.take(GEN_GATE, at_least=1, at_most=self.outstanding, timeout=timeout)
        self._queue.clear(rows)
        self.outstanding -= len(rows)
