"""What the end-to-end tests share: the queue's processes, the engine's admin calls, and a trainer that only counts."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerFast  # noqa: F401 - here, for threads must not import it at once

from meshy.columns import TRAIN
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
from meshy.training.inbox import LEADER_COLUMNS, Group, Inbox, rows_of

HOST = "127.0.0.1"
RUN_ID = "rollout-tests"
DEADLINE = 60.0


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
        """New weights, as a trainer gives them: what is running goes on with them."""
        self.pause()
        told = self._call("/update_weights_from_disk", {"model_path": folder, "weight_version": str(version)})
        self.go_on()
        assert told["success"], told

    def pause(self) -> None:
        """What is running waits until `go_on`."""
        self._call("/pause_generation", {"mode": "retract"})

    def go_on(self) -> None:
        self._call("/continue_generation", {})

    def running(self) -> int:
        """Requests that are being answered now."""
        return self._call("/v1/loads")["loads"][0]["num_running_reqs"]

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return json.load(answer)


@dataclass
class Trained:
    """What the trainer has seen: the rows of each batch, how many rows were too old to be trained, the evaluations, and
    the run's folder. service: of the first replica."""

    folder: RunFolder
    batches: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0
    evaluations: list[dict[str, float]] = field(default_factory=list)
    services: list[RolloutService] = field(default_factory=list)

    @property
    def service(self) -> RolloutService:
        return self.services[0]

    @property
    def positions(self) -> list[list[int]]:
        """The distinct positions of each batch, sorted."""
        return [sorted(set(batch["position"].tolist())) for batch in self.batches]

    @property
    def versions(self) -> list[list[list[int]]]:
        """By batch and row, the weight version of each token that the policy wrote."""
        return [
            [
                versions[mask].tolist()
                for versions, mask in zip(batch["token_versions"], batch["loss_mask"], strict=True)
            ]
            for batch in self.batches
        ]

    @property
    def trajectories(self) -> list[dict[str, Any]]:
        return read_jsonl(self.folder.trajectories)


class Trainer:
    """The trainer's hands: its queue and the engine."""

    def __init__(self, queue: QueueClient, engine: Engine, topology: Topology) -> None:
        self.queue, self.engine, self.topology = queue, engine, topology

    def gate(self, incarnation: str, step: int, version: int, retired: int, stop: bool) -> None:
        row = {
            "uid": f"{incarnation}.{step}",
            "incarnation": incarnation,
            "gate_step": step,
            "weight_version": version,
            "samples_retired": retired,
            "stop": stop,
        }
        self.queue.put("gen_gate", {name: [value] for name, value in row.items()})

    def take(
        self, partition: str, check: Callable[[], None], count: int, consumer: str | None, most: int | None
    ) -> Rows:
        """`check` raises if rollout has failed."""
        for _ in range(int(DEADLINE / 0.5)):
            check()
            try:
                return self.queue.take(partition, consumer, at_least=count, at_most=most, timeout=0.5)
            except QueueTimeout as timeout:
                last = timeout
        raise last

    def evaluations(self) -> list[dict[str, float]]:
        try:
            rows = self.queue.take("eval", "evaluations", timeout=0)
        except QueueTimeout:
            return []
        columns: dict[str, Any] = self.queue.read(rows)
        self.queue.clear(rows)
        return [{name: values[i].item() for name, values in columns.items() if name != "uid"} for i in range(len(rows))]

    def clear_all(self) -> None:
        """Leave nothing of a run to the next one (but gates that were never acknowledged)."""
        for partition, consumer in (("train", None), ("gen_gate", "gates"), ("eval", "evaluations")):
            try:
                self.queue.clear(self.queue.take(partition, consumer, timeout=0))
            except QueueTimeout:
                continue  # nothing there


class Lead:
    """The trainer's part in one run: it takes whole groups, clears them, has the engine serve the next version, and
    writes its gate. A test calls `run`, or plays another way with the rest. check: raises if rollout has failed."""

    def __init__(
        self, trainer: Trainer, incarnation: str, recipe: Recipe, trained: Trained, check: Callable[[], None]
    ) -> None:
        self.trainer, self.incarnation, self.recipe, self.trained, self.check = (
            trainer, incarnation, recipe, trained, check,
        )  # fmt: skip
        self.inbox = Inbox()
        self.version = self.gates = 0

    def run(self, steps: int | None = None, before_gate: Callable[[int], None] = lambda version: None) -> None:
        """To the stop gate after `steps` batches (all), and its acknowledgement."""
        steps = self.recipe.steps if steps is None else steps
        for version in range(steps + 1):
            if version > 0:
                self.train()
            self.serve(version)
            before_gate(version)
            self.gate(stop=version == steps)
        self.end()

    def serve(self, version: int) -> None:
        self.trainer.engine.load(self.recipe.model, version)
        self.version = version

    def gate(self, *, stop: bool = False) -> None:
        retired = self.version * self.recipe.batch_size + self.trained.dropped
        self.trainer.gate(self.incarnation, self.gates, self.version, retired, stop)
        self.gates += 1

    def train(self) -> None:
        """Take and clear the batch of the version that is served."""
        rows = rows_of(self.collect())
        self.trained.batches.append(self.trainer.queue.read(rows))
        self.trainer.queue.clear(rows)

    def collect(self) -> list[Group]:
        """The groups of a batch. Those that are too old on the way there are dropped."""
        bound = self.recipe.max_staleness
        while (groups := self.inbox.take(self.version, self.recipe.batch_size)) is None:
            self.receive()
            if bound is not None and (old := self.inbox.drop_older(self.version - bound)):
                self.drop(old)
        return groups

    def receive(self) -> None:
        """Wait for rows."""
        rows = self.trainer.take(TRAIN, self.check, 1, None, None)
        columns = self.trainer.queue.read(rows, LEADER_COLUMNS)
        self.inbox.add(rows, {name: plain(values) for name, values in columns.items()}, [0] * len(rows))

    def drop(self, groups: list[Group]) -> None:
        rows = rows_of(groups)
        self.trainer.queue.clear(rows)
        self.trained.dropped += len(rows)
        self.gate()

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            self.check()
            assert time.monotonic() < end, f"not within {DEADLINE} s; rollout is {self.trained.service.health()}"
            time.sleep(0.002)

    def end(self) -> None:
        """The stop gate was written: every reader acknowledges all."""
        self.trainer.queue.clear(self.trainer.take("gen_gate", self.check, self.gates, "gates", self.gates))
        self.trained.evaluations = self.trainer.evaluations()

    def leave(self) -> None:
        """Clear what was taken and not trained."""
        for group in (*self.inbox.groups.values(), *self.inbox._open.values()):
            self.trainer.queue.clear(rows_of([group]))


def plain(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)


@contextmanager
def trainer_of(topology: Topology, engine: Engine, folder: Path) -> Iterator[Trainer]:
    """A trainer with a queue of its own."""
    endpoints = queue_endpoints(topology, RUN_ID)
    with queue_processes(topology, folder), QueueClient(endpoints, topology.contract, "trainer.0") as queue:
        yield Trainer(queue, engine, topology)


class Play:
    """Runs every replica of rollout in a thread, with the real queue and engine, and plays the trainer.

    service: the first replica that runs, or ran last.
    """

    service: RolloutService

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder
        self._runs = itertools.count()

    def context(self, recipe: Recipe, folder: Path, replica: int) -> Context:
        stage = self.trainer.topology
        topology = replace(topology_of(recipe, stage.base_port), contract=stage.contract)
        placed = topology.replica(f"rollout.{replica}")
        return Context(
            run_id=RUN_ID,
            folder=RunFolder(folder).make(),
            recipe=recipe,
            topology=topology,
            group=recipe.group("rollout"),
            replica=placed,
            process=placed.leader,
            model_folder=Path(recipe.model),
        )

    def run(
        self,
        recipe: Recipe,
        steps: int | None = None,
        before_gate: Callable[[int], None] = lambda version: None,
        script: Callable[[Lead], None] | None = None,
    ) -> Trained:
        """Rollout and trainer to the stop gate. script: what the trainer does; else it trains `steps` batches (all).
        Whatever rollout raises is raised here."""
        run = next(self._runs)
        folder = self.folder / str(run)
        indexes = range(recipe.group("rollout").replicas)
        services = [RolloutService(self.context(recipe, folder, index)) for index in indexes]
        self.service = services[0]
        trained = Trained(self.service.context.folder, services=services)
        failures: list[BaseException] = []

        def check() -> None:
            if failures:
                raise failures[0]

        lead = Lead(self.trainer, f"run{run}", recipe, trained, check)
        threads = [threading.Thread(target=perform, args=(service, failures)) for service in services]
        for thread in threads:
            thread.start()
        ended = False
        try:
            lead.run(steps, before_gate) if script is None else script(lead)
            ended = True
        finally:
            if not ended and len(failures) < len(services):
                lead.gate(stop=True)
            for thread, service in zip(threads, services, strict=True):
                thread.join(DEADLINE)
                assert not thread.is_alive(), f"rollout did not end; it is {service.health()}"
            lead.leave()
            self.trainer.clear_all()
            check()
        return trained


def perform(service: RolloutService, failures: list[BaseException]) -> None:
    try:
        service.setup()
        service.run()
    except BaseException as error:  # noqa: BLE001  (raised in the test's own thread)
        failures.append(error)
    finally:
        service.close()
        service.timeline.close()
