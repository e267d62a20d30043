"""An SPMD role of a user: every command adds one number from each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist

from meshy.columns import UID, Consumes, Produces
from meshy.recipe import Recipe, ServiceConfig, ServiceGroup
from meshy.spmd import SpmdService


@dataclass(frozen=True, kw_only=True)
class AdderConfig(ServiceConfig):
    """after: what happens once some sums are right."""

    service: ClassVar[str] = "tests.spmd.roles:Adder"
    processes: ClassVar[Literal["one", "per_host", "per_gpu"]] = "per_gpu"
    ends_run: ClassVar[bool] = True
    after: str = "end"

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (Consumes("train", (UID,), end=True),)

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        return (Produces("train", (UID,), creates=True),)

    def live_rows(self, recipe: Recipe) -> dict[str, int]:
        return {"train": 4}


class Adder(SpmdService):
    def execute(self, command: Any) -> Any:
        if command == "fail" and self.rank == 1:
            raise ValueError("rank 1 cannot go on")
        value = torch.tensor([float(self.rank + 1)])
        dist.all_reduce(value)  # on rank 0 this waits for a rank that never comes
        return float(value)

    def lead(self) -> None:
        sums = [self.command("add") for _ in range(20)]
        (self.context.folder.path / "sums.txt").write_text(str(set(sums)))
        print("the sums are right", flush=True)
        if self.config.after == "fail":
            self.command("fail")
        if self.config.after == "stay":
            self.stopping.wait()


def recipe(after: str = "end") -> Recipe:
    return Recipe(
        name="adder",
        model="recipes/demo_model",
        data="nowhere:nothing",
        groups=(ServiceGroup(id="adder", config=AdderConfig(after=after), gpus_per_replica=2),),
    )
