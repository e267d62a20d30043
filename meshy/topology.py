"""Who runs where: `derive_topology(recipe, gpus, base_port) -> Topology`.

Every ignitor calls it with the same arguments and so knows the whole run without asking anyone: the same inputs give
the same bytes (`Topology.digest`) on every rank. This module is pure: it imports nothing heavy and does no I/O.

Ports, on every host, count from the run's base port B (a block of `PORT_SPAN`):

    B                             held by the host's first ignitor while the run lives: marks the block as taken
    B + 8 .. B + 11               the queue's controller (on the first host): handshake, request, doorbell, admin HTTP
    B + 16 + j                    the j-th storage unit of the host
    B + 128 + 8 k                 the k-th CPU-only service of the host
    B + 512 + 64 g + 8 l          the process on local GPU g that is the l-th of those sharing it

and within a service's 8 ports: +0 its endpoint (HTTP of inference), +1 its distributed rendezvous, +2 its admin HTTP,
+3 the meeting point of those to whom a trainer broadcasts weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from meshy.columns import Contract
from meshy.contract import derive_contract
from meshy.importing import nearest
from meshy.recipe import Membership, Recipe, RecipeError, ServiceGroup
from meshy.refusals import colocation_faults, ring_faults, structure_faults, value_faults, wait_for_faults

PORT_SPAN = 2048
FIRST_BASE_PORT = 10240
LOWEST_PORT = 1024
LAST_BASE_PORT = 30720  # the block ends below Linux's ephemeral ports (32768 and up)

_CONTROLLER, _CONTROLLER_PORTS = 8, 4
_STORAGE, _MAX_STORAGE = 16, 112
_CPU, _SERVICE_PORTS, _MAX_CPU = 128, 8, 48
_ADMIN, _USED_PORTS = 2, 4
_GPU, _GPU_PORTS = 512, 64
_MAX_LANES = _GPU_PORTS // _SERVICE_PORTS
_MAX_LOCAL_GPUS = (PORT_SPAN - _GPU) // _GPU_PORTS


@dataclass(frozen=True)
class Gpu:
    """One entry of the GPU list: a GPU, or a slot of CPU on a machine without GPUs; one ignitor stands on each."""

    rank: int
    host: str
    local_rank: int
    device: Literal["cuda", "cpu"] = "cuda"


@dataclass(frozen=True)
class Process:
    """One operating-system process of a replica. `launcher` is the rank of the ignitor that owns it."""

    name: str
    rank: int
    host: str
    launcher: int
    gpus: tuple[int, ...]
    admin_port: int

    @property
    def first_port(self) -> int:
        """The first of its own ports; the leader's is the replica's endpoint."""
        return self.admin_port - _ADMIN


@dataclass(frozen=True)
class Replica:
    """One service of a group. `gpus` are ranks in the GPU list; the first one is the primary GPU."""

    name: str
    group: str
    index: int
    gpus: tuple[int, ...]
    host: str
    endpoint_port: int
    distributed_port: int
    weights_port: int
    ring: str | None
    processes: tuple[Process, ...]

    @property
    def leader(self) -> Process:
        """The process that takes commands and speaks for the replica."""
        return self.processes[0]

    @property
    def url(self) -> str:
        """Where other services reach its endpoint."""
        return f"http://{self.host}:{self.endpoint_port}"


@dataclass(frozen=True)
class QueueProcess:
    """A process of TransferQueue and its ports: (handshake, request, doorbell, admin) or (request,)."""

    name: str
    host: str
    launcher: int
    ports: tuple[int, ...]


@dataclass(frozen=True)
class Ring:
    """A set of GPUs whose roles take turns. `keeper` is the ignitor that clears its ledger."""

    id: str
    members: tuple[tuple[str, Membership], ...]
    gpus: tuple[int, ...]
    keeper: int


@dataclass(frozen=True)
class Topology:
    """The whole run: who runs where, on which ports, and what the queue's columns are."""

    base_port: int
    gpus: tuple[Gpu, ...]
    replicas: tuple[Replica, ...]
    rings: tuple[Ring, ...]
    controller: QueueProcess
    storage: tuple[QueueProcess, ...]
    contract: Contract
    capacity_rows: int

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(gpu.host for gpu in self.gpus))

    @cached_property
    def processes(self) -> tuple[Process, ...]:
        return tuple(process for replica in self.replicas for process in replica.processes)

    def replicas_of(self, group: str) -> tuple[Replica, ...]:
        found = tuple(replica for replica in self.replicas if replica.group == group)
        if not found:
            raise KeyError(f"no group {group!r} in the topology{nearest(group, {r.group for r in self.replicas})}")
        return found

    def urls(self, group: str) -> list[str]:
        """The endpoints of a group's replicas, in order."""
        return [replica.url for replica in self.replicas_of(group)]

    def replica(self, name: str) -> Replica:
        return next(replica for replica in self.replicas if replica.name == name)

    def ports_on(self, host: str) -> dict[int, str]:
        """Every port that the run may bind on `host`, with the name of its owner."""
        ports = {self.base_port: "ignitor"}
        for queue in (self.controller, *self.storage):
            if queue.host == host:
                ports.update(dict.fromkeys(queue.ports, queue.name))
        for replica in self.replicas:
            for process in replica.processes:
                if process.host == host:
                    first = process.admin_port - _ADMIN
                    ports.update({first + offset: process.name for offset in range(_USED_PORTS)})
        return ports

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; the same bytes on every rank."""
        return {
            "base_port": self.base_port,
            "hosts": list(self.hosts),
            "gpus": [[g.rank, g.host, g.local_rank, g.device] for g in self.gpus],
            "services": [
                {
                    "name": process.name,
                    "group": replica.group,
                    "replica": replica.index,
                    "rank": process.rank,
                    "host": process.host,
                    "launcher": process.launcher,
                    "gpus": list(process.gpus),
                    "endpoint_port": replica.endpoint_port,
                    "distributed_port": replica.distributed_port,
                    "weights_port": replica.weights_port,
                    "admin_port": process.admin_port,
                    "ring": replica.ring,
                }
                for replica in self.replicas
                for process in replica.processes
            ],
            "rings": [
                {"id": r.id, "members": [list(m) for m in r.members], "gpus": list(r.gpus), "keeper": r.keeper}
                for r in self.rings
            ],
            "queue": {
                "controller": {"host": self.controller.host, "ports": list(self.controller.ports)},
                "admin_port": self.controller.ports[3],
                "storage": [{"host": s.host, "port": s.ports[0]} for s in self.storage],
                "capacity_rows": self.capacity_rows,
            },
            "contract": self.contract.to_json(),
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `to_json`, for ranks to compare."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


def derive_topology(recipe: Recipe, gpus: Sequence[Gpu], base_port: int = FIRST_BASE_PORT) -> Topology:
    """Place every service of `recipe` on `gpus` (one entry a rank, ranks of a host together).

    Raises RecipeError with every fault found: too few GPUs, a replica that spans hosts unevenly, rings that do not fit,
    two services on one port, a cycle in `wait_for`, columns that do not fit together, a partition that nobody clears.
    """
    faults = structure_faults(recipe) + colocation_faults(recipe) + _gpu_list_faults(gpus)
    if faults:
        raise RecipeError(faults + value_faults(recipe))
    rings = ring_faults(recipe)
    faults = value_faults(recipe) + rings + wait_for_faults(recipe)
    if not LOWEST_PORT <= base_port <= 65535 - PORT_SPAN:
        faults.append(f"base_port: expected {LOWEST_PORT} to {65535 - PORT_SPAN}, got {base_port}")
    placement, misplaced = _place(recipe, gpus)
    faults += misplaced or _shared_gpu_faults(recipe, placement, gpus)
    if rings:  # else their ledgers would add faults of their own
        recipe = dataclasses.replace(recipe, rings=())
    try:
        contract, misfits = derive_contract(recipe.declarations())
    except LookupError:
        if not faults:  # else a role could not say what it reads and writes because of what is wrong already
            raise
        raise RecipeError(faults) from None
    faults += misfits
    if faults:
        raise RecipeError(faults)
    topology = _assemble(recipe, tuple(gpus), placement, contract, base_port)
    faults = _port_faults(topology)
    if faults:
        raise RecipeError(faults)
    return topology


# Placement ------------------------------------------------------------------------------------------------------------

Placement = dict[str, list[tuple[int, ...]]]
"""Group id -> for each replica the ranks of its GPUs (none for a CPU-only role)."""


def _place(recipe: Recipe, gpus: Sequence[Gpu]) -> tuple[Placement, list[str]]:
    """Groups take GPUs in the recipe's order; a colocated group takes those of the group that it names."""
    placement: Placement = {}
    faults: list[str] = []
    taken = sum(g.replicas * g.gpus_per_replica for g in recipe.groups if g.colocate_with is None)
    if taken > len(gpus):
        wants = ", ".join(
            f"{g.id} {g.replicas} x {g.gpus_per_replica}"
            for g in recipe.groups
            if g.gpus_per_replica and g.colocate_with is None
        )
        faults.append(
            f"too few GPUs: the recipe needs {taken} ({wants}) and there are {len(gpus)}; start more ignitors "
            "(--nproc-per-node, --nnodes), take smaller replicas, or let groups share GPUs in a ring"
        )
        return placement, faults
    first = 0
    for group in recipe.groups:
        if group.colocate_with is None:
            needed = group.replicas * group.gpus_per_replica
            placement[group.id] = _split(range(first, first + needed), group)
            first += needed
    for group in recipe.groups:
        if group.colocate_with is not None:
            shared = _gpus_of(recipe, placement, group)
            if group.replicas * group.gpus_per_replica != len(shared):
                faults.append(
                    f"{group.id}: {group.replicas} x {group.gpus_per_replica} GPUs do not cover exactly the "
                    f"{len(shared)} GPUs of {group.colocate_with!r}; change replicas or gpus_per_replica"
                )
            placement[group.id] = _split(shared[: group.replicas * group.gpus_per_replica], group)
    if not faults:
        for group in recipe.groups:
            faults += _span_faults(group, placement[group.id], gpus)
    return placement, faults


def _split(ranks: Sequence[int], group: ServiceGroup) -> list[tuple[int, ...]]:
    n = group.gpus_per_replica
    return [tuple(ranks[i * n : (i + 1) * n]) for i in range(group.replicas)]


def _gpus_of(recipe: Recipe, placement: Placement, group: ServiceGroup) -> list[int]:
    """The GPUs of the group that `group` finally shares with (colocation may be named through several groups)."""
    host = group
    for _ in recipe.groups:
        if host.colocate_with is None:
            break
        host = recipe.group(host.colocate_with)
    return [rank for replica in placement.get(host.id, []) for rank in replica]


def _span_faults(group: ServiceGroup, replicas: list[tuple[int, ...]], gpus: Sequence[Gpu]) -> list[str]:
    faults = []
    for index, ranks in enumerate(replicas):
        per_host: dict[str, int] = {}
        for rank in ranks:
            per_host[gpus[rank].host] = per_host.get(gpus[rank].host, 0) + 1
        if len(set(per_host.values())) > 1:
            spread = ", ".join(f"{count} on {host}" for host, count in per_host.items())
            faults.append(
                f"{group.id}.{index} would span hosts unevenly ({spread}); choose gpus_per_replica and the order of "
                "groups so that a replica fills whole hosts or stays on one"
            )
    return faults


# Checks ---------------------------------------------------------------------------------------------------------------


def _gpu_list_faults(gpus: Sequence[Gpu]) -> list[str]:
    if not gpus:
        return ["the GPU list is empty; start at least one ignitor"]
    faults = []
    if [gpu.rank for gpu in gpus] != list(range(len(gpus))):
        faults.append("the GPU list is not in rank order 0, 1, 2 ...")
    hosts = [gpu.host for gpu in gpus]
    changes = 1 + sum(a != b for a, b in itertools.pairwise(hosts))
    if changes != len(set(hosts)):
        faults.append("the ranks of a host are not next to one another; start torchrun once on each host")
    most = max(gpu.local_rank for gpu in gpus) + 1
    if most > _MAX_LOCAL_GPUS:
        faults.append(f"{most} ignitors on one host; at most {_MAX_LOCAL_GPUS} have ports")
    return faults


def _shared_gpu_faults(recipe: Recipe, placement: Placement, gpus: Sequence[Gpu]) -> list[str]:
    faults: list[str] = []
    groups = {group.id: group for group in recipe.groups}
    for ring in recipe.rings:
        sets = {
            id: sorted(rank for replica in placement[id] for rank in replica)
            for id, _ in ring.members
            if id in placement and groups[id].gpus_per_replica
        }
        first = next(iter(sets.values()), [])
        for id, ranks in sets.items():
            if ranks != first:
                faults.append(
                    f"ring {ring.id!r}: its members must share exactly the same GPUs, but {next(iter(sets))!r} is on "
                    f"{first} and {id!r} on {ranks}; set colocate_with on {id!r}"
                )
            if groups[id].config.processes == "per_host" and any(
                len({gpus[rank].host for rank in replica}) > 1 for replica in placement[id]
            ):
                faults.append(
                    f"ring {ring.id!r}: a replica of {id!r} spans several hosts, whose processes would not wait for "
                    "the token together; let it fit on one host"
                )
    return faults


def _port_faults(topology: Topology) -> list[str]:
    faults = []
    owners: dict[tuple[str, int], str] = {}
    claims = [(q.host, port, q.name) for q in (topology.controller, *topology.storage) for port in q.ports]
    claims += [(p.host, p.admin_port - _ADMIN + i, p.name) for p in topology.processes for i in range(_USED_PORTS)]
    for host, port, name in claims:
        other = owners.setdefault((host, port), name)
        if other != name:
            faults.append(
                f"port {port} on {host} would be taken by both {other} and {name}: more services there than the port "
                f"block holds ({_MAX_CPU} CPU-only services, {_MAX_LANES} sharing a GPU, {_MAX_STORAGE} storage units)"
            )
    return faults


# Assembly -------------------------------------------------------------------------------------------------------------


def _assemble(
    recipe: Recipe, gpus: tuple[Gpu, ...], placement: Placement, contract: Contract, base_port: int
) -> Topology:
    first_rank = {gpu.host: gpu.rank for gpu in reversed(gpus)}  # the host's first ignitor owns what has no GPU
    hosts = tuple(dict.fromkeys(gpu.host for gpu in gpus))
    ring_of = {id: ring.id for ring in recipe.rings for id, _ in ring.members}
    lanes: dict[int, int] = {}
    cpu_services: dict[str, int] = {}
    replicas: list[Replica] = []
    for group in recipe.groups:
        for index, ranks in enumerate(placement[group.id]):
            name = f"{group.id}.{index}"
            if ranks:
                processes = _gpu_processes(name, group, [gpus[rank] for rank in ranks], lanes, base_port)
            else:
                host = hosts[index % len(hosts)]
                k = cpu_services[host] = cpu_services.get(host, -1) + 1
                port = base_port + _CPU + _SERVICE_PORTS * k
                processes = (Process(name, 0, host, first_rank[host], (), port + _ADMIN),)
            leader = processes[0]
            first = leader.admin_port - _ADMIN
            replicas.append(
                Replica(
                    name=name,
                    group=group.id,
                    index=index,
                    gpus=ranks,
                    host=leader.host,
                    endpoint_port=first,
                    distributed_port=first + 1,
                    weights_port=first + 3,
                    ring=ring_of.get(group.id),
                    processes=processes,
                )
            )
    rings = tuple(
        Ring(ring.id, ring.members, ranks := tuple(r for rep in placement[ring.members[0][0]] for r in rep), ranks[0])
        for ring in recipe.rings
    )
    controller_ports = tuple(range(base_port + _CONTROLLER, base_port + _CONTROLLER + _CONTROLLER_PORTS))
    controller = QueueProcess("queue.controller", hosts[0], first_rank[hosts[0]], controller_ports)
    storage = tuple(
        _storage_unit(u, hosts[u % len(hosts)], u // len(hosts), first_rank, base_port)
        for u in range(recipe.queue.storage_units)
    )
    return Topology(
        base_port, gpus, tuple(replicas), rings, controller, storage, contract, sum(contract.capacity.values())
    )


def _gpu_processes(
    name: str, group: ServiceGroup, gpus: list[Gpu], lanes: dict[int, int], base_port: int
) -> tuple[Process, ...]:
    """The processes of a replica on `gpus`: one, one a host, or one a GPU, each owned by its first GPU's ignitor."""
    how = group.config.processes
    if how == "per_gpu":
        shares = [[gpu] for gpu in gpus]
    elif how == "per_host":
        shares = [[gpu for gpu in gpus if gpu.host == host] for host in dict.fromkeys(gpu.host for gpu in gpus)]
    else:
        shares = [gpus]
    processes = []
    for rank, share in enumerate(shares):
        primary = share[0]
        lane = lanes[primary.rank] = lanes.get(primary.rank, -1) + 1
        port = base_port + _GPU + _GPU_PORTS * primary.local_rank + _SERVICE_PORTS * lane
        processes.append(
            Process(
                name if rank == 0 else f"{name}.rank{rank}",
                rank,
                primary.host,
                primary.rank,
                tuple(gpu.rank for gpu in share),
                port + _ADMIN,
            )
        )
    return tuple(processes)


def _storage_unit(unit: int, host: str, nth: int, first_rank: dict[str, int], base_port: int) -> QueueProcess:
    return QueueProcess(f"queue.storage{unit}", host, first_rank[host], (base_port + _STORAGE + nth,))


def gpu_list(hosts: int, gpus_per_host: int, device: Literal["cuda", "cpu"] = "cuda") -> tuple[Gpu, ...]:
    """A made-up GPU list, for checks and simulations."""
    return tuple(
        Gpu(host * gpus_per_host + local, f"host{host}", local, device)
        for host in range(hosts)
        for local in range(gpus_per_host)
    )


def with_base_port(topology: Topology, base_port: int) -> Topology:
    """The same placement on another block of ports."""
    shift = base_port - topology.base_port

    def queue(q: QueueProcess) -> QueueProcess:
        return replace(q, ports=tuple(port + shift for port in q.ports))

    def replica(r: Replica) -> Replica:
        processes = tuple(replace(p, admin_port=p.admin_port + shift) for p in r.processes)
        return replace(
            r,
            endpoint_port=r.endpoint_port + shift,
            distributed_port=r.distributed_port + shift,
            weights_port=r.weights_port + shift,
            processes=processes,
        )

    return replace(
        topology,
        base_port=base_port,
        replicas=tuple(map(replica, topology.replicas)),
        controller=queue(topology.controller),
        storage=tuple(map(queue, topology.storage)),
    )
