"""A rank's own rows, read as soon as it is known that it will train them, while it is busy with others."""

import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshy.queue.errors import StaleRows
from meshy.queue.rows import Rows
from meshy.queue.sync import QueueClient


class Fetcher:
    """columns: those that are read. `want` may be called from any thread, the rest from one."""

    def __init__(self, client: QueueClient, columns: Sequence[str]) -> None:
        self._client, self._columns = client, tuple(columns)
        self._orders: queue.SimpleQueue[Rows | None] = queue.SimpleQueue()
        self._there: dict[str, dict[str, Any]] = {}
        self._wanted: set[str] = set()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._fetch, name="fetcher", daemon=True)
        self._thread.start()

    def want(self, rows: Rows) -> None:
        """Begin to read these."""
        with self._changed:
            self._wanted.update(rows.uids)
        self._orders.put(rows)

    def get(self, rows: Rows) -> Mapping[str, list[Any]]:
        """The columns of these rows, in their order; what was not wanted before is read now."""
        with self._changed:
            late = [i for i, uid in enumerate(rows.uids) if uid not in self._wanted]
            self._wanted.update(rows.uids)
        if late:
            self._keep(rows.select(late))
        with self._changed:
            while any(uid not in self._there for uid in rows.uids):
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()
            return {name: [self._there[uid][name] for uid in rows.uids] for name in self._columns}

    def forget(self, uids: Iterable[str]) -> None:
        """They are trained, or will not be."""
        with self._changed:
            for uid in uids:
                self._there.pop(uid, None)
                self._wanted.discard(uid)

    def close(self) -> None:
        self._orders.put(None)

    def _keep(self, rows: Rows) -> None:
        while rows := self._still_wanted(rows):
            try:
                data = self._client.read(rows, self._columns)
            except StaleRows:
                if len(self._still_wanted(rows)) == len(rows):
                    raise
                continue  # some were forgotten and cleared meanwhile
            with self._changed:
                for i, uid in enumerate(rows.uids):
                    if uid in self._wanted:
                        self._there[uid] = {name: data[name][i] for name in self._columns}
                self._changed.notify_all()
            return

    def _still_wanted(self, rows: Rows) -> Rows:
        with self._changed:
            return rows.select([i for i, uid in enumerate(rows.uids) if uid in self._wanted])

    def _fetch(self) -> None:
        try:
            while (order := self._orders.get()) is not None:
                self._keep(order)
        except BaseException as error:  # noqa: BLE001 - whatever it is, `get` raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
