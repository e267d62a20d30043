"""This ignitor's part in the token rings: it keeps those whose first GPU is its own, and tells keepers who has died."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshy.ignitor.agreement import Run
from meshy.ignitor.deaths import Dead, Notices

if TYPE_CHECKING:
    from torch.distributed import Store

    from meshy.colocation.keeping import RingKeeper


class Rings:
    """failed: told the name of a ring whose keeper has failed, and why."""

    def __init__(self, rank: int, run: Run, store: Store, failed: Callable[[str, BaseException], None]) -> None:
        replicas = [replica for replica in run.topology.replicas if replica.ring is not None]
        self._ring_of = {process.name: replica.ring for replica in replicas for process in replica.processes}
        self._dead, self._notices = Dead(replicas), Notices(rank, store)
        self._others: dict[str, list[int]] = {}  # by ring that is kept here: the other ignitors of its processes
        self._keepers: dict[str, RingKeeper] = {}
        for ring in run.topology.rings:
            if ring.keeper != rank:
                continue
            from meshy.colocation.keeping import RingKeeper
            from meshy.colocation.turns import Rule

            launchers = {p.launcher for replica in replicas if replica.ring == ring.id for p in replica.processes}
            self._others[ring.id] = sorted(launchers - {rank})
            self._keepers[ring.id] = RingKeeper(
                ring.id,
                Rule(ring.members),
                run.endpoints,
                run.topology.contract,
                run.folder.ring(ring.id),
                lambda error, id=ring.id: failed(id, error),  # type: ignore[misc]
            )
            self._keepers[ring.id].start()

    def ended(self, process: str, life: str) -> None:
        """A process has ended, nothing that it had started is left, and the run goes on without it."""
        ring = self._ring_of.get(process)
        if ring is None:
            return
        if ring in self._keepers:
            self._tell(ring, process, life)
        else:
            self._notices.add(ring, process, life)
            self._notices.say()

    def listen(self) -> None:
        """Hear of deaths that other ignitors have seen, and say again what could not be said."""
        self._notices.say()
        for ring, others in self._others.items():
            for process, life in self._notices.hear(ring, others):
                self._tell(ring, process, life)

    def _tell(self, ring: str, process: str, life: str) -> None:
        if (dead := self._dead.ended(process, life)) is not None:
            self._keepers[ring].died(*dead)

    def close(self) -> None:
        for keeper in self._keepers.values():
            keeper.close()
