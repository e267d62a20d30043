"""A teacher in this process, over a real queue, with nobody else: whoever uses it plays rollout and the trainer."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from meshy.columns import LOSS_MASK, N_TOKENS, TOKENS, TRAIN, UID, Column, Consumes, Produces
from meshy.observe.runfolder import RunFolder
from meshy.queue.local import free_ports, local_queue
from meshy.queue.rows import Rows
from meshy.queue.sync import QueueClient
from meshy.recipe import Recipe, Sampling, ServiceConfig, ServiceGroup
from meshy.scoring.commands import Settle
from meshy.scoring.config import TeacherConfig
from meshy.service.context import Context
from meshy.topology import Gpu, derive_topology

CANDIDATES = "student_topk_ids"
WRITTEN = (UID, TOKENS, LOSS_MASK, N_TOKENS, Column(CANDIDATES, "int32", "jagged2d"))


@dataclass(frozen=True, kw_only=True)
class Writer(ServiceConfig):
    service: ClassVar[str] = "meshy.service:Service"
    rows: int

    def produces(self, recipe: Recipe) -> tuple[Produces, ...]:
        return (Produces(TRAIN, WRITTEN, creates=True),)

    def live_rows(self, recipe: Recipe) -> dict[str, int]:
        return {TRAIN: self.rows}


@dataclass(frozen=True, kw_only=True)
class Reader(ServiceConfig):
    service: ClassVar[str] = "meshy.service:Service"
    batch_size: int
    columns: tuple[str, ...]

    def consumes(self, recipe: Recipe) -> tuple[Consumes, ...]:
        return (Consumes(TRAIN, (UID, TOKENS, *self.columns), end=True),)


def recipe_of(model: str, rows: int, teacher: TeacherConfig | None = None) -> Recipe:
    teacher = teacher or TeacherConfig(scores=("candidates",))
    return Recipe(
        name="scoring",
        model=model,
        data="meshy.data.addition:addition",
        context_length=128,
        sampling=Sampling(max_new_tokens=64),
        groups=(
            ServiceGroup(id="teacher", config=teacher, gpus_per_replica=1),
            ServiceGroup(id="writer", config=Writer(rows=rows)),
            ServiceGroup(id="reader", config=Reader(batch_size=rows, columns=tuple(teacher.columns))),
        ),
    )


class Stage:
    """with Stage(recipe_of(...)) as stage: ..."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        from meshy.scoring.teacher import TeacherService

        torch.set_num_threads(1)
        enter = self._stack.enter_context
        topology = derive_topology(self.recipe, (Gpu(0, "127.0.0.1", 0, "cpu"),), 20_000)
        queue = enter(local_queue(topology.contract))
        replica = dataclasses.replace(topology.replica("teacher.0"), distributed_port=free_ports(1)[0])
        context = Context(
            run_id="stage",
            folder=RunFolder(Path(enter(tempfile.TemporaryDirectory())) / "run").make(),
            recipe=self.recipe,
            topology=topology,
            group=self.recipe.group("teacher"),
            replica=replica,
            process=replica.processes[0],
            model_folder=Path(self.recipe.model),
        )
        self.writer = enter(QueueClient(queue.endpoints, topology.contract, "writer.0"))
        self.reader = enter(QueueClient(queue.endpoints, topology.contract, "reader.0"))
        self.service = TeacherService(context)
        self.service.__dict__["queue"] = enter(QueueClient(queue.endpoints, topology.contract, "teacher.0"))
        self.service.setup()
        self._stack.callback(dist.destroy_process_group)
        for part in (self.service.writer, self.service.fetcher):
            assert part is not None
            self._stack.callback(part.close)
        self.intake = self.service.take_in()
        self._stack.callback(self.intake.close)
        self.taken: Rows | None = None
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def put(self, samples: Sequence[Any], name: int = 0) -> None:
        """samples: titan's, with their candidates."""
        self.writer.put(
            TRAIN,
            {
                "uid": [f"{name}.{i}" for i in range(len(samples))],
                "tokens": [sample.tokens for sample in samples],
                "loss_mask": [sample.loss_mask for sample in samples],
                "n_tokens": [len(sample.tokens) for sample in samples],
                CANDIDATES: [sample.columns[CANDIDATES] for sample in samples],
            },
        )

    def score_all(self, rows: int) -> None:
        """As `lead` does it, until so many rows are scored and written."""
        done = 0
        while done < rows:
            portion = self.intake.next()
            self.service.one(portion)
            done += len(portion.rows)
        self.service.command(Settle())

    def read(self, rows: int) -> dict[str, Any]:
        self.taken = self.reader.take(TRAIN, at_least=rows, timeout=20)
        return self.reader.read(self.taken)

    def clear(self) -> None:
        """All rows, which must be scored."""
        rows = self.taken or self.reader.take(TRAIN, timeout=20)
        self.reader.clear(rows)
        self.taken = None
