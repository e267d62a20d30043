"""Who is there: every ignitor says where it stands, and all of them read the same list."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from meshy.device import device_kind
from meshy.topology import Gpu

if TYPE_CHECKING:
    from torch.distributed import Store

GATHER_DEADLINE = 300.0  # seconds; hosts of a cluster come up at different times


class DiscoveryError(RuntimeError):
    """The ignitors did not find one another."""


@dataclass(frozen=True)
class Seat:
    """This ignitor among all: torchrun's rank and store, and what stands here."""

    rank: int
    world_size: int
    local_rank: int
    store: Store
    gpus: tuple[Gpu, ...]

    @property
    def gpu(self) -> Gpu:
        return self.gpus[self.rank]

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def leads_host(self) -> bool:
        """The host's first ignitor: it owns what has no GPU there."""
        return next(gpu.rank for gpu in self.gpus if gpu.host == self.gpu.host) == self.rank

    def gather(self, name: str, value: Any, deadline: float = GATHER_DEADLINE) -> list[Any]:
        """Every rank's `value` (plain JSON), in rank order. All ranks must call it with the same `name`."""
        return all_gather(self.store, self.rank, self.world_size, name, value, deadline)


def discover() -> Seat:
    """Join the others through torchrun's store and gather the GPU list.

    DiscoveryError when this is not one of torchrun's processes, or when a rank does not come within five minutes.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise DiscoveryError(
            "an ignitor is started by torchrun, one on every GPU or CPU slot:\n"
            "  torchrun --standalone --nproc-per-node 2 -m meshy.ignitor recipes/grpo_sync.py"
        )
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    store = connect_store()
    alone = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) == world_size
    entry = {"host": own_address(alone), "local_rank": local_rank, "device": device_kind()}
    entries = all_gather(store, rank, world_size, "gpu", entry, GATHER_DEADLINE)
    gpus = tuple(Gpu(r, e["host"], e["local_rank"], e["device"]) for r, e in enumerate(entries))
    return Seat(rank, world_size, local_rank, store, gpus)


def connect_store() -> Store:
    """torchrun's key-value store, under a prefix of this attempt."""
    from torch.distributed import PrefixStore, TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = not agents_store and os.environ["RANK"] == "0"
    store = TCPStore(
        host, port, is_master=is_master, timeout=timedelta(seconds=GATHER_DEADLINE), wait_for_workers=False
    )
    return PrefixStore(f"meshy/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def own_address(alone: bool) -> str:
    """The address at which other hosts reach this one; loopback where there are none.

    `MESHY_HOST` sets it where a host has several networks.
    """
    if "MESHY_HOST" in os.environ:
        return os.environ["MESHY_HOST"]
    if alone:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # routes only; nothing is sent
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        address = str(probe.getsockname()[0])
    if address.startswith("127."):  # this host is the master: its own name, as the others know it
        address = socket.gethostbyname(os.environ["MASTER_ADDR"])
    if address.startswith("127."):
        raise DiscoveryError(
            f"this host's address is {address}, which other hosts cannot reach; set MESHY_HOST to its network address"
        )
    return address


def all_gather(store: Store, rank: int, world_size: int, name: str, value: Any, deadline: float) -> list[Any]:
    """Rank 0 collects every rank's value and publishes the list: 2 N messages for N ranks."""
    store.set(f"{name}/{rank}", json.dumps(value))
    if rank == 0:
        values = []
        end = time.monotonic() + deadline
        for other in range(world_size):
            try:
                store.wait([f"{name}/{other}"], timedelta(seconds=max(0.001, end - time.monotonic())))
            except Exception as error:
                raise DiscoveryError(
                    f"rank {other} of {world_size} did not arrive at '{name}' within {deadline:.0f} s; look at its own "
                    "output for the reason"
                ) from error
            values.append(json.loads(store.get(f"{name}/{other}")))
        store.set(f"{name}/all", json.dumps(values))
        return values
    try:
        store.wait([f"{name}/all"], timedelta(seconds=deadline))
    except Exception as error:
        raise DiscoveryError(f"rank 0 did not publish '{name}' within {deadline:.0f} s; look at its output") from error
    values = json.loads(store.get(f"{name}/all"))
    assert isinstance(values, list)
    return values
