"""A rank's own rows, read as soon as it is known that it will work on them, while it is busy with others."""

import logging
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshy.queue.client import WATCHDOG_SECONDS
from meshy.queue.errors import StaleRows
from meshy.queue.rows import Rows
from meshy.queue.sync import QueueClient

log = logging.getLogger("meshy.spmd")


@dataclass(frozen=True)
class FetchRows:
    """Aside: begin to read the rows that are this rank's. ranks: of each row."""

    rows: Rows
    ranks: tuple[int, ...]

    def of(self, rank: int) -> Rows:
        return self.rows.select([i for i, owner in enumerate(self.ranks) if owner == rank])


@dataclass(frozen=True)
class ForgetRows:
    """Aside: nobody will work on these."""

    uids: tuple[str, ...]


class Fetcher:
    """columns: those that are read. optional: of these, the ones that a row may lack; it has None there. `want`,
    `forget` and `close` may be called from any thread, `get` from one."""

    def __init__(self, client: QueueClient, columns: Sequence[str], optional: Sequence[str] = ()) -> None:
        self._client, self._columns, self._optional = client, tuple(columns), tuple(optional)
        self._orders: queue.SimpleQueue[Rows | None] = queue.SimpleQueue()
        self._there: dict[str, dict[str, Any]] = {}  # by uid
        self._coming: set[str] = set()  # uids that somebody reads or will
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._fetch, name="fetcher", daemon=True)
        self._thread.start()

    @property
    def held(self) -> int:
        """Rows that are wanted, read or not."""
        with self._changed:
            return len(self._there) + len(self._coming)

    def want(self, rows: Rows) -> None:
        """Begin to read these."""
        with self._changed:
            self._coming.update(rows.uids)
        self._orders.put(rows)

    def get(self, rows: Rows) -> Mapping[str, list[Any]]:
        """The columns of these rows, in their order; what was not wanted before is read now. Raises StaleRows for a row
        that is cleared, and what else reading has raised."""
        while True:
            with self._changed:
                missing = [i for i, uid in enumerate(rows.uids) if uid not in self._there]
                if not missing:
                    return {name: [self._there[uid][name] for uid in rows.uids] for name in self._columns}
                if self._failure is not None:
                    raise self._failure
                late = [i for i in missing if rows.uids[i] not in self._coming]
                self._coming.update(rows.uids[i] for i in late)
                if not late and not self._changed.wait(WATCHDOG_SECONDS):
                    log.warning("%d of %d rows have not been read yet", len(missing), len(rows))
            if late:
                self._read_now(rows.select(late))

    def obey(self, order: FetchRows | ForgetRows, rank: int) -> None:
        """An order that the leader told aside, on this rank."""
        match order:
            case FetchRows():
                if mine := order.of(rank):
                    self.want(mine)
            case ForgetRows(uids):
                self.forget(uids)

    def forget(self, uids: Iterable[str]) -> None:
        """They are done, or nobody will work on them."""
        with self._changed:
            for uid in uids:
                self._there.pop(uid, None)
                self._coming.discard(uid)

    def close(self) -> None:
        """Begin nothing more; what is being read ends by itself, or when its client is closed."""
        with self._changed:
            self._coming.clear()
        self._orders.put(None)

    def _read_now(self, rows: Rows) -> None:
        try:
            self._read(rows)
        except BaseException:
            self.forget(rows.uids)
            raise

    def _read(self, rows: Rows) -> None:
        data = self._client.read(rows, self._columns, optional=self._optional)
        with self._changed:
            for i, uid in enumerate(rows.uids):
                if uid in self._coming:  # and not forgotten meanwhile
                    self._coming.remove(uid)
                    self._there[uid] = {name: data[name][i] for name in self._columns}
            self._changed.notify_all()

    # The thread -------------------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                self._read_early(order)
        except BaseException as error:  # noqa: BLE001 - whatever it is, `get` raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _read_early(self, rows: Rows) -> None:
        """Rows may be cleared before word comes that they will not be trained: that is no failure unless `get` is asked
        for them, which then finds out by itself."""
        with self._changed:
            rows = rows.select([i for i, uid in enumerate(rows.uids) if uid in self._coming])
        if not rows:
            return
        try:
            self._read(rows)
        except StaleRows:
            if len(rows) == 1:
                with self._changed:
                    self._coming.discard(rows.uids[0])
                    self._changed.notify_all()
            else:
                for i in range(len(rows)):
                    self._read_early(rows.select([i]))
