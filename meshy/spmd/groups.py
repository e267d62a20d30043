"""The process groups of one replica: `compute` on the device, `control` (gloo) for small things on the CPU."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from meshy.device import device_kind, distributed_backend

# What torchrun or an outer program may have left behind, and a library might believe.
FOREIGN = ("GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID",
           "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE")  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a process stands in its replica, and where that meets. local_rank: of its GPU among those it sees."""

    rank: int
    world_size: int
    host: str
    port: int
    local_rank: int = 0


class ProcessGroups:
    """Both groups of a replica, and the store by which it met. One per process."""

    def __init__(self, place: Place, *, collective_timeout: float = 600.0) -> None:
        """Meets the other ranks at (host, port); every rank must come within `collective_timeout` seconds, and so long
        a collective may last at most before it fails on every rank."""
        self.place = place
        timeout = timedelta(seconds=collective_timeout)
        define_environment(place)
        if device_kind() == "cuda":
            torch.cuda.set_device(place.local_rank)
        dist.init_process_group(distributed_backend(), timeout=timeout)
        self.compute = dist.group.WORLD
        self.control = dist.new_group(backend="gloo", timeout=timeout)
        self.store = dist.PrefixStore("meshy", dist.distributed_c10d._get_default_store())

    def sum(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The sum of a small CPU tensor over all ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The elementwise maximum of a small CPU tensor over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        result = values.clone()
        if self.place.world_size > 1:
            dist.all_reduce(result, operation, group=self.control)
        return result

    def close(self) -> None:
        """Leaves both groups. Not to be called after a failure: it may wait for ranks that no longer answer."""
        if dist.is_initialized():
            dist.destroy_process_group()


def define_environment(place: Place) -> None:
    """The variables by which torch's libraries know their rank, all defined here and nothing inherited."""
    for name in FOREIGN:
        os.environ.pop(name, None)
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE="1",  # every process sees its own devices only
        MASTER_ADDR=place.host,
        MASTER_PORT=str(place.port),
    )
