"""Small roles for tests of recipes and topologies: no service behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from meshy.columns import TRAIN_COLUMNS, Column, Consumes, Produces
from meshy.recipe import Recipe, ServiceConfig, ServiceGroup


@dataclass(frozen=True, kw_only=True)
class Engine(ServiceConfig):
    service: ClassVar[str] = "nowhere:Engine"
    processes: ClassVar[Literal["one", "per_host", "per_gpu"]] = "per_host"
    serves_http: ClassVar[bool] = True
    engine: Literal["auto", "embedded"] = "auto"
    args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Learner(ServiceConfig):
    service: ClassVar[str] = "nowhere:Learner"
    processes: ClassVar[Literal["one", "per_host", "per_gpu"]] = "per_gpu"
    batch_size: int = 128
    lr: float = 1e-4
    compile: bool = False
    clip: float | None = None
    also: tuple[str, ...] = ()
    end: bool = True

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (Consumes("train", (*TRAIN_COLUMNS, *self.also), end=self.end),)

    def faults(self, recipe: Recipe) -> list[str]:
        return ["lr: expected more than 0"] if self.lr <= 0 else []


@dataclass(frozen=True, kw_only=True)
class Writer(ServiceConfig):
    service: ClassVar[str] = "nowhere:Writer"
    columns: ClassVar[tuple[Column, ...]] = TRAIN_COLUMNS
    rows: int = 256

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        return (Produces("train", self.columns, creates=True),)

    def live_rows(self, recipe: Recipe) -> dict[str, int]:
        return {"train": self.rows}


@dataclass(frozen=True, kw_only=True)
class Scorer(ServiceConfig):
    service: ClassVar[str] = "nowhere:Scorer"
    column: str = "score"
    dtype: Literal["float32", "int64"] = "float32"
    route: str | None = None

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (Consumes("train", ("tokens",)),)

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        return (Produces("train", (Column(self.column, self.dtype),), route=self.route),)


def recipe_of(
    *extra: ServiceGroup, engines: int = 1, ranks: int = 1, learner: Learner | None = None, **fields
) -> Recipe:
    """Engine, learner and writer, and whatever a test adds."""
    groups = (
        ServiceGroup(id="inference", config=Engine(), replicas=engines, gpus_per_replica=1),
        ServiceGroup(id="trainer", config=learner or Learner(), gpus_per_replica=ranks, wait_for=("inference",)),
        ServiceGroup(id="rollout", config=Writer()),
        *extra,
    )
    return Recipe(**{"name": "test", "model": "somewhere", "data": "some.module:task", "groups": groups, **fields})
