"""Where the queue's processes listen. Pure: filled by the topology, read by servers and clients.

A controller needs the ports of `CONTROLLER_PORTS`, a storage unit those of `STORAGE_PORTS`. Every client must know the
storage units in one order: row r lies on unit r mod n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

CONTROLLER_PORTS = ("handshake", "request", "doorbell", "admin")
"""TransferQueue's handshake and request sockets, the doorbell (a ZeroMQ PUB) and the HTTP admin endpoint."""

STORAGE_PORTS = ("request",)

CONTROLLER = "controller"


def storage_role(unit: int) -> str:
    """The name of a storage unit's process, as `python -m meshy.queue.server` takes it."""
    return f"storage.{unit}"


@dataclass(frozen=True, kw_only=True)
class ControllerEndpoint:
    host: str
    handshake: int
    request: int
    doorbell: int
    admin: int

    @property
    def admin_url(self) -> str:
        """Serves GET /health (503 until the whole queue serves) and GET /table."""
        return f"http://{self.host}:{self.admin}"


@dataclass(frozen=True, kw_only=True)
class StorageEndpoint:
    host: str
    request: int


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """The controller and the storage units, in order. Hosts are IP addresses: processes bind to them.

    run_id: whose queue this is. Every message is addressed to `<run_id>/<role>` and a process refuses what is not
    addressed to it, so that a client never talks to another run's queue on a port that was used again.
    """

    controller: ControllerEndpoint
    storage: tuple[StorageEndpoint, ...]
    run_id: str = "run"

    def for_run(self, run_id: str) -> Endpoints:
        return replace(self, run_id=run_id)

    def address(self, role: str) -> str:
        """What a process of this run answers to."""
        return f"{self.run_id}/{role}"

    @property
    def roles(self) -> tuple[str, ...]:
        return (CONTROLLER, *(storage_role(unit) for unit in range(len(self.storage))))

    def host_of(self, role: str) -> str:
        if role not in self.roles:
            raise ValueError(f"the queue has no process {role!r}; it has {', '.join(self.roles)}")
        return self.controller.host if role == CONTROLLER else self.storage[int(role.rpartition(".")[2])].host

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"storage": [asdict(unit) for unit in self.storage]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Endpoints:
        return cls(
            controller=ControllerEndpoint(**data["controller"]),
            storage=tuple(StorageEndpoint(**unit) for unit in data["storage"]),
            run_id=data["run_id"],
        )
