"""A role from outside the package: it reads `train` and adds a column, for which the trainer waits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from meshy.columns import TOKENS, TRAIN, Column, Consumes, Produces
from meshy.recipe import Recipe, ServiceConfig, ServiceGroup
from meshy.service import Service
from recipes.grpo_sync import recipe as grpo_sync

LENGTH = Column("length", "float32")


@dataclass(frozen=True, kw_only=True)
class LengthConfig(ServiceConfig):
    service: ClassVar[str] = "tests.runs.lengths:LengthService"

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (Consumes(TRAIN, (TOKENS,)),)

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        return (Produces(TRAIN, (LENGTH,)),)


class LengthService(Service):
    def run(self) -> None:
        with (self.context.folder.path / "lengths.txt").open("w") as file:
            while not self.stopping.is_set():
                rows = self.queue.take(TRAIN)
                tokens = self.queue.read(rows, ["tokens"])["tokens"]
                self.queue.write(rows, {"length": [float(len(row)) for row in tokens]})
                file.write("".join(f"{uid}\n" for uid in rows.uids))
                file.flush()


def recipe(gpus: int = 2) -> Recipe:
    base = grpo_sync(gpus=gpus)
    return replace(base, groups=(*base.groups, ServiceGroup(id="lengths", config=LengthConfig())))
