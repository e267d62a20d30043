"""Which replica a request goes to: the rule alone, without I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

KEYS_REMEMBERED = 4096  # of those with nothing in flight


@dataclass(slots=True)
class _Key:
    replica: str
    in_flight: int = 0


class Balancer:
    """Least loaded first; requests of one key go to one replica, which holds their prefix.

    The load of a request is its tokens, those that it may still write included, for they are what fills a replica's
    cache: a few long conversations weigh as much as many short prompts. max_in_flight: requests that one replica is
    given at once; None: no bound.
    """

    def __init__(self, replicas: Sequence[str], max_in_flight: int | None = None) -> None:
        if not replicas:
            raise ValueError("a generation client needs at least one URL")
        self.load = dict.fromkeys(replicas, 0)
        self.in_flight = dict.fromkeys(replicas, 0)
        self._max = max_in_flight
        self._keys: dict[str, _Key] = {}  # with requests in flight
        self._idle: OrderedDict[str, str] = OrderedDict()  # without: where they were last

    def acquire(self, fit: Sequence[str], tokens: int, key: str | None = None) -> str | None:
        """Choose one of the replicas `fit` and count the request there; `release` must follow. None if all are full."""
        open_ = [url for url in fit if self._max is None or self.in_flight[url] < self._max]
        if not open_:
            return None
        replica = self._place_of(key)
        if replica not in open_:
            replica = min(open_, key=self.load.__getitem__)
        if key is not None:
            self._idle.pop(key, None)
            entry = self._keys.setdefault(key, _Key(replica))
            entry.replica = replica
            entry.in_flight += 1
        self.load[replica] += tokens
        self.in_flight[replica] += 1
        return replica

    def release(self, replica: str, tokens: int, key: str | None = None) -> None:
        self.load[replica] -= tokens
        self.in_flight[replica] -= 1
        if key is None:
            return
        entry = self._keys[key]
        entry.in_flight -= 1
        if not entry.in_flight:
            del self._keys[key]
            self._idle[key] = entry.replica
            if len(self._idle) > KEYS_REMEMBERED:
                self._idle.popitem(last=False)

    def forget_idle(self) -> None:
        """New weights have emptied the caches: no replica holds a prefix but of what is in flight."""
        self._idle.clear()

    def _place_of(self, key: str | None) -> str | None:
        if key is None:
            return None
        entry = self._keys.get(key)
        return entry.replica if entry is not None else self._idle.get(key)
