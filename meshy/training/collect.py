"""The leader gathers what is trained next. A thread takes rows as they become ready, and has their ranks fetch them,
whatever the trainer is doing meanwhile; so little is left to do when the last group of a batch arrives."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshy.columns import TRAIN
from meshy.learning.rewards import RewardRule
from meshy.queue.client import WATCHDOG_SECONDS
from meshy.queue.errors import QueueTimeout
from meshy.queue.rows import Rows
from meshy.queue.sync import QueueClient
from meshy.training.batch import Batch, batch_of
from meshy.training.further import Further
from meshy.training.inbox import LEADER_COLUMNS, Group, Inbox

log = logging.getLogger("meshy.training")

NOTHING, PLAIN = Further(), RewardRule()
TURN_SECONDS = 1.0  # of waiting for rows, then `meanwhile` has its turn


class Collector:
    """share: told rows as they come, and their lengths; says which rank is to train each. meanwhile: called by
    `collect` now and then while rows are missing; it must be quick unless something is wrong. dropped: told by
    `collect` of groups that are too old. further: columns to read beside LEADER_COLUMNS. rewards: see `batch_of`. Rows
    are taken and shared out during both of these too. waited: seconds without the rows that were asked for, in the last
    `collect`."""

    def __init__(
        self,
        queue: QueueClient,
        *,
        share: Callable[[Rows, list[int]], list[int]] = lambda rows, lengths: [0] * len(rows),
        meanwhile: Callable[[], None] = lambda: None,
        dropped: Callable[[list[Group]], None] = lambda groups: None,
        further: Further = NOTHING,
        rewards: RewardRule = PLAIN,
    ) -> None:
        self._queue, self._share, self._meanwhile, self._dropped = queue, share, meanwhile, dropped
        self._columns = tuple(dict.fromkeys((*LEADER_COLUMNS, *further.numbers)))
        self._optional = tuple(further.optional.intersection(self._columns))
        self._rewards = rewards
        self._inbox = Inbox()
        self._changed = threading.Condition()
        self._arrivals = 0
        self._closing = False
        self._failure: BaseException | None = None
        self._missing = "nothing has been looked for yet"
        self.waited = 0.0
        self._thread = threading.Thread(target=self._gather, name="collector", daemon=True)
        self._thread.start()

    @property
    def have(self) -> int:
        """Samples that have come and are not trained yet."""
        with self._changed:
            return self._inbox.samples

    def collect(self, version: int, samples: int, max_staleness: int | None = None) -> Batch:
        """Waits for so many samples, whole groups, that may be trained at this version. Groups that belong to no batch
        and hold a token more than `max_staleness` versions old are dropped."""
        began = said = turned = time.monotonic()
        while True:
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                seen = self._arrivals
                old = [] if max_staleness is None else self._inbox.drop_older(version - max_staleness)
                groups = self._inbox.take(version, samples)
                have = self._inbox.have(version)
            if old:
                self._dropped(old)
            if groups is not None:
                self.waited = time.monotonic() - began
                return batch_of(groups, self._rewards)
            now = time.monotonic()
            if now - said > WATCHDOG_SECONDS:
                said = now
                seconds = now - began
                log.warning(
                    "batch %d has %d of %d samples after %.0f s: %s", version, have, samples, seconds, self._missing
                )
            if now - turned > TURN_SECONDS:
                self._meanwhile()
                turned = time.monotonic()
            self._wait_for_more(seen)

    def _wait_for_more(self, seen: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._arrivals > seen or self._failure is not None, TURN_SECONDS)

    def close(self) -> None:
        self._closing = True
        self._thread.join(2 * TURN_SECONDS)

    # The thread -------------------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        try:
            while not self._closing:
                try:
                    rows = self._queue.take(TRAIN, timeout=TURN_SECONDS)
                except QueueTimeout as timeout:
                    self._missing = str(timeout)
                    continue
                data = self._queue.read(rows, self._columns, optional=self._optional)
                columns = {name: plain(values) for name, values in data.items()}
                ranks = self._share(rows, columns["n_tokens"])
                with self._changed:
                    self._inbox.add(rows, columns, ranks)
                    self._arrivals += len(rows)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - whatever it is, `collect` raises it
            with self._changed:
                self._failure = None if self._closing else error
                self._changed.notify_all()


def plain(values: Any) -> list[Any]:
    if isinstance(values, Tensor):
        return values.tolist()
    return [value.item() if isinstance(value, Tensor) else value for value in values]
