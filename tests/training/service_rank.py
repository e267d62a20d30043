"""`python -m tests.training.service_rank FOLDER RANK WORLD PORT`: one rank of the real trainer, going through CASES.

The test plays rollout, over a real queue. Rank 0 says `trained` on its standard output after each part of a batch, and
leaves what every case computed in `FOLDER/<case>.<world>.pt`; each rank, what it was told to train and had fetched.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor

from meshy.columns import (
    EVAL,
    EVAL_COLUMNS,
    GATE_COLUMNS,
    GEN_GATE,
    TRAIN,
    TRAIN_COLUMNS,
    Consumes,
    Produces,
)
from meshy.observe.jsonl import read_jsonl
from meshy.observe.runfolder import RunFolder
from meshy.queue.endpoints import Endpoints
from meshy.queue.rows import Rows
from meshy.queue.sync import QueueClient
from meshy.recipe import Recipe, Sampling, ServiceConfig, ServiceGroup
from meshy.service.context import Context
from meshy.spmd.fetch import FetchRows
from meshy.topology import Gpu, Topology, derive_topology
from meshy.training.build import build_learner
from meshy.training.commands import TrainBatch
from meshy.training.config import TrainerConfig
from meshy.training.service import TrainerService

STEPS, BATCH, GROUP, PARTS = 3, 16, 2, 4


@dataclass(frozen=True)
class Case:
    """shared: which rank is to fetch a row: "by name", as in a deterministic run, the "least" loaded, or the "last"."""

    options: dict[str, Any]
    shared: str = "by name"


CASES = {
    "by name": Case({"mini_batches": 2}),
    "least": Case({"mini_batches": 2}, "least"),
    "last": Case({"mini_batches": 2}, "last"),
    "streamed": Case({"mini_batches": PARTS, "stream_minibatch": True}, "least"),
    "dropping": Case({"max_staleness": 1}, "least"),
}


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(ServiceConfig):
    """What the test plays."""

    service: ClassVar[str] = "meshy.service:Service"

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (Consumes(GEN_GATE, GATE_COLUMNS, per_replica=True),)

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        return (Produces(TRAIN, TRAIN_COLUMNS, creates=True), Produces(EVAL, EVAL_COLUMNS, creates=True))

    def live_rows(self, recipe: Recipe) -> dict[str, int]:
        return {TRAIN: 2 * BATCH}


def recipe_of(model: str, ranks: int, **options: Any) -> Recipe:
    config = TrainerConfig(
        batch_size=BATCH,
        lr=1e-3,
        schedule="linear",
        warmup_steps=3,
        publish_to=(),
        tokens_per_micro_batch=64,
        **options,
    )
    return Recipe(
        name="trainer",
        model=model,
        data="meshy.data.addition:addition",
        context_length=64,
        sampling=Sampling(max_new_tokens=32),
        steps=STEPS,
        groups=(
            ServiceGroup(id="trainer", config=config, gpus_per_replica=ranks),
            ServiceGroup(id="rollout", config=RolloutConfig()),
        ),
    )


def topology_of(recipe: Recipe, ranks: int) -> Topology:
    return derive_topology(recipe, tuple(Gpu(i, "127.0.0.1", i, "cpu") for i in range(ranks)), 20_000)


@dataclass(frozen=True)
class Begin:
    """Every rank becomes a new trainer of this case."""

    case: str


@dataclass(frozen=True)
class Save:
    case: str


class CaseRank(TrainerService):
    def __init__(self, context: Context, folder: Path, client: QueueClient) -> None:
        super().__init__(context)
        self.here = folder
        self.__dict__["queue"] = client
        self.trained: list[dict[str, Any]] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    def execute(self, command: Any) -> Any:
        match command:
            case Begin(case):
                return self._begin(case)
            case Save(case):
                return self._save(case)
            case TrainBatch():
                with self.fetcher._changed:
                    early = [uid for uid in command.rows.uids if uid in {*self.fetcher._there, *self.fetcher._coming}]
                mine = [command.rows.uids[i] for plan in command.plans for i in sorted(plan.samples(self.rank))]
                self.trained.append(
                    {
                        "uids": command.rows.uids,
                        "early": early,
                        "mine": mine,
                        "rates": command.learning_rates,
                        "version": command.version,
                    }
                )
        result = super().execute(command)
        if isinstance(command, TrainBatch) and self.rank == 0:
            print("trained", flush=True)
        return result

    def _begin(self, case: str) -> None:
        config = dataclasses.replace(recipe_of("", 1).group("trainer").config, **CASES[case].options)
        self.config = config
        self.trained, self.gradients = [], []
        self.learner = build_learner(config, self.context.model_folder, self.recipe, self.groups, {})
        step = self.learner.engine.step

        def recorded(lr: float) -> float:
            named = self.learner.engine.model.named_parameters()
            gradient = {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in named}
            self.gradients.append({name: tensor.clone() for name, tensor in gradient.items()})
            return step(lr)

        self.learner.engine.step = recorded

    def _save(self, case: str) -> None:
        weights = {name: tensor.clone() for name, tensor in self.learner.engine.hf_tensors()}
        (self.here / f"{case}.{self.world_size}.rank{self.rank}.json").write_text(
            json.dumps({"trained": self.trained, "held": self.fetcher.held})
        )
        if self.rank == 0:
            steps = read_jsonl(self.context.folder.metrics)
            saved = {"weights": weights, "gradients": self.gradients, "steps": steps}
            torch.save(saved, self.here / f"{case}.{self.world_size}.pt")

    def _share(self, rows: Rows, lengths: list[int]) -> list[int]:
        if self.shared != "last":
            return super()._share(rows, lengths)
        ranks = [self.world_size - 1] * len(rows)
        self.tell_aside(FetchRows(rows, tuple(ranks)))
        return ranks

    def lead(self) -> None:
        folder = self.context.folder
        for case, what in CASES.items():
            run = RunFolder(self.here / f"{case}.{self.world_size}").make()
            self.context = self.publishing.context = dataclasses.replace(self.context, folder=run)
            self.recipe = dataclasses.replace(self.recipe, deterministic=what.shared == "by name")
            self.shared = what.shared
            self.command(Begin(case))
            self.step = 0
            super().lead()
            self.collector.close()
            self._metrics.close()
            self.command(Save(case))
        self.context = dataclasses.replace(self.context, folder=folder)


def main(folder: str, rank: str, world: str, port: str) -> None:
    torch.set_num_threads(1)
    model = Path(folder).parent / "qwen3_tied"
    recipe = recipe_of(str(model), int(world))
    topology = topology_of(recipe, int(world))
    replica = dataclasses.replace(topology.replica("trainer.0"), distributed_port=int(port))
    context = Context(
        run_id="cases",
        folder=RunFolder(Path(folder) / f"run{world}").make(),
        recipe=recipe,
        topology=topology,
        group=recipe.group("trainer"),
        replica=replica,
        process=replica.processes[int(rank)],
        model_folder=model,
    )
    endpoints = Endpoints.from_json(json.loads((Path(folder) / f"endpoints.{world}.json").read_text()))
    client = QueueClient(endpoints, topology.contract, "trainer.0")
    service = CaseRank(context, Path(folder), client)
    try:
        service.setup()
        service.run()
    except BaseException:
        service.state = "failed"
        raise
    finally:
        service.close()
        service.disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])
