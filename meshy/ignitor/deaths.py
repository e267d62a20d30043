"""Deaths in rings: which replicas are dead, and how one ignitor tells another."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from meshy.topology import Replica

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)


class Dead:
    """A replica is dead when all its processes are, on whatever hosts: until then the others use its GPUs. Pure."""

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._replicas = {process.name: replica for replica in replicas for process in replica.processes}
        self._seen: set[tuple[str, str]] = set()
        self._gone: dict[str, dict[str, str]] = {}  # by replica: the lives of its dead processes

    def ended(self, process: str, life: str) -> tuple[str, str] | None:
        """That process has ended; may be said twice. The replica of which it was the last, and the life by which that
        took part in its ring: its leader's."""
        if (process, life) in self._seen:
            return None
        self._seen.add((process, life))
        replica = self._replicas[process]
        gone = self._gone.setdefault(replica.name, {})
        gone[process] = life
        if len(gone) < len(replica.processes):
            return None
        return replica.name, self._gone.pop(replica.name)[replica.leader.name]


class Notices:
    """What this ignitor has seen end, for the keepers in others, through torchrun's store. What fails is said again,
    and nothing is heard half: each rank writes all of its own under one key, and rings a bell after that."""

    def __init__(self, rank: int, store: Store) -> None:
        self._rank, self._store = rank, store
        self._seen: dict[str, list[tuple[str, str]]] = {}  # by ring: process and life
        self._unsaid: set[str] = set()
        self._rung: dict[str, int] = {}

    def add(self, ring: str, process: str, life: str) -> None:
        self._seen.setdefault(ring, []).append((process, life))
        self._unsaid.add(ring)

    def say(self) -> None:
        """Whatever has not been said."""
        for ring in sorted(self._unsaid):
            try:
                self._store.set(_key(ring, self._rank), json.dumps(self._seen[ring]))
                self._store.add(_bell(ring), 1)
            except Exception as error:  # noqa: BLE001 - it is said again; where the store is gone, the run is over
                log.warning("torchrun's store did not take what has ended in ring %r (%s)", ring, error)
            else:
                self._unsaid.discard(ring)

    def hear(self, ring: str, ranks: Iterable[int]) -> Iterator[tuple[str, str]]:
        """Process and life of what these ranks have seen end, if there is anything new; what is known, over again."""
        try:
            rung = self._store.add(_bell(ring), 0)
            if rung == self._rung.get(ring, 0):
                return
            said = [self._store.get(key) for rank in ranks if self._store.check([key := _key(ring, rank)])]
        except Exception as error:  # noqa: BLE001 - it is asked again; where the store is gone, the run is over
            log.warning("torchrun's store did not tell what has ended in ring %r (%s)", ring, error)
            return
        self._rung[ring] = rung
        for text in said:
            yield from ((process, life) for process, life in json.loads(text))


def _key(ring: str, rank: int) -> str:
    return f"ring/{ring}/ended/{rank}"


def _bell(ring: str) -> str:
    return f"ring/{ring}/bell"
