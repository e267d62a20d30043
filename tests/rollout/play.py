"""What the end-to-end tests share: the queue's processes, the engine's admin calls, and a trainer that only counts."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshy.observe.jsonl import read_jsonl
from meshy.observe.runfolder import RunFolder
from meshy.queue.admin import wait_until_ready
from meshy.queue.errors import QueueTimeout
from meshy.queue.rows import Rows
from meshy.queue.sync import QueueClient
from meshy.recipe import Recipe
from meshy.rollout.service import RolloutService
from meshy.service.context import Context, queue_endpoints
from meshy.topology import Gpu, Topology, derive_topology

HOST = "127.0.0.1"
RUN_ID = "rollout-tests"
DEADLINE = 30.0


def topology_of(recipe: Recipe, base_port: int) -> Topology:
    return derive_topology(recipe, (Gpu(0, HOST, 0, "cpu"),), base_port)


@contextmanager
def queue_processes(topology: Topology, folder: Path) -> Iterator[None]:
    """The run's queue, where the topology places it."""
    endpoints = queue_endpoints(topology, RUN_ID)
    (folder / "endpoints.json").write_text(json.dumps(endpoints.to_json()))
    (folder / "contract.json").write_text(json.dumps(topology.contract.to_json()))
    command = [sys.executable, "-m", "meshy.queue.server", *endpoints.roles]
    command += ["--endpoints", str(folder / "endpoints.json"), "--contract", str(folder / "contract.json")]
    process = subprocess.Popen(command)
    try:
        wait_until_ready(endpoints, DEADLINE)
        yield
    finally:
        process.terminate()
        process.wait(10)


@dataclass(frozen=True)
class Engine:
    url: str

    def load(self, folder: str, version: int) -> None:
        body = json.dumps({"model_path": folder, "weight_version": str(version)}).encode()
        request = urllib.request.Request(
            f"{self.url}/update_weights_from_disk", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            assert json.load(answer)["success"]


@dataclass
class Trained:
    """What the trainer has seen: the rows of each batch, the evaluations, and the run's folder."""

    folder: RunFolder
    batches: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    service: RolloutService | None = None

    @property
    def positions(self) -> list[list[int]]:
        """The distinct positions of each batch, sorted."""
        return [sorted(set(batch["position"].tolist())) for batch in self.batches]

    @property
    def trajectories(self) -> list[dict[str, Any]]:
        return read_jsonl(self.folder.trajectories)


class Trainer:
    """Takes whole batches, clears them, has the engine serve the next version, and writes its gate."""

    def __init__(self, queue: QueueClient, engine: Engine) -> None:
        self.queue, self.engine = queue, engine

    def train(
        self,
        incarnation: str,
        recipe: Recipe,
        steps: int,
        trained: Trained,
        check: Callable[[], None],
        before_gate: Callable[[int], None] = lambda step: None,
    ) -> None:
        """To the stop gate after `steps` batches and its acknowledgement. `check` raises if rollout has failed."""
        self.engine.load(recipe.model, 0)
        for step in range(steps + 1):
            if step > 0:
                rows = self._take("train", check, recipe.batch_size)
                trained.batches.append(self.queue.read(rows))
                self.queue.clear(rows)
                self.engine.load(recipe.model, step)
            before_gate(step)
            self.gate(incarnation, step, step * recipe.batch_size, stop=step == steps)
        self.queue.clear(self._take("gen_gate", check, steps + 1, "gates"))  # complete once each is acknowledged
        trained.evaluations = self._evaluations()

    def gate(self, incarnation: str, step: int, retired: int, stop: bool) -> None:
        row = {
            "uid": f"{incarnation}.{step}",
            "incarnation": incarnation,
            "gate_step": step,
            "weight_version": step,
            "samples_retired": retired,
            "stop": stop,
        }
        self.queue.put("gen_gate", {name: [value] for name, value in row.items()})

    def _take(self, partition: str, check: Callable[[], None], count: int, consumer: str | None = None) -> Rows:
        for _ in range(int(DEADLINE / 0.5)):
            check()
            try:
                return self.queue.take(partition, consumer, at_least=count, at_most=count, timeout=0.5)
            except QueueTimeout as timeout:
                last = timeout
        raise last

    def _evaluations(self) -> list[dict[str, float]]:
        try:
            rows = self.queue.take("eval", "evaluations", timeout=0)
        except QueueTimeout:
            return []
        columns: dict[str, Any] = self.queue.read(rows)
        self.queue.clear(rows)
        return [{name: values[i].item() for name, values in columns.items() if name != "uid"} for i in range(len(rows))]

    def clear_all(self) -> None:
        """Leave nothing of a failed run to the next one (but gates that it never acknowledged)."""
        for partition, consumer in (("train", None), ("gen_gate", "gates"), ("eval", "evaluations")):
            try:
                self.queue.clear(self.queue.take(partition, consumer, timeout=0))
            except QueueTimeout:
                continue  # nothing there


@contextmanager
def trainer_of(topology: Topology, engine: Engine, folder: Path) -> Iterator[Trainer]:
    """A trainer with a queue of its own."""
    endpoints = queue_endpoints(topology, RUN_ID)
    with queue_processes(topology, folder), QueueClient(endpoints, topology.contract, "trainer.0") as queue:
        yield Trainer(queue, engine)


class Play:
    """Runs a RolloutService in a thread, with the real queue and engine, and plays the trainer.

    service: the one that runs, or ran last.
    """

    service: RolloutService

    def __init__(self, base_port: int, trainer: Trainer, folder: Path) -> None:
        self.base_port, self.trainer, self.folder = base_port, trainer, folder
        self._runs = itertools.count()

    def context(self, recipe: Recipe, folder: Path) -> Context:
        topology = topology_of(recipe, self.base_port)
        replica = topology.replica("rollout.0")
        return Context(
            run_id=RUN_ID,
            folder=RunFolder(folder).make(),
            recipe=recipe,
            topology=topology,
            group=recipe.group("rollout"),
            replica=replica,
            process=replica.leader,
            model_folder=Path(recipe.model),
        )

    def run(
        self, recipe: Recipe, steps: int | None = None, before_gate: Callable[[int], None] = lambda step: None
    ) -> Trained:
        """Rollout and trainer to the stop gate after `steps` batches (all). Whatever rollout raises is raised here."""
        run = next(self._runs)
        service = self.service = RolloutService(self.context(recipe, self.folder / str(run)))
        trained = Trained(service.context.folder, service=service)
        failure: list[BaseException] = []

        def perform() -> None:
            try:
                service.setup()
                service.run()
            except BaseException as error:  # noqa: BLE001  (raised in the test's own thread below)
                failure.append(error)
            finally:
                service.close()
                service.timeline.close()

        def check() -> None:
            if failure:
                raise failure[0]

        steps = recipe.steps if steps is None else steps
        thread = threading.Thread(target=perform, name="rollout")
        thread.start()
        try:
            self.trainer.train(f"run{run}", recipe, steps, trained, check, before_gate)
        finally:
            thread.join(DEADLINE)
            assert not thread.is_alive(), f"rollout did not end; it is {service.health()}"
            if failure:
                self.trainer.clear_all()
                check()
        return trained
