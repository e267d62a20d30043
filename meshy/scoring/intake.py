"""The leader of a scoring replica takes rows on a thread, as they become ready, a little ahead of what is scored."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshy.columns import N_TOKENS, TRAIN
from meshy.queue.errors import QueueTimeout
from meshy.queue.rows import Rows
from meshy.queue.sync import QueueClient
from meshy.titan.sharing import spread

log = logging.getLogger("meshy.scoring")

TURN_SECONDS = 1.0  # of waiting for somebody to want rows, then the thread looks whether it is to end


@dataclass(frozen=True)
class Portion:
    """Rows that are scored together. lengths: tokens of each. ranks: who scores it. columns: further numbers of
    each."""

    rows: Rows
    lengths: tuple[int, ...]
    ranks: tuple[int, ...]
    columns: Mapping[str, list[Any]]


class Intake:
    """tokens: of a portion, about. Rows are taken once `alive` are in the partition. share: told of a portion as soon
    as it is taken, on the thread. columns: numbers of a row that the leader wants to know; None where a row lacks one
    of `optional`. At most one portion lies ready, so that several replicas share the work evenly."""

    def __init__(
        self,
        client: QueueClient,
        *,
        world_size: int,
        tokens: int,
        longest: int,
        alive: int = 1,
        columns: Sequence[str] = (),
        optional: Sequence[str] = (),
        share: Callable[[Portion], None] = lambda portion: None,
    ) -> None:
        self._client, self._world_size, self._tokens, self._alive = client, world_size, tokens, alive
        self._share, self._columns, self._optional = share, tuple(columns), tuple(optional)
        self._mean = float(longest)  # tokens of a row; of those seen so far, once there are any
        self._seen = 0
        self._load = [0] * world_size  # tokens that each rank has been given so far
        self._ready: queue.Queue[Portion | BaseException] = queue.Queue(maxsize=1)
        self._nothing = threading.Event()  # is ready, as far as is known
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)
        self._thread.start()

    def next(self) -> Portion:
        """Waits for rows; the queue's client says in the log now and then for what. Raises what taking has raised."""
        return self._opened(self._ready.get())

    def more(self) -> Portion | None:
        """The next rows if there are some ready; None otherwise."""
        while True:
            try:
                return self._opened(self._ready.get(timeout=0.005))
            except queue.Empty:
                if self._nothing.is_set() and self._ready.empty():
                    return None

    @staticmethod
    def _opened(entry: Portion | BaseException) -> Portion:
        if isinstance(entry, BaseException):
            raise entry
        return entry

    def close(self) -> None:
        """The thread ends at the latest when its client is closed."""
        self._closing = True

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                portion = self._portion(self._take())
                self._share(portion)
                self._put(portion)
        except BaseException as error:  # noqa: BLE001 - whatever it is, `next` raises it
            if not self._closing:
                self._put(error)

    def _take(self) -> Rows:
        """Waits as long as the client lives."""
        at_most = max(1, int(self._tokens / self._mean))
        try:
            return self._client.take(TRAIN, at_most=at_most, alive=self._alive, timeout=0)
        except QueueTimeout:
            self._nothing.set()
            rows = self._client.take(TRAIN, at_most=at_most, alive=self._alive)
        self._nothing.clear()
        return rows

    def _portion(self, rows: Rows) -> Portion:
        names = tuple(dict.fromkeys((N_TOKENS.name, *self._columns)))
        data = self._client.read(rows, names, optional=self._optional)
        columns = {name: [getattr(v, "item", lambda v=v: v)() for v in values] for name, values in data.items()}
        lengths = tuple(columns[N_TOKENS.name])
        self._mean = (self._mean * self._seen + sum(lengths)) / (self._seen + len(lengths))
        self._seen = min(self._seen + len(lengths), 4096)
        ranks = spread(dict(enumerate(lengths)), self._world_size, self._load)
        for i, length in enumerate(lengths):
            self._load[ranks[i]] += length
        return Portion(rows, lengths, tuple(ranks[i] for i in range(len(lengths))), columns)

    def _put(self, entry: Portion | BaseException) -> None:
        while not self._closing:
            try:
                return self._ready.put(entry, timeout=TURN_SECONDS)
            except queue.Full:
                continue
