"""This ignitor's part in the token rings: it keeps those whose first GPU is its own, and tells keepers who has died."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshy.ignitor.agreement import Run
from meshy.ignitor.children import Child, Children
from meshy.topology import Replica

if TYPE_CHECKING:
    from torch.distributed import Store

    from meshy.colocation.keeping import RingKeeper

log = logging.getLogger(__name__)


class Rings:
    """failed: told the name of a ring whose keeper has failed, and why."""

    def __init__(self, rank: int, run: Run, store: Store, failed: Callable[[str, BaseException], None]) -> None:
        self._store = store
        self._leaders = {replica.leader.name: replica for replica in run.topology.replicas if replica.ring is not None}
        self._keepers: dict[str, RingKeeper] = {}
        self._heard: dict[str, int] = {}
        for ring in run.topology.rings:
            if ring.keeper != rank:
                continue
            from meshy.colocation.keeping import RingKeeper
            from meshy.colocation.turns import Rule

            self._heard[ring.id] = 0
            self._keepers[ring.id] = RingKeeper(
                ring.id,
                Rule(ring.members),
                run.endpoints,
                run.topology.contract,
                run.folder.ring(ring.id),
                lambda error, id=ring.id: failed(id, error),  # type: ignore[misc]
            )
            self._keepers[ring.id].start()

    def ended(self, child: Child, children: Children) -> None:
        """A child has ended: if it spoke for a replica in a ring, the keeper must know, and nothing of it may hold
        memory on the GPUs any more."""
        replica = self._leaders.get(child.name)
        if replica is None:
            return
        children.bury(child)
        assert replica.ring is not None
        if replica.ring in self._keepers:
            self._keepers[replica.ring].died(replica.name, child.life)
        else:
            self._send(replica, child.life)

    def _send(self, replica: Replica, life: str) -> None:
        """To the keeper in another ignitor."""
        try:
            number = self._store.add(f"ring/{replica.ring}/deaths", 1)
            self._store.set(f"ring/{replica.ring}/death/{number}", json.dumps([replica.name, life]))
        except Exception as error:  # noqa: BLE001 - the run is over, and the watch loop will hear so
            log.warning("torchrun's store is gone (%s)", error)

    def listen(self) -> None:
        """Hear of deaths that other ignitors have seen."""
        for id, keeper in self._keepers.items():
            try:
                told = self._store.add(f"ring/{id}/deaths", 0)
                while self._heard[id] < told:
                    replica, life = json.loads(self._store.get(f"ring/{id}/death/{self._heard[id] + 1}"))
                    self._heard[id] += 1
                    keeper.died(replica, life)
            except Exception as error:  # noqa: BLE001 - the run is over, and the watch loop will hear so
                log.warning("torchrun's store is gone (%s)", error)

    def close(self) -> None:
        for keeper in self._keepers.values():
            keeper.close()
