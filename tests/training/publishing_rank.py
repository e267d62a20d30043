"""`python -m tests.training.publishing_rank FOLDER`: one rank of a trainer that only publishes, when it is told to.

The folder's `stage.json` says how it is set up. Rank 0 takes orders on its standard input, one JSON line each, and
answers each with one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor

from meshy.inference.config import InferenceConfig
from meshy.observe.runfolder import RunFolder
from meshy.recipe import FALLBACK, ON_DEMAND, ColocationRing, Recipe, Sampling, ServiceConfig, ServiceGroup
from meshy.rollout.config import RolloutConfig
from meshy.service.context import Context
from meshy.titan.engine import EngineConfig, TitanEngine
from meshy.topology import Gpu, Topology, derive_topology
from meshy.training.config import TrainerConfig
from meshy.training.publishing import Publishing
from meshy.training.ring_publishing import RingPublishing
from meshy.training.service import TrainerService

HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Change:
    """Every weight becomes a little different, in a way that depends on the version alone."""

    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherConfig(ServiceConfig):
    """Of one more member of a ring."""

    service: ClassVar[str] = "tests.training.publishing_rank:Other"


def recipe_of(model: str, replicas: int, ranks: int, options: dict[str, Any], ring: int = 0) -> Recipe:
    """ring: how many groups take turns on the same GPUs; none, two or three."""
    others = [f"other{i}" for i in range(ring - 2)]
    members = (("inference", FALLBACK), *((id, ON_DEMAND) for id in ("trainer", *others)))
    return Recipe(
        name="publishing",
        model=model,
        data="meshy.data.addition:addition",
        context_length=128,
        sampling=Sampling(max_new_tokens=64),
        groups=(
            ServiceGroup(id="inference", config=InferenceConfig(), replicas=replicas, gpus_per_replica=1),
            ServiceGroup(
                id="trainer",
                config=TrainerConfig(batch_size=8, **options),
                gpus_per_replica=ranks,
                colocate_with="inference" if ring else None,
            ),
            ServiceGroup(id="rollout", config=RolloutConfig(group_size=4, window=2)),
            *(
                ServiceGroup(id=id, config=OtherConfig(), gpus_per_replica=replicas, colocate_with="inference")
                for id in others
            ),
        ),
        rings=(ColocationRing(id="ring", members=members),) if ring else (),
    )


def topology_of(recipe: Recipe, base_port: int) -> Topology:
    own = [group for group in recipe.groups if group.colocate_with is None]
    count = sum(group.replicas * group.gpus_per_replica for group in own)
    return derive_topology(recipe, tuple(Gpu(i, HOST, i, "cpu") for i in range(count)), base_port)


class Token:
    """Stands in for the ring's agent: the token is always here, and what would travel with it is said."""

    def __init__(self, service: PublishingRank) -> None:
        self.service = service
        self.freed = False

    @contextmanager
    def gpu(self) -> Iterator[None]:
        if self.freed:
            self.service.restore_gpu({})
        yield
        self.service.free_gpu()
        self.freed = True


class PublishingRank(TrainerService):
    """The real trainer's publishing, on the real engine, without a queue."""

    def setup(self) -> None:
        super(TrainerService, self).setup()
        self.kind = Publishing if self.context.replica.ring is None else RingPublishing
        self.stored = torch.float32
        if self.rank == 0 and self.context.replica.ring is not None:
            self.ring = Token(self)  # type: ignore[assignment]
        with self.gpu():
            engine = TitanEngine(EngineConfig(model=self.context.model_folder, max_seq_len=128))
            self.learner = SimpleNamespace(engine=engine)
        if self.rank == 0:
            self.publishing = self.kind(self.context, self.command, torch.float32, self.stored, engine.device)

    def execute(self, command: Any) -> Any:
        if not isinstance(command, Change):
            return super().execute(command)
        generator = torch.Generator().manual_seed(command.version)
        with torch.no_grad():
            for parameter in self.learner.engine.model.parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.add_(0.003 * torch.randn(local.shape, generator=generator))

    def lead(self) -> None:
        self.use()
        for line in sys.stdin:
            order = json.loads(line)
            getattr(self, order.pop("do"))(**order)

    def use(self, stored: str = "float32", **options: Any) -> None:
        """Begin as a new trainer, with these fields of its configuration changed."""
        self.stored = getattr(torch, stored)
        assert self.publishing is not None
        self.publishing.close()
        config = dataclasses.replace(self.config, **options)
        context = dataclasses.replace(self.context, group=dataclasses.replace(self.context.group, config=config))
        self.publishing = self.kind(context, self.command, torch.float32, self.stored, self.learner.engine.device)
        self.publishing.start()
        self.say(behind=self.publishing.behind)

    def say(self, **told: Any) -> None:
        print(json.dumps(told), flush=True)

    def publish(self, version: int, last: bool = False) -> None:
        assert self.publishing is not None
        began = time.monotonic()
        with self.gpu():
            self.command(Change(version))
            self.publishing.stage(version, last)
        if self.ring is not None:
            self.say(**self.gpu_payload())
        self.say(**dataclasses.asdict(self.publishing.publish(version)), seconds=time.monotonic() - began)

    def after_gate(self, version: int, last: bool = False) -> None:
        assert self.publishing is not None
        self.publishing.after_gate(version, last)
        self.say(behind=self.publishing.behind)

    def spoil(self, version: int) -> None:
        """The trainer's weights become others than it has published, and checksums are compared."""
        assert self.publishing is not None
        self.command(Change(version))
        self.publishing.after_gate(version, last=True)

    def begin_batch(self, version: int) -> None:
        """The first of several optimiser steps towards a version, once a replica is seen to be behind."""
        assert self.publishing is not None
        end = time.monotonic() + 20
        while not self.publishing.behind and time.monotonic() < end:
            self.stopping.wait(0.1)
        self.publishing.unsettle()
        self.command(Change(version))
        self.say()

    def wait_until_all_serve(self, seconds: float) -> None:
        """What the trainer does while it waits for its batch."""
        assert self.publishing is not None
        end = time.monotonic() + seconds
        while self.publishing.behind and time.monotonic() < end:
            self.publishing.meanwhile()
            self.stopping.wait(0.1)
        self.say(behind=self.publishing.behind)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    stage = json.loads((folder / "stage.json").read_text())
    recipe = recipe_of(stage["model"], stage["replicas"], stage["ranks"], stage["options"], stage["ring"])
    topology = topology_of(recipe, stage["base_port"])
    replica = topology.replica("trainer.0")
    context = Context(
        run_id=f"publishing-{stage['base_port']}",
        folder=RunFolder(folder / "run").make(),
        recipe=recipe,
        topology=topology,
        group=recipe.group("trainer"),
        replica=replica,
        process=replica.processes[int(os.environ["RANK_OF_STAGE"])],
        model_folder=Path(stage["model"]),
    )
    service = PublishingRank(context)
    try:
        service.setup()
        service.run()
    except BaseException:
        service.state = "failed"
        raise
    finally:
        service.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
